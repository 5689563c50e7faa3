"""Every Triton kernel against its reference: one table of cases, run small by the interpreter and large on a GPU.

    TRITON_INTERPRET=1 python triton_cases.py OP,... SEED [few]        (the CPU; without the variable set, a GPU)

`few`: each shape, dtype and option at least once, not every combination of them.

Inputs are fresh random numbers of the seed; memory the kernels get from torch.empty is filled with NaN (or the largest
integer) first, so that what isn't written shows.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, product
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from random_codes import random_codes
from random_trees import tree_mask, tree_step
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.core.kv import Window
from bough.kernels.activation import reference as activation_reference, triton as activation
from bough.kernels.attention import (
    expanded,
    plan as planning,
    reference as attention_reference,
    triton_backend as backend,
)
from bough.kernels.attention.inputs import (
    AttentionInputs,
    AttentionSpec,
    HostLengths,
    IndexKeys,
    IndexQueries,
    LastRows,
    RawLatents,
    SpanTensors,
    TreeMask,
)
from bough.kernels.attention.plan import Kind, Plan, Shape
from bough.kernels.causal_conv import reference as conv_reference, triton as conv
from bough.kernels.delta_rule import reference as delta_reference, triton as delta
from bough.kernels.draft_tree import reference as tree_reference, triton as tree_triton
from bough.kernels.kv_codes import Ranges, encode
from bough.kernels.linear import reference as linear_reference, skinny
from bough.kernels.masks import cpu as masks_cpu, reference as masks_reference, triton as masks_triton
from bough.kernels.moe import Biases, Scoring, clamped_gate, reference as moe_reference, triton as moe
from bough.kernels.moe.grouping import group_tokens, round_rows, sum_parts
from bough.kernels.norm import reference as norm_reference, triton as norm
from bough.kernels.packed_linear import reference as packed_reference, triton as packed
from bough.kernels.packed_linear.codes import Codes
from bough.kernels.packed_linear.weight import FORMATS
from bough.kernels.packed_moe import reference as packed_moe_reference, triton as packed_moe
from bough.kernels.packed_moe.unpacked import add_biases, clamped_rows
from bough.kernels.pages import reference as pages_reference, triton as pages_triton
from bough.kernels.rotary import reference as rotary_reference, triton as rotary
from bough.kernels.sampling import reference as sampling_reference, triton as sampling
from bough.kernels.segment_attention import reference as segment_reference, triton as segments
from bough.kernels.selective_scan import reference as selective_reference, triton as selective
from bough.kernels.ssd import reference as ssd_reference, triton as ssd
from bough.kernels.step_end import reference as end_reference, triton as step_end
from bough.kernels.step_start import SlotState, reference as start_reference, triton as start

FLOAT8 = torch.float8_e4m3fn
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Bed:
    """The device, the size of the inputs, and whether every combination of the cases' axes runs."""

    device: torch.device
    large: bool
    rng: random.Random
    few: bool = False

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32) if self.large else (torch.float16, torch.float32)

    def pairs(self, first: Sequence[A], second: Sequence[B]) -> list[tuple[A, B]]:
        """Every pair on a GPU. For the interpreter, which is slow, every member of each once at least."""
        if self.large:
            return list(product(first, second))
        return [(first[at % len(first)], second[at % len(second)]) for at in range(max(len(first), len(second)))]

    def cover(self, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Every combination of the axes' members; with `few`, so few that every member occurs."""
        if not self.few:
            return list(product(*axes))
        longest = max(len(axis) for axis in axes)
        return [tuple(axis[at % len(axis)] for axis in axes) for at in range(longest)]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(dtype)

    def whole(self, *shape: int) -> Tensor:
        """Small whole numbers, whose sums are exact."""
        return torch.randint(-2, 3, shape, device=self.device).float()

    def ints(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=self.device)

    def strided(self, tokens: int, heads: tuple[int, ...], width: int, dtype: torch.dtype) -> list[Tensor]:
        """Views of one fused projection."""
        fused = self.normal(tokens, sum(heads) * width, dtype=dtype)
        return [part.unflatten(1, (-1, width)) for part in fused.split([count * width for count in heads], 1)]


Check = Callable[[], None]
Cases = Iterator[tuple[str, Check]]


@contextmanager
def poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Small relative to the whole, and nowhere wild."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    if not want.numel():
        return
    a, b = got.double().cpu(), want.double().cpu()
    assert not a.isnan().any(), "not a number"
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    error = float((a - b).norm() / b.norm().clamp(min=1e-12))
    assert error < limit, f"relative error {error:.2e}"
    worst = float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))
    assert worst < 5 * limit, f"worst entry off by {worst:.2e} of the largest"


def same_twice(function: Callable[[], Tensor]) -> Tensor:
    """The result, which a second run on a GPU must repeat bit for bit: a difference is a race. The interpreter runs one
    program after the other and has none."""
    with poison():
        first = function()
        if first.is_cuda:
            assert torch.equal(first, function()), "two runs differ"
    return first


def norm_cases(bed: Bed) -> Cases:
    for dtype in bed.dtypes:
        for width in (64, 200, 4096) if bed.large else (64, 200):
            for tokens in (1, 7, 300) if bed.large else (1, 5):
                yield f"rms_norm {tokens}x{width} {dtype}", partial(_norm, bed, tokens, width, dtype)


def _norm(bed: Bed, tokens: int, width: int, dtype: torch.dtype) -> None:
    wide = bed.normal(tokens, 2 * width, dtype=dtype)
    x, residual, weight = wide[:, :width], bed.normal(tokens, width, dtype=dtype), bed.normal(width, dtype=dtype)
    offset = bed.rng.choice((0.0, 1.0))
    got = same_twice(lambda: norm.rms_norm(x, weight, 1e-5, offset=offset))
    close(got, norm_reference.rms_norm(x, weight, 1e-5, offset=offset), dtype)
    parts = bed.normal(2, tokens, width, dtype=dtype)
    for added in (x, parts):
        with poison():
            sums = norm.add_rms_norm(added, residual, weight, 1e-5, offset=offset)
        for a, b in zip(sums, norm_reference.add_rms_norm(added, residual, weight, 1e-5, offset=offset), strict=True):
            close(a, b, dtype)
    total = parts[0].double() + parts[1].double() + residual.double()
    close(sums[1], total.to(dtype), dtype)


def activation_cases(bed: Bed) -> Cases:
    for dtype in bed.dtypes:
        for width in (40, 1500, 14336) if bed.large else (40, 1100):
            for name in ("silu_mul", "gelu_tanh_mul"):
                yield f"{name} {width} {dtype}", partial(_activation, bed, name, width, dtype)


def _activation(bed: Bed, name: str, width: int, dtype: torch.dtype) -> None:
    x = bed.normal(9 if bed.large else 3, 2 * width, dtype=dtype, scale=3.0)
    got = same_twice(lambda: vars(activation)[name](x))
    close(got, vars(activation_reference)[name](x), dtype)


def rotary_cases(bed: Bed) -> Cases:
    widths = ((128, 128), (128, 64), (80, 32)) if bed.large else ((32, 32), (32, 8), (24, 12))
    groups = ((32, 8), (28, 4), (3, 1)) if bed.large else ((4, 2), (9, 3))
    for dtype, (width, rotated), (heads, kv_heads), interleaved in bed.cover(bed.dtypes, widths, groups, (False, True)):
        cache = bed.rng.choice((dtype, FLOAT8))
        name = f"rope {heads}/{kv_heads}x{width}:{rotated} {dtype} cache {cache} interleaved {interleaved}"
        yield name, partial(_rotary, bed, heads, kv_heads, width, rotated, dtype, cache, interleaved)


def _rotary(
    bed: Bed,
    heads: int,
    kv_heads: int,
    width: int,
    rotated: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    interleaved: bool,
) -> None:
    tokens, page, pages = (70, 16, 9) if bed.large else (5, 4, 4)
    q, k, v = bed.strided(tokens, (heads, kv_heads, kv_heads), width, dtype)
    positions = torch.randint(0, 50, (tokens,), device=bed.device)
    table = bed.normal(50, rotated)
    q_weight, k_weight = bed.normal(width, dtype=dtype), bed.normal(width, dtype=dtype)
    style = {"interleaved": interleaved}
    for a, b in zip(
        rotary.apply_rope(q, k, positions, table, **style),
        rotary_reference.apply_rope(q, k, positions, table, **style),
        strict=True,
    ):
        close(a, b, dtype)
    norms = (q_weight, k_weight, 1e-5)
    for a, b in zip(
        rotary.qk_norm_rope(q, k, *norms, positions, table, **style),
        rotary_reference.qk_norm_rope(q, k, *norms, positions, table, **style),
        strict=True,
    ):
        close(a, b, dtype)

    loc = torch.randperm(page * pages, device=bed.device)[:tokens]
    loc[::4] = -1
    scales = {"k_scale": 2.0, "v_scale": 0.5} if cache_dtype == FLOAT8 else {}
    mine = [torch.ones(pages, page, kv_heads, width, device=bed.device).to(cache_dtype) for _ in range(2)]
    theirs = [cache.clone() for cache in mine]
    norm_weights = (q_weight, k_weight, 1e-5, 1.0) if bed.rng.random() < 0.5 else ()
    first = q[: bed.rng.choice([0, 1, tokens - 1, tokens])]
    with poison():
        got = rotary.rope_and_write(first, k, v, positions, table, *mine, loc, *norm_weights, **style, **scales)
    want = rotary_reference.rope_and_write(
        first, k, v, positions, table, *theirs, loc, *norm_weights, **style, **scales
    )
    for a, b in zip(got, want, strict=True):
        close(a, b, dtype)
    assert torch.equal(mine[1].view(torch.uint8), theirs[1].view(torch.uint8)), "v was not written as it is"
    if cache_dtype != FLOAT8 or bed.large:
        limit_dtype = dtype if cache_dtype == dtype else torch.bfloat16
        error = (mine[0].float() - theirs[0].float()).norm() / theirs[0].float().norm()
        assert error < (2e-2 if cache_dtype == FLOAT8 else 5e-3), (error, limit_dtype)
    rotary.write_kv(v, v, *mine, loc)
    rotary_reference.write_kv(v, v, *theirs, loc)
    assert torch.equal(mine[0].view(torch.uint8), theirs[0].view(torch.uint8))
    _write_codes(bed, k, v, (pages, page), loc, bed.rng.choice((8, 4)))


