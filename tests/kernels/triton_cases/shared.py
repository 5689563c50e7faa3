"""Attention of rows that share spans of pages."""

from functools import partial
from itertools import product

import numpy as np
import torch

from bough.kernels.attention import (
    reference as attention_reference,
    triton_backend as backend,
)
from bough.kernels.attention.inputs import (
    AttentionSpec,
    SpanTensors,
)
from triton_cases.bed import Bed, Cases, close, same_twice
from triton_cases.layers import attention_inputs, layer_of, small_shapes


def shared_cases(bed: Bed) -> Cases:
    spec = layer_of(32, 8, 128) if bed.large else layer_of(4, 2, 16)
    page = 16 if bed.large else 4
    unit = 40 * page if bed.large else 3 * page
    flat = [(3, unit, []), (2, 2 * unit, [])]
    many = [(2, page, []), (18, unit, [])]
    tree = [(1, unit, [(0, page, [(3, unit, []), (2, page, [])]), (2, 2 * unit, [])]), (2, unit, [])]
    kinds = {"flat": flat, "many": many, "tree": tree, "none": []}
    lengths = (1, 3, 9)
    for dtype, name, most in (
        bed.cover(bed.dtypes, list(kinds), lengths) if bed.large else product(bed.dtypes, kinds, lengths)
    ):
        if bed.large or (name == "tree") == (dtype == bed.dtypes[0]) == (most > 1):
            yield f"shared {name} {dtype} up to {most}", partial(_shared, bed, spec, page, kinds[name], dtype, most)
    for bits in (8, 4):
        yield f"shared tree of {bits} bits", partial(_shared, bed, spec, page, tree, bed.dtypes[-1], 3, bits)


_Tree = list[tuple[int, int, "_Tree"]]
"""Spans that follow a span: (rows that share no more, tokens, spans that follow)."""


def _shared(
    bed: Bed, spec: AttentionSpec, page: int, tree: _Tree, dtype: torch.dtype, most_query: int, bits: int = 0
) -> None:
    rng = bed.rng
    rows: list[tuple[int, int]] = []
    spans: list[tuple[int, int, int, list[int]]] = []

    def grow(tree: _Tree, level: int, first: int) -> list[int]:
        below = []
        for count, tokens, more in tree:
            mine = list(range(len(rows), len(rows) + count))
            rows.extend((rng.randrange(1, most_query + 1), first + tokens + rng.randrange(5 * page)) for _ in mine)
            mine += grow(more, level + 1, first + tokens)
            rng.shuffle(mine)
            spans.append((level, first, first + tokens, mine))
            below += mine
        return below

    grow(tree, 0, 0)
    spans.sort()
    span_tokens = sum(query for query, _ in rows)
    rows += [(1, rng.randrange(60)), (rng.randrange(2, 30), rng.randrange(60))]
    inputs = attention_inputs(bed, rows, spec, page, dtype, bits=bits)
    for _, first, last, members in spans:
        lines = inputs.slots_R[members].long()
        inputs.page_table[lines, first // page : last // page] = inputs.page_table[
            lines[0], first // page : last // page
        ]
    start = np.concatenate(([0], np.cumsum([len(members) for *_, members in spans] + [0, 0])))
    flat = [row for *_, members in spans for row in members]
    columns = [[span[n] for span in spans] + [0, 0] for n in range(3)]
    inputs.shared = SpanTensors(
        rows_M=bed.ints(flat + [0] * 5),
        start_S1=bed.ints(start),
        first_S=bed.ints(columns[1]),
        last_S=bed.ints(columns[2]),
        level_S=bed.ints(columns[0]),
        levels=rng.choice((3, 4)),
        num_tokens=max(1, rng.choice((span_tokens, inputs.num_tokens))),
    )
    q = bed.normal(inputs.num_tokens, spec.num_heads, spec.head_dim, dtype=dtype)
    kv = bed.normal(inputs.num_tokens, spec.num_kv_heads, spec.head_dim, dtype=dtype)
    inputs.host = rng.choice((inputs.host, None))
    with small_shapes(bed):
        runner = backend.TritonAttention(bed.device)
        runner.prepare(inputs)
        got = same_twice(lambda: runner.attend(spec, q, kv, kv))
        expected = attention_reference.paged_attention(q, inputs, spec).flatten(1)
        close(got, expected, dtype)
        close(runner.attend(spec, q), expected, dtype)  # of a layer that brings no keys and values
