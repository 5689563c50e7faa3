"""Attention layers and the rows of a step, for every case that attends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bough.kernels.attention import (
    triton_backend as backend,
)
from bough.kernels.attention.inputs import (
    AttentionInputs,
    AttentionSpec,
    HostLengths,
)
from bough.kernels.attention.plan import Shape
from bough.kernels.kv_codes import Ranges, encode
from triton_cases.bed import Bed


def layer_of(num_heads: int, num_kv_heads: int, head_dim: int, *, scale: float = 0.2, **more: Any) -> AttentionSpec:
    """An attention layer."""
    return AttentionSpec(
        **{"layer": 0, **more}, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
    )


def with_sinks(bed: Bed, layer: AttentionSpec) -> AttentionSpec:
    """The layer with a logit beside each head's scores, and with scores that grow with a key's position."""
    sinks, slopes = bed.normal(2, layer.num_heads).unbind()
    return replace(layer, sinks=2 * sinks.contiguous(), slopes=0.1 * slopes.abs())


def attention_inputs(
    bed: Bed,
    rows: list[tuple[int, int]],
    spec: AttentionSpec,
    page: int,
    cache_dtype: torch.dtype,
    *,
    pad_rows: int = 2,
    pad_tokens: int = 3,
    bits: int = 0,
) -> AttentionInputs:
    """Rows of (queries, context) over pages in random order; padded rows and tokens follow. `bits`: of codes in the
    caches."""
    query, context = [row[0] for row in rows], [row[1] for row in rows]
    lengths = [a + b for a, b in rows]
    counts = [-(-length // page) for length in lengths]
    order = iter(np.random.permutation(sum(counts)) + 1)
    table = np.zeros((len(rows) + 4, max(counts) + 1), np.int32)
    slots = np.random.permutation(len(rows) + 4)[: len(rows)]
    locations: list[int] = []
    for slot, (num_query, before), count in zip(slots, rows, counts, strict=True):
        table[slot, :count] = [next(order) for _ in range(count)]
        positions = range(before, before + num_query)
        locations += [int(table[slot, at // page]) * page + at % page for at in positions]
    num_pages, width = sum(counts) + 1, spec.head_dim
    caches = []
    for size in (width, spec.v_head_dim or width):
        cache = bed.normal(num_pages, page, spec.num_kv_heads, size)
        caches.append(cache.to(cache_dtype))
    if spec.latent:
        caches[1] = caches[0][..., : spec.v_head_dim]
    ranges: list[Ranges] = []
    if bits:
        caches, made = map(list, zip(*(encode(cache, bits) for cache in caches), strict=True))
        ranges = [Ranges(*made)]
    return AttentionInputs(
        query_start_R1=bed.ints(np.concatenate(([0], np.cumsum(query + [0] * pad_rows)))),
        kv_len_R=bed.ints(lengths + [0] * pad_rows),
        slots_R=bed.ints(list(slots) + [0] * pad_rows),
        page_table=bed.ints(table),
        loc_T=bed.ints(locations + [-1] * pad_tokens, torch.int64),
        page_size=page,
        max_query=max(query),
        max_kv=max(lengths),
        k_caches=[caches[0]],
        v_caches=[caches[1]],
        ranges=ranges,
        host=None if pad_rows else HostLengths(np.array(query, np.int32), np.array(context, np.int32)),
    )


def ragged(bed: Bed) -> list[tuple[int, int]]:
    """A mixture of decodes, short extends and longer ones."""
    rng, rows = bed.rng, []
    longest = 3000 if bed.large else 50
    for _ in range(rng.randrange(1, 40 if bed.large else 6)):
        num_query = rng.choice((1, 1, 1, rng.randrange(2, 9), rng.randrange(9, 400 if bed.large else 20)))
        rows.append((num_query, rng.choice((0, rng.randrange(1, longest)))))
    return rows


@contextmanager
def small_shapes(bed: Bed) -> Iterator[None]:
    """Small blocks on small inputs, so that rows are cut and merged there too."""
    names = ("DECODE", "MANY_DECODE", "EXTEND", "PREFILL", "SHARED")
    before = {name: vars(backend)[name] for name in names}
    try:
        if not bed.large:
            for name in names:
                shape: Shape = before[name]
                small = replace(shape, block_n=16, min_tokens=16, block_m=min(64, shape.block_m))
                setattr(backend, name, small)
        yield
    finally:
        for name in names:
            setattr(backend, name, before[name])