def _write_codes(bed: Bed, k: Tensor, v: Tensor, pages: tuple[int, int], loc: Tensor, bits: int) -> None:
    """Codes and ranges of tokens, as they are and rotated by nothing, and of vectors without a width."""
    k, v = k.clone(), v.clone()
    k[1], v[1] = 3.0, 0.0
    v[2] *= 1e-20
    kept = []
    for written in (rotary, rotary_reference):
        codes = [
            torch.zeros(*pages, *x.shape[1:-1], x.shape[-1] * bits // 8, device=bed.device).to(torch.uint8)
            for x in (k, v)
        ]
        ranges = Ranges(*(torch.zeros(*pages, x.shape[1], dtype=torch.int32, device=bed.device) for x in (k, v)))
        flat = torch.cat(
            (torch.ones(1, k.shape[2] // 4, device=bed.device), torch.zeros(1, k.shape[2] // 4, device=bed.device)), 1
        )
        written.write_kv(k, v, *codes, loc, ranges=ranges)
        written.rope_and_write(k[:1], k, v, torch.zeros_like(loc), flat, *codes, loc, ranges=ranges)
        kept += [(*codes, *ranges)]
    for mine, theirs in zip(*kept, strict=True):
        differs = (mine.long() - theirs.long()).abs().float()
        assert (differs > 0).float().mean() < (0.01 if bed.large else 1e-6), (
            "codes or ranges are not those of the reference"
        )


def linear_cases(bed: Bed) -> Cases:
    if bed.large:
        shapes = [(1, 4096, 4096), (3, 6144, 4096), (16, 4096, 14336), (33, 28672, 4096), (64, 6144, 4096)]
        shapes += [(128, 4096, 4096), (200, 4096, 4096), (5, 1000, 2000), (17, 1111, 264)]
        configs = [
            skinny.SkinnyTiling(64, 128, 4, 4, 2, tma=True),
            skinny.SkinnyTiling(64, 128, 4, 4, 1),
            skinny.SkinnyTiling(16, 256, 4, 3, 3),
            skinny.SkinnyTiling(128, 64, 8, 3, 0, tma=True),
            skinny.SkinnyTiling(32, 64, 4, 3, 0, split=3),
        ]
    else:
        shapes = [(1, 64, 128), (3, 96, 200), (17, 130, 64)]
        configs = [
            skinny.SkinnyTiling(32, 32, 4, 3, 1),
            skinny.SkinnyTiling(16, 64, 4, 3, 2),
            skinny.SkinnyTiling(64, 32, 4, 3, 0, split=2),
            skinny.SkinnyTiling(16, 32, 4, 3, 0),
        ]
    for dtype, shape, config in bed.cover(bed.dtypes[:2], shapes, configs):
        if not bed.large or _fits(shape[0], config):
            yield f"skinny {shape} {config} {dtype}", partial(_linear, bed, shape, config, dtype)


def _fits(tokens: int, config: skinny.SkinnyTiling) -> bool:
    """Whether the tiles in flight fit into a multiprocessor's shared memory."""
    return 2 * config.num_stages * config.block_k * (config.block_n + max(16, 1 << (tokens - 1).bit_length())) < 220_000


def _linear(bed: Bed, shape: tuple[int, int, int], config: skinny.SkinnyTiling, dtype: torch.dtype) -> None:
    tokens, rows, depth = shape
    x = bed.normal(tokens, 2 * depth, dtype=dtype)[:, :depth]
    weight = bed.normal(rows, depth, dtype=dtype, scale=2.0 * depth**-0.5)
    bias = bed.normal(rows, dtype=dtype)
    exact = weight.float() if bed.large else weight
    upcast = x.float() if bed.large else x
    run = partial(skinny.skinny, x, weight, config)
    close(same_twice(run), linear_reference.linear(upcast, exact).to(dtype), dtype)
    got = same_twice(partial(run, bias=bias))
    close(got, linear_reference.linear(upcast, exact, bias.to(exact.dtype)).to(dtype), dtype)
    if rows % 2 == 0 and tokens <= 64:
        got = same_twice(partial(run, silu_mul=True))
        close(got, linear_reference.linear_silu_mul(upcast, exact).to(dtype), dtype)


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


def attention_cases(bed: Bed) -> Cases:
    layers = (
        [
            layer_of(32, 8, 128),
            layer_of(28, 4, 128),
            layer_of(8, 8, 64),
            layer_of(16, 1, 256),
            layer_of(6, 2, 80, v_head_dim=48),
        ]
        if bed.large
        else [layer_of(4, 2, 16), layer_of(3, 1, 24, v_head_dim=8)]
    )
    kinds = ("plain", "window", "softcap", "both ways", "chunk", "sinks and slopes")
    for dtype, layer, kind in bed.cover(bed.dtypes, layers, kinds):
        page = bed.rng.choice((1, 16, 32, 64, 128) if bed.large else (1, 4, 16, 32))
        cache = FLOAT8 if bed.large and kind == "plain" and bed.rng.random() < 0.5 else dtype
        spec = {
            "plain": layer,
            "window": replace(layer, window=bed.rng.randrange(5, 60)),
            "softcap": replace(layer, softcap=5.0),
            "both ways": replace(layer, causal=False),
            "chunk": replace(layer, chunk=bed.rng.randrange(5, 60)),
            "sinks and slopes": with_sinks(bed, layer),
        }[kind]
        name = f"attention {kind} {layer} page {page} {dtype} cache {cache}"
        yield name, partial(_attention, bed, spec, page, dtype, cache)
    for dtype in bed.dtypes:
        latents = (
            layer_of(16, 1, 576, v_head_dim=512, latent=True)
            if bed.large
            else layer_of(3, 1, 24, v_head_dim=16, latent=True)
        )
        yield f"attention {latents} {dtype}", partial(_attention, bed, latents, 32, dtype, dtype)
    for page, window in ((1, None), (16, 9), (64, None)):
        spec = layer_of(6, 2, 32, window=window)
        yield (
            f"attention of trees page {page}",
            partial(_attention, bed, spec, page, bed.dtypes[0], bed.dtypes[0], trees=True),
        )

    for bits, kind in bed.cover((8, 4), ("plain", "window", "chunk", "trees")):
        layer = bed.rng.choice([layer_of(32, 8, 128), layer_of(6, 2, 80, v_head_dim=48)] if bed.large else layers)
        bound = {"window": 23} if kind == "window" else {"chunk": 23} if kind == "chunk" else {}
        page = bed.rng.choice((1, 16, 64) if bed.large else (1, 4, 16))
        run = partial(
            _attention, bed, replace(layer, **bound), page, bed.dtypes[-1], bed.dtypes[-1], trees=kind == "trees"
        )
        yield f"attention {kind} {layer} page {page} {bits} bits", partial(run, bits=bits)


def _ragged(bed: Bed) -> list[tuple[int, int]]:
    """A mixture of decodes, short extends and longer ones."""
    rng, rows = bed.rng, []
    longest = 3000 if bed.large else 50
    for _ in range(rng.randrange(1, 40 if bed.large else 6)):
        num_query = rng.choice((1, 1, 1, rng.randrange(2, 9), rng.randrange(9, 400 if bed.large else 20)))
        rows.append((num_query, rng.choice((0, rng.randrange(1, longest)))))
    return rows


def _attention(
    bed: Bed,
    spec: AttentionSpec,
    page: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    *,
    trees: bool = False,
    bits: int = 0,
) -> None:
    with small_shapes(bed):
        rows = _ragged(bed)
        inputs = attention_inputs(bed, rows, spec, page, cache, pad_rows=bed.rng.choice((0, 2)), bits=bits)
        tokens = inputs.num_tokens
        if trees:
            mask, _ = tree_mask(bed.rng, rows, tokens)
            inputs.tree = TreeMask(*(getattr(mask, each.name).to(bed.device) for each in fields(mask)))
        heads = (spec.num_heads, spec.num_kv_heads)
        q, k = bed.strided(tokens, heads, spec.head_dim, dtype)
        v = bed.normal(tokens, spec.num_kv_heads, spec.v_head_dim or spec.head_dim).to(cache).to(dtype)
        k = k.float().to(cache).to(dtype) if cache == FLOAT8 else k
        v = k[..., : spec.v_head_dim] if spec.latent else v
        runner = backend.TritonAttention(bed.device)
        runner.prepare(inputs)
        got = same_twice(lambda: runner.forward(spec, q, k, v))
        want = attention_reference.forward(spec, inputs, q, k, v)
        close(got, want, dtype)
        assert not got[sum(row[0] for row in rows) :].any(), "padding must be zero"
        if (spec.window or spec.chunk) and cache != FLOAT8:
            spoil_passed(inputs, rows, spec)
            close(runner.forward(spec, q, k, v), want, dtype)


def spoil_passed(inputs: AttentionInputs, rows: list[tuple[int, int]], spec: AttentionSpec) -> None:
    """Pages that lie before every window are other rows' by now, and hold what isn't a number."""
    bound = spec.chunk or spec.window or 0
    window = Window(bound, chunked=spec.chunk is not None)
    for slot, (_, context) in zip(inputs.slots_R.tolist(), rows, strict=False):
        for column in range(window.first_needed(context) // inputs.page_size):
            page = int(inputs.page_table[slot, column])
            for each in inputs.ranges[0] if inputs.ranges else (inputs.k_caches[0], inputs.v_caches[0]):
                each[page] = -1 if inputs.ranges else float("nan")  # ranges of these bits are no numbers


def plan_cases(bed: Bed) -> Cases:
    counts = (1, 7, 64, 100, 256, 300, 1024, 1500) if bed.large else (1, 5, 70, 260)
    for longest in (40, 900, 30_000):
        for count, rows in bed.cover(counts, ("decode", "short", "any", "prefixed")):
            yield f"plan {count} {rows} rows up to {longest}", partial(_plan, bed, count, rows, longest)


def _plan(bed: Bed, count: int, rows: str, longest: int) -> None:
    """Work lists against a model of them in plain Python, whichever kernel makes them."""
    rng = bed.rng
    kv_heads, group = rng.choice((1, 2, 8)), rng.choice((1, 4))
    kind = Kind(kv_heads * group, kv_heads, rng.choice((None, 50)) if rows != "prefixed" else None, rng.random() < 0.8)
    block_n, few = 64 if bed.large else rng.choice((16, 64)), rng.random() < 0.3
    shape = Shape(16, block_n, 4, 2, rng.choice((1, 4)), min_tokens=rng.choice((16, 320)), may_align=not few)
    per_tile = shape.block_m // group
    most = {"decode": 1, "short": min(4, per_tile), "any": 2**30, "prefixed": 1}[rows]
    least, fresh_from = (rng.choice((1, 3)), rng.choice((30, 2**30))) if rows == "any" else (1, 2**30)
    lengths = [(rng.choice((1, 1, rng.randrange(0, 60)) if rows != "decode" else (1,)), 0) for _ in range(count)]
    lengths = [(query, rng.choice((0, 1, longest - 1, rng.randrange(longest)))) for query, _ in lengths]
    lengths += [(0, 0)] * rng.choice((0, 3))
    prefix = [rng.choice((0, context // block_n * block_n)) for _, context in lengths] if rows == "prefixed" else None
    spans = [rng.randrange(1, 4) if each else 0 for each in prefix or [0] * len(lengths)]
    start = np.concatenate(([0], np.cumsum([query for query, _ in lengths])))
    slots = np.random.permutation(len(lengths))
    inputs = AttentionInputs(
        query_start_R1=bed.ints(start),
        kv_len_R=bed.ints([sum(row) for row in lengths]),
        slots_R=bed.ints(slots),
        page_table=bed.ints([[0]]),
        loc_T=bed.ints([0] * (int(start[-1]) + 2), torch.int64),
        page_size=64,
        max_query=60,
        max_kv=longest + 60,
        k_caches=[],
        v_caches=[],
    )
    covered = zip(prefix or [0] * len(lengths), spans, strict=True)
    wanted = [
        (query, context, first, slot, *before)
        for (query, context), first, slot, before in zip(lengths, start.tolist(), slots.tolist(), covered, strict=False)
        if least <= query <= most and (context or query < fresh_from)
    ]
    sms = rng.choice((3, 132))
    before = planning.num_sms, planning._MOST_SHORT
    try:
        planning.num_sms = lambda device: sms
        for most_short in (before[1], 0):
            planning._MOST_SHORT = most_short
            with poison():
                got = planning.plan_rows(
                    inputs, kind, shape, least_query=least, most_query=most, fresh_from=fresh_from,
                    covered_2R=None if prefix is None else bed.ints([prefix, spans]),
                )  # fmt: skip
            in_order = len(lengths) > most_short or most > per_tile or most >= fresh_from
            _same_plan(got, wanted, kind, max(16, sms // kv_heads), int(start[-1]), in_order=in_order)
    finally:
        planning.num_sms, planning._MOST_SHORT = before


def _same_plan(
    got: Plan,
    rows: list[tuple[int, int, int, int, int, int]],
    kind: Kind,
    most_splits: int,
    real_tokens: int,
    *,
    in_order: bool,
) -> None:
    """`rows`: (queries, context, first token, slot, prefix, spans) of those that are planned. Not `in_order`: the longer
    ones first, by quarters of the longest, where they are not cut."""
    block_n, tiles, blocks = got.shape.block_n, [], []
    for query, context, first, slot, prefix, spans in rows:
        for offset in range(0, query, got.tokens_per_tile):
            tokens, position = min(query - offset, got.tokens_per_tile), context + offset
            high = min(context + query, position + tokens) if kind.causal else context + query
            low = 0 if kind.window is None else max(position - kind.window + 1, 0) // block_n * block_n
            low = prefix or low
            tiles.append([first + offset, tokens, position, low, high, slot, spans])
            blocks.append(max(-(-(high - low) // block_n), 1))
    units, total, longest = len(tiles) * kind.num_kv_heads, sum(blocks) * kind.num_kv_heads, max(blocks, default=0)
    per_chunk = max(-(-total // got.target), -(-longest // most_splits), got.shape.min_tokens // block_n, 1)
    aligned = units <= got.num_chunks and longest <= per_chunk
    if not aligned and got.num_chunks > got.target <= 2 * units and total * block_n <= units * planning.SHORT.value:
        aligned, per_chunk = True, 2 * per_chunk
    if aligned:
        if not in_order:
            order = sorted(range(len(tiles)), key=lambda i: (longest - blocks[i]) * 4 // longest)
            tiles, blocks = [tiles[i] for i in order], [blocks[i] for i in order]
        blocks = [-(-each // per_chunk) * per_chunk for each in blocks]
    ends = np.cumsum([0] + [each * kind.num_kv_heads for each in blocks])
    assert got.header.tolist() == [int(ends[-1]), per_chunk, real_tokens, int(aligned)]
    assert -(-int(ends[-1]) // per_chunk) <= got.num_chunks
    expected = [[start, *tile] for start, tile in zip(ends.tolist(), tiles, strict=False)]
    assert got.tiles[:, : len(tiles)].T.tolist() == expected
    begins = np.arange(got.num_chunks) * per_chunk
    of_chunks = np.searchsorted(ends[:-1], begins, side="right") - 1
    assert got.chunk_tile.tolist() == np.maximum(of_chunks, 0).tolist()
    assert not got.counters.any()


def rope_cases(bed: Bed) -> Cases:
    layers = [layer_of(32, 8, 128), layer_of(7, 7, 64)] if bed.large else [layer_of(4, 2, 16)]
    for kind, dtype in bed.pairs(("fresh last", "fresh alone", "anyhow", "half rotated"), bed.dtypes):
        for spec in layers:
            yield f"rope {spec} {kind} {dtype}", partial(_rope, bed, spec, kind, dtype)


def _rope(bed: Bed, spec: AttentionSpec, kind: str, dtype: torch.dtype) -> None:
    """Rotation, KV write and attention at once: rows without context may be rotated by another kernel than the rest."""
    with small_shapes(bed):
        rows = [] if kind == "fresh alone" else _ragged(bed)
        long = [(bed.rng.randrange(64, 700) if bed.large else bed.rng.randrange(8, 30), 0) for _ in range(3)]
        rows += [long[0]] * 3 if kind == "fresh alone" and bed.rng.random() < 0.5 else long
        if kind == "anyhow":
            bed.rng.shuffle(rows)
        inputs = attention_inputs(bed, rows, spec, 16, dtype, pad_rows=0, pad_tokens=0)
        q, k, v = bed.strided(
            inputs.num_tokens, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), spec.head_dim, dtype
        )
        positions = bed.ints([context + i for num, context in rows for i in range(num)], torch.int64)
        rotated = spec.head_dim // 2 if kind == "half rotated" else spec.head_dim
        angles = bed.normal(int(positions.max()) + 1, rotated // 2, scale=3.0)
        table = torch.cat((angles.cos(), angles.sin()), 1)
        runner = backend.TritonAttention(bed.device)

        def attend() -> Tensor:
            runner.prepare(inputs)
            return runner.forward_rope(spec, q, k, v, positions, table)

        got = same_twice(attend)
        turned = rotary_reference.apply_rope(q, k, positions, table)
        close(got, attention_reference.forward(spec, inputs, *turned, v), dtype)


def tail_cases(bed: Bed) -> Cases:
    layer = layer_of(32, 8, 128) if bed.large else layer_of(4, 2, 16)
    for dtype, spec in bed.cover(bed.dtypes, (layer, replace(layer, window=37))):
        yield f"tail {spec} {dtype}", partial(_tail, bed, spec, dtype)


def _tail(bed: Bed, spec: AttentionSpec, dtype: torch.dtype) -> None:
    """The last layer narrowed to some tokens gives their rows of the whole result."""
    with small_shapes(bed):
        rows = _ragged(bed)
        inputs = attention_inputs(bed, rows, spec, bed.rng.choice((16, 64)), dtype, pad_rows=0, pad_tokens=0)
        tokens = inputs.num_tokens
        q, k, v = bed.strided(tokens, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), spec.head_dim, dtype)
        at = bed.ints(sorted(bed.rng.sample(range(tokens), max(1, tokens // 4))), torch.int64)
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([row[0] for row in rows])).to(bed.device)
        behind = inputs.query_start_R1[row_of + 1] - torch.arange(tokens, device=bed.device, dtype=torch.int32)
        positions = (inputs.kv_len_R[row_of] - behind).to(torch.int64)
        cos_sin = bed.normal(int(positions.max()) + 1, spec.head_dim)
        runner = backend.TritonAttention(bed.device)

        q_norm, k_norm = (
            (bed.normal(spec.head_dim).to(dtype) for _ in range(2)) if bed.rng.random() < 0.5 else (None, None)
        )

        def attend() -> Tensor:
            runner.prepare(inputs)
            queries_at = runner.queries_at(spec)
            queries = q if queries_at is None or bed.rng.random() < 0.5 else q[queries_at]
            return runner.forward_rope(spec, queries, k, v, positions, cos_sin, q_norm=q_norm, k_norm=k_norm)

        def attend_unrotated() -> Tensor:
            runner.prepare(inputs)
            return runner.forward(spec, q if inputs.tail is None else q[at], k, v)

        whole, unrotated = attend(), attend_unrotated()
        few = replace(
            inputs,
            query_start_R1=bed.ints(range(len(at) + 1)),
            kv_len_R=(positions[at] + 1).to(torch.int32),
            slots_R=inputs.slots_R[row_of[at]],
            loc_T=inputs.loc_T[at],
            max_query=1,
            host=None,
        )
        inputs.tail = LastRows(at, lambda: few)
        close(same_twice(attend), whole[at], dtype)
        close(same_twice(attend_unrotated), unrotated[at], dtype)
        earlier = replace(spec, layer=spec.layer - 1)
        runner.prepare(inputs)
        assert runner.queries_at(earlier) is None


def latent_cases(bed: Bed) -> Cases:
    caches = (None, FLOAT8) if bed.large else (None,)
    for dtype, cache, interleaved, tail in bed.cover(bed.dtypes, caches, (False, True), (False, True)):
        name = f"latents {dtype} cache {cache} interleaved {interleaved} tail {tail}"
        yield name, partial(_latents, bed, dtype, cache or dtype, interleaved=interleaved, tail=tail)


def sparse_cases(bed: Bed) -> Cases:
    kinds = ("rows", "trees", "tail", "tail of an earlier choice")
    for dtype, page, kind in bed.cover(bed.dtypes, (1, 16, 64) if bed.large else (1, 4), kinds):
        yield f"sparse {kind} page {page} {dtype}", partial(_sparse, bed, dtype, page, kind)


def _sparse(bed: Bed, dtype: torch.dtype, page: int, kind: str) -> None:
    """Queries that read chosen tokens, against choosing them one by one. Scores are small whole numbers: many are equal."""
    heads, rank, rotated, nope, v_dim = (16, 512, 64, 128, 128) if bed.large else (3, 16, 8, 12, 10)
    index_heads, width, topk = (64, 128, 256) if bed.large else (3, 12, 7)
    spec = layer_of(
        heads, 1, rank + rotated, v_head_dim=rank, latent=True, topk=topk, index=IndexKeys(width, interleaved=False)
    )
    rows = [*_ragged(bed), (3, 4 * topk), (2, 0)]
    with small_shapes(bed), thresholds(bed):
        pads = bed.rng.choice((0, 2)) if not kind.startswith("tail") else 0
        inputs = attention_inputs(bed, rows, spec, page, dtype, pad_rows=pads)
        inputs.index_caches = [bed.whole(*inputs.k_caches[0].shape[:2], 1, width).to(dtype)]
        inputs.max_kv = max(inputs.max_kv, topk + 1)
        tokens = inputs.num_tokens
        if kind == "trees":
            mask, _ = tree_mask(bed.rng, rows, tokens)
            inputs.tree = TreeMask(*(getattr(mask, each.name).to(bed.device) for each in fields(mask)))
        q = bed.normal(tokens, heads, nope + rotated, dtype=dtype)
        kv = bed.normal(tokens, rank + rotated, dtype=dtype)
        norm_weight = bed.normal(rank, dtype=dtype)
        positions = bed.ints([bed.rng.randrange(50) for _ in range(tokens)], torch.int64)
        cos_sin = bed.normal(50, rotated)
        maps = Maps(bed.normal(heads, nope + v_dim, rank, dtype=dtype, scale=rank**-0.5), v_dim)
        index = IndexQueries(
            bed.whole(tokens, index_heads, width).to(dtype),
            bed.whole(tokens, index_heads),
            bed.whole(tokens, width).to(dtype),
        )
        at = bed.ints(sorted(bed.rng.sample(range(sum(row[0] for row in rows)), 2)), torch.int64)
        narrowed = replace(spec, layer=1) if kind == "tail of an earlier choice" else spec
        inputs.k_caches, inputs.v_caches = [*inputs.k_caches] * 2, [*inputs.v_caches] * 2
        inputs.index_caches = [*inputs.index_caches, None]
        if kind.startswith("tail"):
            few = rows_of_tokens(bed, inputs, rows, at)
            inputs.tail = LastRows(at, lambda: few, narrowed.layer)
        runner = backend.TritonAttention(bed.device)

        def attend() -> Tensor:
            runner.prepare(inputs)
            runner.choose(spec, index)
            raw = RawLatents(q.clone(), kv, norm_weight, 1e-5, 0.0, positions, cos_sin, False)
            return runner.forward_latent(narrowed, raw, maps)

        got = same_twice(attend)
        there = inputs.loc_T >= 0
        assert torch.equal(inputs.index_caches[0].flatten(0, 2)[inputs.loc_T[there]], index.k_TD[there])
        turned = rotary_reference.apply_rope(q[..., nope:].contiguous(), q[:, :0, nope:], positions, cos_sin)[0]
        absorbed = q.new_empty((tokens, heads, rank))
        maps.absorb(q[..., :nope], absorbed)
        read = read_chosen(spec, inputs, index, torch.cat((absorbed, turned), 2))
        want = q.new_empty((tokens, heads, v_dim))
        maps.values(read, want)
        close(got, want.flatten(1)[at] if kind.startswith("tail") else want.flatten(1), dtype)


def read_chosen(spec: AttentionSpec, inputs: AttentionInputs, index: IndexQueries, q_TNH: Tensor) -> Tensor:
    """[T, N, V]: of each query what it reads of the best tokens of its row, all of which are in the pages."""
    out = torch.zeros(len(q_TNH), spec.num_heads, spec.v_width, dtype=q_TNH.dtype, device=q_TNH.device)
    starts, lengths = inputs.query_start_R1.tolist(), inputs.kv_len_R.tolist()
    cache = inputs.index_caches[0]
    assert cache is not None
    for row, num_kv in enumerate(lengths):
        pages = inputs.page_table[int(inputs.slots_R[row])]
        keys = attention_reference.gather(cache, pages, num_kv).squeeze(1)
        latents = attention_reference.gather(inputs.k_caches[0], pages, num_kv)
        for token in range(starts[row], starts[row + 1] if num_kv else starts[row]):
            seen = torch.arange(num_kv, device=keys.device) <= num_kv - (starts[row + 1] - token)
            if inputs.tree is not None:
                tree = inputs.tree
                seen = attention_reference.sees(
                    tree.seen_T[token], tree.tail_T[token], torch.arange(num_kv).to(keys.device)
                )
            scores = ((index.q_TID[token].float() @ keys.T).relu() * index.weights_TI[token][:, None]).sum(0).tolist()
            ranked = sorted((scores[key], key) for key in range(num_kv) if bool(seen[key]))
            best = sorted(key for _, key in ranked[-spec.topk :])
            chosen = latents[best]
            read = attention_reference.attend_row(
                q_TNH[token : token + 1], chosen, chosen[..., : spec.v_width], scale=spec.scale, causal=False
            )
            out[token] = read[0].to(out.dtype)
    return out


def rows_of_tokens(bed: Bed, inputs: AttentionInputs, rows: list[tuple[int, int]], at: Tensor) -> AttentionInputs:
    """Some tokens of a step, as rows of one query each."""
    ends = np.cumsum([row[0] for row in rows])
    owner = [int(np.searchsorted(ends, int(each), side="right")) for each in at]
    lengths = [sum(rows[row]) - int(ends[row]) + int(each) + 1 for row, each in zip(owner, at, strict=True)]
    return replace(
        inputs, query_start_R1=bed.ints(range(len(at) + 1)), kv_len_R=bed.ints(lengths), slots_R=inputs.slots_R[owner],
        loc_T=bed.ints([0] * len(at), torch.int64), max_query=1, host=None,
    )  # fmt: skip


class Maps:
    """Makes keys and values of latents by one matrix a head."""

    def __init__(self, weight_NXR: Tensor, v_dim: int) -> None:
        self.weight = weight_NXR
        self.v_dim = v_dim

    def absorb(self, q_TNC: Tensor, out_TNR: Tensor) -> None:
        weight = self.weight[:, : -self.v_dim].float()
        out_TNR.copy_(torch.einsum("tnc,ncr->tnr", q_TNC.float(), weight))

    def values(self, read_TNR: Tensor, out_TNV: Tensor) -> None:
        weight = self.weight[:, -self.v_dim :].float()
        out_TNV.copy_(torch.einsum("tnr,nvr->tnv", read_TNR.float(), weight))

    def expand(self, latents_SR: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.einsum("sr,nxr->snx", latents_SR.float(), self.weight.float()).to(latents_SR.dtype)
        return both[..., : -self.v_dim], both[..., -self.v_dim :]


def _latents(bed: Bed, dtype: torch.dtype, cache: torch.dtype, *, interleaved: bool, tail: bool) -> None:
    """Rows that read latents as they are and rows that have keys and values made of them, against the former alone."""
    heads, rank, rotated, nope, v_dim = (16, 512, 64, 128, 128) if bed.large else (3, 16, 8, 12, 10)
    spec = layer_of(heads, 1, rank + rotated, v_head_dim=rank, latent=True)
    rows = _ragged(bed)
    rows += [(1500, 0), (300, 2500), (70, 0), (1, 3), (2100, 700)] if bed.large else [(40, 0), (30, 45), (1, 3)]
    bed.rng.shuffle(rows)
    with small_shapes(bed), thresholds(bed):
        inputs = attention_inputs(bed, rows, spec, 32 if bed.large else 4, cache, pad_rows=bed.rng.choice((0, 0, 2)))
        tokens = inputs.num_tokens
        q = bed.normal(tokens, heads, nope + rotated, dtype=dtype)
        kv = bed.normal(tokens, rank + rotated, dtype=dtype)
        norm_weight = bed.normal(rank, dtype=dtype)
        positions = bed.ints([bed.rng.randrange(50) for _ in range(tokens)], torch.int64)
        cos_sin = bed.normal(50, rotated)
        maps = Maps(bed.normal(heads, nope + v_dim, rank, dtype=dtype, scale=rank**-0.5), v_dim)

        latent = norm_reference.rms_norm(kv[:, :rank], norm_weight, 1e-5)
        turned, k = rotary_reference.apply_rope(
            q[..., nope:].contiguous(), kv[:, None, rank:].contiguous(), positions, cos_sin, interleaved=interleaved
        )
        key = torch.cat((latent[:, None], k), 2)
        absorbed = q.new_empty((tokens, heads, rank))
        maps.absorb(q[..., :nope], absorbed)
        read = attention_reference.forward(spec, inputs, torch.cat((absorbed, turned), 2), key, key[..., :rank])
        want = q.new_empty((tokens, heads, v_dim))
        maps.values(read.view(tokens, heads, rank), want)
        written = inputs.k_caches[0].clone()
        inputs.k_caches[0].flatten(0, 2)[inputs.loc_T[inputs.loc_T >= 0]] = 0.0

        runner = backend.TritonAttention(bed.device)
        at = bed.ints(sorted(bed.rng.sample(range(sum(row[0] for row in rows)), 2)), torch.int64)
        if tail:
            few = rows_of_tokens(bed, inputs, rows, at)
            inputs.tail = LastRows(at, lambda: few)

        def attend() -> Tensor:
            runner.prepare(inputs)
            raw = RawLatents(q.clone(), kv, norm_weight, 1e-5, 0.0, positions, cos_sin, interleaved)
            return runner.forward_latent(spec, raw, maps)

        got = same_twice(attend)
        close(got, want.flatten(1)[at] if tail else want.flatten(1), dtype)
        close(inputs.k_caches[0].float(), written.float(), dtype)


@contextmanager
def thresholds(bed: Bed) -> Iterator[None]:
    """Bounds from which keys and values are made of latents, so that small inputs have such rows too."""
    chosen = {"PIECE": 1024} if bed.large else {"FRESH_FROM": 5, "LONG_FROM": 6, "PIECE": 16}
    before = {name: vars(expanded)[name] for name in chosen}
    try:
        for name, value in chosen.items():
            setattr(expanded, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(expanded, name, value)


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


def shared_cases(bed: Bed) -> Cases:
    spec = layer_of(32, 8, 128) if bed.large else layer_of(4, 2, 16)
    page = 16 if bed.large else 4
    unit = 40 * page if bed.large else 3 * page
    flat = [(3, unit, []), (2, 2 * unit, [])]
    many = [(2, page, []), (18, unit, [])]
    tree = [(1, unit, [(0, page, [(3, unit, []), (2, page, [])]), (2, 2 * unit, [])]), (2, unit, [])]
    for dtype in bed.dtypes:
        for name, spans in (("flat", flat), ("many", many), ("tree", tree), ("none", [])):
            for most_query in (1, 3, 9):
                if bed.large or (name == "tree") == (dtype == bed.dtypes[0]) == (most_query > 1):
                    case = partial(_shared, bed, spec, page, spans, dtype, most_query)
                    yield f"shared {name} {dtype} up to {most_query}", case
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


def segment_cases(bed: Bed) -> Cases:
    dims = (64, 72, 80, 88, 96, 128) if bed.large else (8, 16, 24, 72, 80)
    kinds = {"windows": [64, 64, 48, 32, 64], "short": [1, 5, 17, 64, 3], "mixed": [130, 1, 64, 65]}
    if bed.large:
        kinds = {"windows": [64] * 90 + [32] * 9 + [16], "long": [3000], "mixed": [1564, 1, 700, 64, 129, 6256]}
    for dtype, dim, kind in bed.cover(bed.dtypes, dims, list(kinds)):
        yield f"segments {kind} of {dim} {dtype}", partial(_segments, bed, dim, kinds[kind], dtype)


def _segments(bed: Bed, head_dim: int, lengths: list[int], dtype: torch.dtype) -> None:
    heads = 16 if bed.large else 2
    q, k, v = bed.strided(sum(lengths), (heads, heads, heads), head_dim, dtype)
    want = segment_reference.attend_segments(q.float(), k.float(), v.float(), lengths, head_dim**-0.5).to(dtype)
    got = same_twice(lambda: segments.attend_segments(q, k, v, lengths, head_dim**-0.5))
    close(got, want, dtype)
    rotated = q.contiguous()  # as a rotation leaves it
    for tiling in (segments.SHORT, segments.LONG):
        close(segments.attend(rotated, k, v, tuple(lengths), head_dim**-0.5, tiling), want, dtype)


def sampling_cases(bed: Bed) -> Cases:
    vocabs = (50, 5000, 128256) if bed.large else (50, 4500, 13_000)
    draws = bed.pairs((0.5, 4.0), (torch.float32, torch.bfloat16))
    for (spread, dtype), vocab in bed.cover(draws, vocabs):
        yield f"sample {vocab} spread {spread} {dtype}", partial(_sample, bed, vocab, spread, dtype)


def _sample(bed: Bed, vocab: int, spread: float, dtype: torch.dtype) -> None:
    rows = 128 if bed.large else 8
    logits = bed.normal(rows, vocab, dtype=dtype, scale=spread)
    logits[:, : vocab // 3] = float("-inf")
    logits[0] = float("-inf")  # nothing is allowed

    def pick(*values: float) -> Tensor:
        return torch.tensor([bed.rng.choice(values) for _ in range(rows)], device=bed.device)

    temperature = pick(0.0, 0.3, 1.0, 1.7)
    top_k, top_p, min_p = pick(-1, 1, 7, 50), pick(1.0, 0.95, 0.4), pick(0.0, 0.0, 0.05)
    temperature[0], top_p[0] = 1.0, 0.95
    seeds = torch.tensor([bed.rng.randrange(-(2**63), 2**63) for _ in range(rows)], device=bed.device)
    counters = torch.tensor([bed.rng.randrange(2**40) for _ in range(rows)], device=bed.device)
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, counters)
    got, want = same_twice(lambda: sampling.sample(*arguments)), sampling_reference.sample(*arguments)
    assert got[0] == want[0]
    differs = int((got != want).sum())
    assert differs <= rows // 50, f"{differs} of {rows} draws differ"
    some = torch.randperm(rows, device=bed.device)[: rows // 2]
    alone = sampling.sample(*(argument[some] for argument in arguments))
    assert torch.equal(alone, got[some]), "a draw depends on its batch"
    logits[0, vocab // 2] = logits[0, vocab - 1] = 100.0
    assert torch.equal(same_twice(lambda: sampling.argmax(logits)), sampling_reference.argmax(logits))


def mask_cases(bed: Bed) -> Cases:
    for dtype in bed.dtypes:
        for vocab in (31, 4096, 49_152, 151_936) if bed.large else (31, 2200):
            yield f"masks {vocab} {dtype}", partial(_mask, bed, vocab, dtype)


def _mask(bed: Bed, vocab: int, dtype: torch.dtype) -> None:
    rows, width = (96, -(-vocab // 32)) if bed.large else (5, -(-vocab // 32))
    logits = bed.normal(rows, vocab + 8, dtype=dtype)[:, :vocab]
    some = torch.randperm(rows, device=bed.device)[: rows // 2 + 1]
    masks = bed.ints(np.random.randint(-(2**31), 2**31, (len(some), width)))
    masks[0] = 0
    masks[-1] = -1
    for given in (masks, masks[:, : max(1, width // 2)]):
        want, got, plain = logits.clone(), logits.clone(), logits.cpu().clone()
        masks_reference.apply_masks(want, some, given)
        masks_triton.apply_masks(got, some, given)
        masks_cpu.apply_masks(plain, some.cpu(), given.cpu().contiguous())
        assert torch.equal(got, want)
        assert torch.equal(plain, want.cpu())
    by_hand = logits.float().cpu().numpy().copy()
    for at, row in enumerate(some.tolist()):
        for token in range(min(vocab, 300)):
            if not int(masks[at, token // 32]) >> (token % 32) & 1:
                by_hand[row, token] = -np.inf
    masks_triton.apply_masks(logits, some, masks)
    assert np.array_equal(logits[:, :300].float().cpu().numpy(), by_hand[:, :300])


def page_cases(bed: Bed) -> Cases:
    for dtype in (*bed.dtypes, torch.uint8):
        yield f"pages {dtype}", partial(_pages, bed, dtype)


def _pages(bed: Bed, dtype: torch.dtype) -> None:
    """Caches of several widths, one of them with pages of an odd number of bytes."""
    widths = [(9, 16, 2, 24)] * 3 + [(9, 16, 2, 8)] * 2 + [(9, 1, 3, 5)]
    caches = [torch.randint(0, 100, width, device=bed.device).to(dtype) for width in widths]
    expected = [cache.clone() for cache in caches]
    pages = bed.rng.sample(range(9), 8)
    source, target = bed.ints(pages[:4], torch.int64), bed.ints(pages[4:], torch.int64)
    pages_reference.copy_pages(expected, source, target)
    pages_triton.copy_pages(caches, source, target)
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got, want)


def start_cases(bed: Bed) -> Cases:
    for rows, writes in (
        ((1, 0), (1, 258), (64, 384), (300, 7), (1500, 1300)) if bed.large else ((1, 0), (5, 300), (40, 9), (260, 1100))
    ):
        for most_drafts in (0, 3):
            name = f"start of {rows} rows, {writes} pages, {most_drafts} drafts"
            yield name, partial(_start, bed, rows, writes, most_drafts)


def _slot_state(bed: Bed, num_slots: int, pages_per_slot: int, page_size: int, most_drafts: int) -> SlotState:
    state = SlotState.make(num_slots, pages_per_slot, bed.device, most_drafts=most_drafts, line_parts=(1, 1, 3))
    for each, most in (
        (state.table_entries, 1000), (state.last_token, 2**40), (state.num_output, 500), (state.drafts, 2**40),
        (state.kv_len, pages_per_slot * page_size - most_drafts - 1),
    ):  # fmt: skip
        each.copy_(bed.ints(np.random.randint(0, most, each.shape), each.dtype))
    return state


def _copied(each: object) -> SimpleNamespace:
    names = getattr(each, "__slots__", None) or vars(each)
    held = {name: getattr(each, name) for name in names}
    return SimpleNamespace(**{name: value.clone() for name, value in held.items() if isinstance(value, Tensor)})


def _copied_state(state: SlotState) -> SlotState:
    entries = state.table_entries.clone()
    parts = entries.split_with_sizes([table.numel() for table in state.tables])
    return SlotState(
        tables=tuple(part.view(table.shape) for part, table in zip(parts, state.tables, strict=True)),
        table_entries=entries,
        last_token=state.last_token.clone(),
        kv_len=state.kv_len.clone(),
        num_output=state.num_output.clone(),
        drafts=state.drafts.clone(),
        room=state.room.clone(),
    )


def _start(bed: Bed, rows: int, writes: int, most_drafts: int) -> None:
    """Rows that the device completes, then some that it must not touch; padding writes one page over and over."""
    slots, pages_per_slot, page_size = rows + 5, 40, bed.rng.choice((1, 16, 48))
    state = _slot_state(bed, slots, pages_per_slot, page_size, most_drafts)
    places = state.table_entries.numel()
    at = bed.ints(np.random.permutation(places - 1)[: min(writes, places - 1)], torch.int64)
    pages = bed.ints(np.random.randint(0, 1000, len(at)))
    at[len(at) // 2 :], pages[len(at) // 2 :] = places - 1, 0
    num_query = 1 + np.random.randint(0, most_drafts + 1, rows)
    given, tokens = 7, int(num_query.sum())
    owner, first = np.repeat(np.arange(rows), num_query), np.repeat(np.cumsum(num_query) - num_query, num_query)
    place, of_rows = np.arange(tokens) - first, np.random.permutation(slots)[:rows]
    ids = np.where(place == 0, -1, np.where(np.random.rand(tokens) < 0.5, -1 - place, 77))
    room = state.kv_len.cpu().numpy()[of_rows] + num_query - np.random.randint(0, 2, rows)
    longs = partial(bed.ints, dtype=torch.int64)
    inputs = SimpleNamespace(
        table_at_U=at,
        table_pages_U=pages,
        derived=bed.ints([tokens, rows, tokens]),
        ids_T=longs([*ids, *range(given)]),
        positions_T=longs([*place, *range(given)]),
        token_slots_T=longs([*of_rows[owner], *[slots] * given]),
        loc_T=longs([*room[owner], *[-1] * given]),
        kv_len_R=bed.ints([*num_query, given]),
        slots_R=bed.ints([*of_rows, slots]),
        sample_slots_L=longs([*of_rows[owner], slots]),
        counter_L=longs([*place, 3]),
    )
    want_state, want = _copied_state(state), _copied(inputs)
    start_reference.start_step(want_state, want, page_size)  # type: ignore[arg-type]
    start.start_step(state, inputs, page_size)  # type: ignore[arg-type]
    for name in vars(want):
        assert torch.equal(getattr(inputs, name), getattr(want, name)), name
    assert torch.equal(state.table_entries, want_state.table_entries)
    sizes = [page_size, page_size, -(-page_size // 3)]
    got, want = start.locate(state, inputs, sizes), start_reference.locate(state, inputs, sizes)  # type: ignore[arg-type]
    for at, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(ours, theirs), f"line {at + 1}"


def end_cases(bed: Bed) -> Cases:
    for rows in (1, 64, 1500) if bed.large else (1, 9, 140):
        yield f"end of {rows} rows", partial(_end, bed, rows)
        for width in (2, 5, 16):
            for blocks in (False, True):
                yield f"{rows} rows verify {width}", partial(_verify, bed, rows, width, blocks)


def _samples(bed: Bed, rows: int, width: int) -> SimpleNamespace:
    """Sampling rows of a step with up to `width` samples each; drafts are few different ids, so that many are right."""
    count = np.random.randint(1, width + 1, rows)
    tokens = int(count.sum())
    longs = partial(bed.ints, dtype=torch.int64)
    return SimpleNamespace(
        ids_T=longs(np.random.randint(0, 2, tokens + 3)),
        positions_T=longs(np.random.randint(0, 500, tokens + 3)),
        sample_at_L=longs([*range(3, tokens + 3), 0, 0]),
        sample_slots_L=longs([*np.repeat(np.random.permutation(rows + 3)[:rows], count), rows + 3, rows + 3]),
        counter_L=longs([*np.random.randint(0, 100, tokens), 0, 0]),
        sample_start_R1=bed.ints([0, *np.cumsum(count), tokens, tokens]),
        tokens=tokens,
    )


def _end(bed: Bed, rows: int) -> None:
    state, inputs = _slot_state(bed, rows + 3, 4, 16, 0), _samples(bed, rows, 1)
    drawn = bed.ints(np.random.randint(0, 2**40, inputs.tokens + 1), torch.int64)
    expected = _copied_state(state)
    end_reference.advance(expected, inputs, drawn)  # type: ignore[arg-type]
    step_end.advance(state, inputs, drawn)  # type: ignore[arg-type]
    for name in ("last_token", "kv_len", "num_output", "drafts"):
        assert torch.equal(getattr(state, name)[: rows + 3], getattr(expected, name)[: rows + 3]), name


def _verify(bed: Bed, rows: int, width: int, blocks: bool) -> None:
    state, inputs = _slot_state(bed, rows + 3, 4, 16, 0), _samples(bed, rows, width)
    drawn = bed.ints(np.random.randint(0, 2, inputs.tokens + 2), torch.int64)
    blocked = bed.ints(np.random.rand(inputs.tokens + 2) < 0.1, torch.bool) if blocks else None
    expected = _copied_state(state)
    want = end_reference.verify(expected, inputs, drawn, rows + 2, width, blocked)  # type: ignore[arg-type]
    got = step_end.verify(state, inputs, drawn, rows + 2, width, blocked)  # type: ignore[arg-type]
    assert torch.equal(got, want)
    for name in ("last_token", "kv_len", "num_output", "drafts"):
        assert torch.equal(getattr(state, name)[: rows + 3], getattr(expected, name)[: rows + 3]), name


def tree_cases(bed: Bed) -> Cases:
    for rows, most, width in ((1, 4, 3), (9, 7, 4), (140, 15, 6)):
        for blocks in (False, True):
            yield f"{rows} trees of {most}", partial(_tree, bed, rows, most, width, blocks)


def _tree(bed: Bed, rows: int, most: int, width: int, blocks: bool) -> None:
    """Steps with trees, and tokens of other rows behind them, from their start to the KV of their paths."""
    case = tree_step(bed.rng, rows, most, width, page_size=bed.rng.choice((1, 16)))
    results = []
    for each in (tree_reference, tree_triton):
        state, inputs, caches = case.made(bed.device)
        step = each.start_tree(state, inputs, inputs.sample_at_L)
        drawn, blocked = case.drawn.to(bed.device), case.blocked.to(bed.device) if blocks else None
        path = each.walk_tree(state, inputs, step, drawn, case.num_rows, width, blocked)
        each.gather_path(caches, inputs.loc_T, path)
        kept = (*caches, state.last_token[:-1], state.kv_len[:-1], state.num_output[:-1])
        parts = (step.seen_T, step.tail_T, step.positions_T, step.counter_L, inputs.positions_T, inputs.counter_L)
        results.append((*parts, path.result, path.from_L, path.from_T, *kept))
    for number, (want, got) in enumerate(zip(*results, strict=True)):
        assert torch.equal(want, got), number


def moe_cases(bed: Bed) -> Cases:
    if bed.large:
        shapes = [(1, 128, 8, 2048, 768), (64, 128, 8, 2048, 768), (300, 8, 2, 512, 320), (1000, 64, 6, 1000, 200)]
    else:
        shapes = [(1, 8, 2, 64, 32), (7, 8, 3, 48, 40), (40, 5, 2, 64, 64)]
    for dtype, shape, limit in bed.cover(bed.dtypes, shapes, (4096, 16)):
        yield f"experts {shape} {dtype} one program up to {limit}", partial(_moe, bed, shape, dtype, limit)
    sizes = ((256, 8, 4), (64, 1, 1), (160, 1, 1)) if bed.large else ((16, 4, 2), (12, 1, 1))
    for size, sigmoid, best_two in bed.cover(sizes, (False, True), (False, True)):
        yield f"scored {size} sigmoid {sigmoid} {best_two}", partial(_scored, bed, size, sigmoid, best_two)
    yield "clamped rows", partial(_clamped, bed)


def _scored(bed: Bed, size: tuple[int, int, int], sigmoid: bool, best_two: bool) -> None:
    (experts, groups, kept), tokens, k = size, 50 if bed.large else 6, 6 if bed.large else 3
    scoring = Scoring(sigmoid, groups, kept, best_two, bed.rng.random() < 0.5, bed.rng.choice((0.0, 0.3)), 2.5)
    logits, bias = bed.normal(tokens, experts), bed.normal(experts) if bed.rng.random() < 0.7 else None
    loc = bed.ints(np.arange(tokens) % 3 - 1, torch.int64) if bed.rng.random() < 0.5 else None
    weights, ids = moe.topk_scored(logits, k, scoring, bias, loc)
    want_weights, want_ids = moe_reference.topk_scored(logits, k, scoring, bias, loc)
    assert torch.equal(ids, want_ids)
    close(weights, want_weights, torch.float32)


def _clamped(bed: Bed) -> None:
    experts, inner, height = 5, 70, 64
    dtype = bed.dtypes[0]
    ids = bed.ints([[bed.rng.randrange(-1, experts)] for _ in range(90)])
    x = bed.normal(90, 2 * inner, dtype=dtype)
    grouping, rows, _ = group_tokens(x, ids, experts, height, fp8=False)
    bias = bed.normal(experts, 2 * inner, dtype=dtype)
    got = clamped_rows(rows, bias, grouping, height, ClampedGate(alpha=1.7, limit=1.0))
    here = ids[:, 0] >= 0
    want = clamped_gate(x[here].float() + bias[ids[here, 0].long()].float(), 1.7, 1.0).to(dtype)
    close(got[grouping.places_Tk[here, 0].long()], want, dtype)
    out = bed.normal(90, 2 * inner)
    weights = bed.normal(90, 1)
    added = out.clone()
    add_biases(added, bias.float(), weights, ids)
    close(added - out, torch.where(here[:, None], weights * bias.float()[ids[:, 0].long()], 0.0), dtype)


def _moe(bed: Bed, shape: tuple[int, int, int, int, int], dtype: torch.dtype, limit: int) -> None:
    tokens, experts, per_token, width, inner = shape
    logits = bed.normal(tokens, experts, dtype=dtype)
    logits[0, 1] = logits[0, 0]
    renormalise = bed.rng.random() < 0.5
    weights, ids = moe.topk_softmax(logits, per_token, renormalise)
    want_weights, want_ids = moe_reference.topk_softmax(logits, per_token, renormalise)
    assert torch.equal(ids, want_ids)
    close(weights, want_weights, torch.float32)
    loc = bed.ints(np.arange(tokens) % 3 - 1, torch.int64)
    padded, want_padded = (each.topk_softmax(logits, per_token, renormalise, loc)[1] for each in (moe, moe_reference))
    assert torch.equal(padded, want_padded)
    assert torch.equal((padded == -1).all(1), loc < 0)
    x = bed.normal(tokens, width, dtype=dtype)
    gate_up = bed.normal(experts, 2 * inner, width, dtype=dtype, scale=width**-0.5)
    down = bed.normal(experts, width, inner, dtype=dtype, scale=inner**-0.5)
    ids[tokens // 2, 0] = -1
    if tokens > 8:
        ids[5:8] = -1  # padding
    act = bed.rng.choice(("silu", "gelu_tanh"))
    before = moe._ONE_LAUNCH_PAIRS
    try:
        moe._ONE_LAUNCH_PAIRS = limit
        got = same_twice(lambda: moe.fused_experts(x, gate_up, down, weights, ids, act))
    finally:
        moe._ONE_LAUNCH_PAIRS = before
    close(got, moe_reference.fused_experts(x, gate_up, down, weights, ids, act), dtype)
    biases = Biases(bed.normal(experts, 2 * inner, dtype=dtype), bed.normal(experts, width, dtype=dtype))
    inputs = (x, gate_up, down, biases, weights, ids, 1.7, 0.8)
    close(moe.biased_experts(*inputs), moe_reference.biased_experts(*inputs), dtype)
    plain = (x, gate_up[:, :inner].contiguous(), down, weights, ids, lambda inside: inside.relu().square())
    close(same_twice(lambda: moe.plain_experts(*plain)), moe_reference.plain_experts(*plain), dtype)


def grouping_cases(bed: Bed) -> Cases:
    shapes = [(1, 128, 8, 2048, 64), (4000, 128, 8, 2048, 256), (600, 6, 2, 1000, 128)] if bed.large else [
        (37, 5, 2, 48, 64), (150, 7, 3, 40, 128), (1, 4, 2, 64, 256),
    ]  # fmt: skip
    for shape, fp8 in bed.cover(shapes, (False, True)):
        yield f"grouping {shape} fp8 {fp8}", partial(_grouping, bed, shape, fp8)


def _grouping(bed: Bed, shape: tuple[int, int, int, int, int], fp8: bool) -> None:
    """Every pair has a row of its own, in a tile of its expert, which holds its token."""
    tokens, experts, per_token, width, height = shape
    x = bed.normal(tokens, width).to(FLOAT8).to(torch.bfloat16)  # exact in e4m3, with a scale of 1
    x[:, 0] = 448
    ids = torch.rand(tokens, experts, device=bed.device).topk(per_token, 1).indices.to(torch.int32)
    ids[tokens // 2, 0] = bed.rng.choice((-1, experts))
    grouping, rows, scales = group_tokens(x, ids, experts, height, fp8=fp8)
    tiles = grouping.tiles[: int(grouping.num_tiles)].tolist()
    assert len(tiles) <= len(grouping.tiles)
    owner = torch.full((grouping.num_rows,), -1, device=bed.device)
    for first, end, expert, _ in tiles:
        assert first % 64 == end % 64 == 0
        assert first < end
        owner[first : min(first + height, end)] = expert
    here = (ids >= 0) & (ids < experts)
    places = grouping.places_Tk.long()
    assert torch.equal(here, places >= 0)
    assert len(places[here].unique()) == int(here.sum())
    assert torch.equal(owner[places[here]], ids[here].long())
    held = rows.float() if scales is None else rows.float() * scales[:, None]
    token = torch.arange(tokens, device=bed.device)[:, None].expand_as(places)
    assert torch.equal(held[places[here]], x[token[here]].float())
    parts, shares = bed.normal(grouping.num_rows, width, dtype=torch.bfloat16), torch.rand(ids.shape, device=bed.device)
    out = torch.empty_like(x)
    sum_parts(parts, shares, grouping, out)
    chosen = parts[places.clamp_min(0)].float() * (shares * here)[..., None]
    close(out, chosen.sum(1).to(torch.bfloat16), torch.bfloat16)
    exact, ones = round_rows(x)
    assert torch.equal(exact.float() * ones[:, None], x.float())


CODES: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 128},
    "int4 zeros": {"kind": "int4", "group": 64, "zeros": True, "dtype": torch.bfloat16},
    "int4 small groups": {"kind": "int4", "group": 32, "zeros": True, "dtype": torch.float32},
    "int4 ordered": {"kind": "int4", "group": 128, "ordered": True},
    "int4 rows": {"kind": "int4", "group": 1 << 20, "zeros": True},
    "int8": {"kind": "int8", "group": 1 << 20, "dtype": torch.float32},
    "int8 zeros": {"kind": "int8", "group": 128, "zeros": True},
    "float4": {"kind": "float4", "group": 32, "dtype": torch.bfloat16},
    "float4 two levels": {"kind": "float4", "group": 16, "dtype": torch.bfloat16, "row_scales": True},
    "nf4": {"kind": "nf4", "group": 64, "dtype": torch.float32},
    "float8": {"kind": "float8", "group": 1 << 20, "dtype": torch.float32},
    "float8 small groups": {"kind": "float8", "group": 32, "dtype": torch.float32},
    "float8 blocks": {"kind": "float8", "group": 128, "rows": 128, "dtype": torch.float32},
}


def _codes(bed: Bed, name: str, shape: tuple[int, int]) -> Codes:
    given = {**CODES[name]}
    given["group"] = min(given["group"], shape[1])
    return on_device(random_codes(**given, shape=shape, seed=bed.rng.randrange(1 << 30)), bed.device)


def on_device(codes: Codes, device: torch.device) -> Codes:
    tensors = {field.name: getattr(codes, field.name) for field in fields(codes)}
    return replace(codes, **{key: value.to(device) for key, value in tensors.items() if isinstance(value, Tensor)})


def packed_cases(bed: Bed) -> Cases:
    shapes = [(1, 4096, 4096), (7, 6144, 4096), (33, 1111, 640), (64, 4096, 2048), (200, 1040, 1024)]
    if not bed.large:
        shapes = [(1, 40, 256), (3, 64, 160), (17, 70, 128), (16, 17, 288), (66, 24, 96)]
    for dtype in bed.dtypes if bed.large else bed.dtypes[:1]:
        for shape, name in bed.pairs(shapes, list(CODES)):
            yield f"packed {shape} {name} {dtype}", partial(_packed, bed, shape, name, dtype)


def _packed(bed: Bed, shape: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    tokens, rows, depth = shape
    codes = _codes(bed, name, (rows, depth))
    weight = packed.pack_codes(codes)
    assert weight.functions is packed
    dense = packed_reference.dequantise(packed_reference.pack_codes(codes.sorted()))
    torch.testing.assert_close(packed.dequantise(weight), dense, rtol=2e-7, atol=0)
    ids = torch.randint(0, rows, (tokens,), device=bed.device)
    assert torch.equal(packed.packed_rows(ids, weight, dtype), packed.dequantise(weight)[ids].to(dtype))
    x, bias = bed.normal(tokens, 2 * depth, dtype=dtype)[:, :depth], bed.normal(rows)
    want = torch.nn.functional.linear(x.float(), dense, bias)
    close(same_twice(partial(packed.packed_linear, x, weight, bias)), want.to(dtype), dtype)
    wide = torch.full((tokens, rows + 3), 7.0, dtype=dtype, device=bed.device)
    packed.packed_linear(x, weight, out=wide[:, 1 : rows + 1])
    close(wide[:, 1 : rows + 1], torch.nn.functional.linear(x.float(), dense).to(dtype), dtype)
    assert bool((wide[:, [0, -2, -1]] == 7).all())


def _blocks(bed: Bed, kind: str, shape: tuple[int, int]) -> Tensor:
    """Random blocks of a GGUF file, uint8 [rows, bytes of a row]; all floats in them are small."""
    form, (rows, cols) = FORMATS[kind], shape
    blocks = torch.randint(0, 256, (rows * cols // form.block, form.block_bytes), device=bed.device).to(torch.uint8)
    for at in FLOATS_AT[kind]:
        blocks[:, at : at + 2] = (torch.rand(len(blocks), 1, device=bed.device) * 0.01).half().view(torch.uint8)
    return blocks.view(rows, -1)


def gguf_cases(bed: Bed) -> Cases:
    shapes = [(1, 4096, 4096), (7, 6144, 4096), (33, 1111, 768), (64, 4096, 2048), (200, 1040, 1024)]
    if not bed.large:
        shapes = [(1, 40, 256), (3, 70, 512), (17, 33, 256), (66, 16, 256)]
    for dtype in bed.dtypes if bed.large else bed.dtypes[:1]:
        for shape, kind in bed.pairs(shapes, list(FLOATS_AT)):
            yield f"gguf {shape} {kind} {dtype}", partial(_gguf, bed, shape, kind, dtype)
    yield "gguf columns that end within a step", partial(_gguf, bed, (5, 24, 96), "Q5_1", bed.dtypes[0])
    for shape in (
        [(1, 64, 8, 2048, 768), (300, 32, 4, 512, 256)] if bed.large else [(1, 3, 2, 256, 32), (5, 3, 2, 256, 64)]
    ):
        yield f"gguf experts {shape}", partial(_gguf_experts, bed, shape, bed.dtypes[0])


def _gguf(bed: Bed, shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    tokens, rows, depth = shape
    raw = _blocks(bed, kind, (rows, depth))
    weight, dense = packed.pack(kind, raw, depth), packed_reference.unpack(kind, raw, depth)
    assert weight.functions is packed
    assert weight.num_bytes <= 1.05 * raw.numel() or depth % 64
    torch.testing.assert_close(packed.dequantise(weight), dense, rtol=1e-6, atol=1e-7)
    ids = torch.randint(0, rows, (tokens,), device=bed.device)
    assert torch.equal(packed.packed_rows(ids, weight, dtype), packed.dequantise(weight)[ids].to(dtype))
    x, bias = bed.normal(tokens, 2 * depth, dtype=dtype)[:, :depth], bed.normal(rows)
    want = torch.nn.functional.linear(x.float(), dense, bias)
    close(same_twice(partial(packed.packed_linear, x, weight, bias)), want.to(dtype), dtype)
    wide = torch.full((tokens, rows + 3), 7.0, dtype=dtype, device=bed.device)
    packed.packed_linear(x, weight, out=wide[:, 1 : rows + 1])
    close(wide[:, 1 : rows + 1], torch.nn.functional.linear(x.float(), dense).to(dtype), dtype)
    assert bool((wide[:, [0, -2, -1]] == 7).all())


def _gguf_experts(bed: Bed, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    tokens, experts, per_token, width, inner = shape
    first, second = bed.rng.choice(("Q4_K", "Q5_K", "Q6_K", "Q4_0")), bed.rng.choice(("Q4_1", "Q5_0", "Q8_0"))
    gate_up = [_blocks(bed, first, (2 * inner, width)) for _ in range(experts)]
    down = [_blocks(bed, second, (width, inner)) for _ in range(experts)]
    held = packed_moe.group_experts(
        [packed.pack(first, each, width) for each in gate_up], [packed.pack(second, each, inner) for each in down]
    )
    assert held is not None
    assert held.functions is packed_moe
    dense = [
        torch.stack([packed_reference.unpack(kind, each, cols) for each in stack])
        for kind, stack, cols in ((first, gate_up, width), (second, down, inner))
    ]
    x = bed.normal(tokens, width, dtype=dtype, scale=0.3)
    ids = torch.stack([torch.randperm(experts + 1, device=bed.device)[:per_token] for _ in range(tokens)]).int()
    shares = torch.rand(tokens, per_token, device=bed.device)
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids)
    close(same_twice(partial(packed_moe.packed_experts, x, held, shares, ids)), want.to(dtype), dtype)


FLOATS_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where blocks have floats."""


def packed_moe_cases(bed: Bed) -> Cases:
    shapes = [(1, 64, 8, 2048, 768), (5, 16, 2, 256, 352), (300, 32, 4, 512, 256)]
    if not bed.large:
        shapes = [(1, 3, 2, 96, 32), (5, 3, 2, 64, 32)]
    names = [name for name in CODES if "ordered" not in name]
    if not bed.large:
        names = ["int4 zeros", "int4 rows", "float4 two levels", "float8 blocks"]
    for dtype in bed.dtypes if bed.large else bed.dtypes[:1]:
        for shape, name in bed.pairs(shapes, names):
            yield f"packed experts {shape} {name} {dtype}", partial(_packed_moe, bed, shape, name, dtype)
    clamped = [(40, 16, 4, 512, 352), (1400, 8, 2, 512, 352)] if bed.large else [(3, 3, 2, 64, 32)]
    for shape, name in product(clamped, ("float4", "int4 ordered")):
        yield f"packed experts {shape} {name} clamped", partial(_clamped_experts, bed, shape, name, bed.dtypes[0])
    if bed.large:
        for name in ("float8 blocks", "int4 zeros", "float4"):
            shape = (1400, 8, 2, 512, 384)
            yield f"packed experts {shape} {name}", partial(_packed_moe, bed, shape, name, bed.dtypes[0])


def _clamped_experts(bed: Bed, shape: tuple[int, int, int, int, int], name: str, dtype: torch.dtype) -> None:
    """With biases, and with columns of each expert in an order of its own."""
    tokens, experts, per_token, width, inner = shape
    gate_up = [_codes(bed, name, (2 * inner, width)).sorted() for _ in range(experts)]
    down = [_codes(bed, name, (width, inner)).sorted() for _ in range(experts)]
    biases = Biases(bed.normal(experts, 2 * inner, dtype=dtype), bed.normal(experts, width, dtype=dtype))
    clamp = ClampedGate(alpha=1.7, limit=0.9)
    x = bed.normal(tokens, width, dtype=dtype, scale=0.3)
    ids = torch.stack([torch.randperm(experts + 1, device=bed.device)[:per_token] for _ in range(tokens)]).int()
    shares = torch.rand(tokens, per_token, device=bed.device)
    dense = [
        torch.stack([packed_reference.dequantise(packed_reference.pack_codes(each)) for each in stack])
        for stack in (gate_up, down)
    ]
    held, plain = packed_moe.pack_experts(gate_up, down, biases), packed_moe.pack_experts(gate_up, down)
    assert held is not None
    assert plain is not None
    want = moe_reference.biased_experts(x.float(), *dense, biases, shares, ids, clamp.alpha, clamp.limit)
    got = same_twice(partial(packed_moe.packed_experts, x, held, shares, ids, "silu", clamp))
    close(got, want.to(dtype), dtype)
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids)
    close(same_twice(partial(packed_moe.packed_experts, x, plain, shares, ids)), want.to(dtype), dtype)


def _packed_moe(bed: Bed, shape: tuple[int, int, int, int, int], name: str, dtype: torch.dtype) -> None:
    tokens, experts, per_token, width, inner = shape
    gate_up = [_codes(bed, name, (2 * inner, width)) for _ in range(experts)]
    down = [_codes(bed, name, (width, inner)) for _ in range(experts)]
    held = packed_moe.pack_experts(gate_up, down)
    assert held is not None
    dense = [
        torch.stack([packed_reference.dequantise(packed_reference.pack_codes(each)) for each in stack])
        for stack in (gate_up, down)
    ]
    x = bed.normal(tokens, width, dtype=dtype, scale=0.3)
    ids = torch.stack([torch.randperm(experts + 1, device=bed.device)[:per_token] for _ in range(tokens)]).int()
    shares = torch.rand(tokens, per_token, device=bed.device)
    activation = bed.rng.choice(("silu", "gelu_tanh"))
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids, activation)
    got = same_twice(partial(packed_moe.packed_experts, x, held, shares, ids, activation))
    close(got, want.to(dtype), dtype)
    plain = packed_moe_reference.pack_experts(gate_up, down)
    assert plain is not None
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids)
    got = packed_moe_reference.packed_experts(x.float(), plain, shares, ids)
    assert float((got - want).norm()) < 0.03 * float(want.norm())  # a CPU may round activations to 8 bits


def state_cases(bed: Bed) -> Cases:
    """Layers that keep a state: rows of several tokens, and one token of several rows."""
    lengths = (2, 64, 65, 1000) if bed.large else (2, 37, 65)
    widths = ((512, 4), (300, 3)) if bed.large else ((40, 4), (7, 2))
    for length, (channels, width), has_bias, dtype in bed.cover(lengths, widths, (False, True), bed.dtypes):
        name = f"causal_conv {length}x{channels}:{width} bias {has_bias} {dtype}"
        yield name, partial(_conv, bed, length, channels, width, has_bias, dtype)
    heads = ((24, 64, 8, 128), (16, 64, 1, 256), (6, 32, 2, 16)) if bed.large else ((4, 16, 2, 16), (3, 40, 1, 20))
    for length, shape in bed.cover(lengths, heads):
        yield f"ssd {length}x{shape}", partial(_ssd, bed, length, *shape)
    for length, (channels, states) in bed.cover(lengths, ((512, 16), (77, 8)) if bed.large else ((40, 16), (7, 3))):
        yield f"selective_scan {length}x{channels}x{states}", partial(_selective, bed, length, channels, states)
    nets = ((4, 8, 128, 128), (2, 6, 64, 96)) if bed.large else ((1, 2, 16, 16), (2, 4, 8, 40))
    for length, sizes in bed.cover(lengths, nets):
        for rates in (1, sizes[2]):
            yield f"delta_rule {length}x{sizes}x{rates}", partial(_delta, bed, length, *sizes, rates)


def _advanced(ours: Any, theirs: Any, state: Tensor, at: Tensor | None) -> None:
    """Calls both with a copy of the state; what they return and leave there agrees."""
    rows = () if at is None else (at,)
    states = [state.clone(), state.clone()]
    with poison():
        got = ours(states[0], *rows)
    close(got, theirs(states[1], *rows), torch.float32)
    close(states[0], states[1], torch.float32)


def _conv(bed: Bed, length: int, channels: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = bed.normal(length, 2 * channels, dtype=dtype)[:, :channels]
    weight, bias = bed.normal(channels, width), bed.normal(channels) if has_bias else None
    one = bed.normal(channels, width - 1)
    theirs = {each: partial(getattr(conv_reference, each), silu=has_bias) for each in ("conv_row", "conv_ones")}
    ours = {each: partial(getattr(conv, each), silu=has_bias) for each in theirs}
    _advanced(partial(ours["conv_row"], x, weight, bias), partial(theirs["conv_row"], x, weight, bias), one, None)
    x, many, at = x[:3], bed.normal(7, channels, width - 1), bed.ints([5, 1, 0][: min(length, 3)], torch.int64)
    _advanced(partial(ours["conv_ones"], x, weight, bias), partial(theirs["conv_ones"], x, weight, bias), many, at)


def _scanned(bed: Bed, ours: Any, theirs: Any, row: list[Tensor], constant: list[Tensor], shape: list[int]) -> None:
    """`row`: inputs, steps, B and C by token. `constant`: rates and D."""
    (x, dt, b, c), (a, d) = row, constant
    given = (x, dt, a, b, c, d)
    _advanced(partial(ours.scan_row, *given), partial(theirs.scan_row, *given), bed.normal(*shape), None)
    rows = min(len(x), 3)
    given = (x[:rows], dt[:rows], a, b[:rows], c[:rows], d)
    at = bed.ints([5, 1, 0][:rows], torch.int64)
    _advanced(partial(ours.step_rows, *given), partial(theirs.step_rows, *given), bed.normal(7, *shape), at)


def _ssd(bed: Bed, length: int, heads: int, width: int, groups: int, states: int) -> None:
    sizes = [heads * width, groups * states, groups * states]
    x, b, c = bed.normal(length, sum(sizes)).split(sizes, 1)  # as they leave the convolution
    row = [
        x.unflatten(1, (heads, width)),
        bed.normal(length, heads).sigmoid(),
        b.unflatten(1, (groups, states)),
        c.unflatten(1, (groups, states)),
    ]
    constant = [-bed.normal(heads).exp(), bed.normal(heads)]
    _scanned(bed, ssd, ssd_reference, row, constant, [heads, width, states])


def _delta(bed: Bed, length: int, groups: int, heads: int, keys: int, values: int, rates: int) -> None:
    """`rates`: of a head's decay, 1 or `keys`."""
    sizes = [groups * keys, groups * keys, heads * values]
    q, k, v = bed.normal(length, sum(sizes)).split(sizes, 1)  # as they leave the convolution
    row = (
        q.unflatten(1, (groups, keys)),
        k.unflatten(1, (groups, keys)),
        v.unflatten(1, (heads, values)),
        -3 * bed.normal(length, heads, rates).sigmoid(),
        bed.normal(length, heads).sigmoid(),
    )
    one = bed.normal(heads, keys, values)
    _advanced(partial(delta.scan_row, *row), partial(delta_reference.scan_row, *row), one, None)
    ones = tuple(each[:3] for each in row)
    at = bed.ints([5, 1, 0][: min(length, 3)], torch.int64)
    _advanced(
        partial(delta.step_rows, *ones), partial(delta_reference.step_rows, *ones),
        bed.normal(7, heads, keys, values), at,
    )  # fmt: skip


def _selective(bed: Bed, length: int, channels: int, states: int) -> None:
    b, c = bed.normal(length, 2 * states).chunk(2, 1)
    row = [bed.normal(length, channels), bed.normal(length, channels).sigmoid(), b, c]
    constant = [-bed.normal(channels, states).exp(), bed.normal(channels)]
    _scanned(bed, selective, selective_reference, row, constant, [channels, states])


OPS: dict[str, Callable[[Bed], Cases]] = {
    "norm": norm_cases,
    "activation": activation_cases,
    "rotary": rotary_cases,
    "linear": linear_cases,
    "attention": attention_cases,
    "shared": shared_cases,
    "tail": tail_cases,
    "latent": latent_cases,
    "sparse": sparse_cases,
    "rope": rope_cases,
    "plan": plan_cases,
    "segments": segment_cases,
    "sampling": sampling_cases,
    "masks": mask_cases,
    "pages": page_cases,
    "start": start_cases,
    "end": end_cases,
    "tree": tree_cases,
    "states": state_cases,
    "moe": moe_cases,
    "grouping": grouping_cases,
    "packed": packed_cases,
    "gguf": gguf_cases,
    "packed_moe": packed_moe_cases,
}


def run(op: str, device: torch.device, seed: int, part: int = 0, parts: int = 1, *, few: bool = False) -> int:
    """Runs the cases of an operation, or one of `parts` of them, and returns how many there were; raises with the case's
    name at the first failure."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    torch.utils.deterministic.fill_uninitialized_memory = True
    count = 0
    cases = OPS[op](Bed(device, device.type == "cuda", random.Random(seed), few))
    for name, check in islice(cases, part, None, parts):
        try:
            check()
        except Exception as problem:
            raise AssertionError(f"{name} (seed {seed}): {problem}") from problem
        count += 1
    return count


if __name__ == "__main__":
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    where = torch.device("cpu" if interpreted else "cuda")
    for operation in sys.argv[1].split(","):
        print(run(operation, where, int(sys.argv[2]), few="few" in sys.argv[3:]), operation, "cases agree")
