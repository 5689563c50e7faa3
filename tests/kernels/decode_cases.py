"""Steps of decode rows: attention that takes q, k and v as the projection left them, against two kernels.

TRITON_INTERPRET=1 python decode_cases.py decode SEED        (the CPU; without the variable set, a GPU)
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import triton_cases as cases
from torch import Tensor
from triton_cases import FLOAT8, Bed, Cases, Layer

from bough.kernels.attention import reference as attention_reference, triton_backend as backend
from bough.kernels.attention.inputs import AttentionInputs, SharedGroups
from bough.kernels.rotary import reference as rotary_reference


@dataclass(frozen=True)
class Style:
    """How queries and keys are made ready. `rotated`: dimensions that turn; None: no rotary positions at all."""

    rotated: int | None
    interleaved: bool = False
    norms: bool = False
    offset: float = 0.0


SMALL = [
    (Layer(4, 2, 16), Style(16)),
    (Layer(4, 4, 64), Style(64, norms=True)),
    (Layer(16, 2, 16), Style(8, interleaved=True)),
    (Layer(3, 1, 24, v_head_dim=8), Style(12, norms=True, offset=1.0)),
    (Layer(20, 1, 16), Style(16, interleaved=True, norms=True)),
    (Layer(7, 1, 128), Style(128)),
    (Layer(6, 2, 16), Style(None)),
    (Layer(4, 1, 64, window=13), Style(32)),
    (Layer(4, 2, 16, softcap=5.0), Style(16)),
]
LARGE = [
    (Layer(32, 8, 128), Style(128)),
    (Layer(32, 4, 128), Style(128, norms=True)),
    (Layer(28, 4, 128), Style(64)),
    (Layer(8, 8, 64), Style(64, interleaved=True)),
    (Layer(16, 1, 256), Style(256, norms=True, offset=1.0)),
    (Layer(71, 1, 64), Style(64)),
    (Layer(6, 2, 80, v_head_dim=48), Style(32, interleaved=True, norms=True)),
    (Layer(16, 4, 128), Style(None)),
    (Layer(32, 8, 128, window=333), Style(128)),
    (Layer(16, 8, 256, softcap=5.0, window=1000), Style(256)),
]


def decode_cases(bed: Bed) -> Cases:
    for dtype in bed.dtypes:
        for layer, style in LARGE if bed.large else SMALL:
            for size in ("one", "few", "many") if bed.large else (bed.rng.choice(("one", "few", "few", "many")),):
                page = bed.rng.choice((1, 16, 32, 64, 128) if bed.large else (1, 4, 16, 32))
                cache = FLOAT8 if bed.rng.random() < 0.3 else dtype
                name = f"decode {size} {layer} {style} page {page} {dtype} cache {cache}"
                yield name, partial(_decode, bed, layer, style, page, size, dtype, cache)
        for groups in ([(3, 3), (2, 6)], [(2, 1), (18, 4)], []) if bed.large else ([(3, 3), (6, 5)],):
            norms = bed.rng.random() < 0.5
            yield f"decode shared {groups} norms {norms} {dtype}", partial(_shared, bed, groups, norms, dtype)


def _contexts(bed: Bed, size: str, page: int) -> list[int]:
    """Ends and beginnings of pages and blocks, nothing at all, and anything between."""
    rng, longest = bed.rng, 3000 if bed.large else 60
    edges = [0, page - 1, page, 2 * page, 15, 16, 63, 64, 65]
    count = {"one": 1, "few": rng.randrange(2, 9), "many": rng.randrange(9, 70 if bed.large else 20)}[size]
    contexts = [rng.choice((rng.choice(edges), rng.randrange(longest))) for _ in range(count)]
    if size != "one":
        contexts[0] = 0
    return contexts


def _decode(bed: Bed, layer: Layer, style: Style, page: int, size: str, dtype: torch.dtype, cache: torch.dtype) -> None:
    rows = [(1, context) for context in _contexts(bed, size, page)]
    inputs = cases.attention_inputs(bed, rows, layer, page, cache, pad_rows=bed.rng.choice((0, 2)))
    if bed.rng.random() < 0.5:
        _own_padding(inputs)
    if cache == FLOAT8:
        inputs.k_scales, inputs.v_scales = [2.0], [0.5]
    _check(bed, inputs, layer, style, dtype, len(rows))


def _own_padding(inputs: AttentionInputs) -> None:
    """Padding as rows of one query and no KV."""
    padding = inputs.num_tokens - int(inputs.query_start_R1[-1])
    more = inputs.query_start_R1[-1] + torch.arange(1, padding + 1, device=inputs.query_start_R1.device)
    nothing = inputs.kv_len_R.new_zeros(padding)
    inputs.query_start_R1 = torch.cat((inputs.query_start_R1, more.to(torch.int32)))
    inputs.kv_len_R = torch.cat((inputs.kv_len_R, nothing))
    inputs.slots_R = torch.cat((inputs.slots_R, nothing))
    inputs.host = None


def _shared(bed: Bed, groups: list[tuple[int, int]], norms: bool, dtype: torch.dtype) -> None:
    """Groups of (rows, pages they share)."""
    layer, page = (Layer(32, 8, 128), 64) if bed.large else (Layer(4, 2, 16), 4)
    rows, members = [], []
    for count, pages in groups:
        members.append(list(range(len(rows), len(rows) + count)))
        rows += [(1, pages * page + bed.rng.randrange(0, 5 * page)) for _ in range(count)]
    rows += [(1, bed.rng.randrange(60)), (1, 0)]
    inputs = cases.attention_inputs(bed, rows, layer, page, dtype)
    for group, (_, pages) in zip(members, groups, strict=True):
        lines = inputs.slots_R[group].long()
        inputs.page_table[lines, :pages] = inputs.page_table[lines[0], :pages]
    start = np.concatenate(([0], np.cumsum([len(group) for group in members] + [0, 0])))
    inputs.shared = SharedGroups(
        bed.ints([row for group in members for row in group] + [0] * 5),
        bed.ints(start),
        bed.ints([pages * page for _, pages in groups] + [0, 0]),
    )
    style = Style(layer.head_dim, norms=norms)
    _check(bed, inputs, layer, style, dtype, len(rows))


def _check(bed: Bed, inputs: AttentionInputs, layer: Layer, style: Style, dtype: torch.dtype, real: int) -> None:
    """One pass = two passes = the reference, in what comes out and in what the pages hold then."""
    q, k, v, positions = _projection(bed, inputs, layer, dtype, real)
    table = bed.normal(int(positions.max()) + 1, style.rotated or 2)
    weights = [bed.normal(layer.head_dim, dtype=dtype) for _ in range(2)] if style.norms else [None, None]

    def attend(fused: bool) -> tuple[Tensor, AttentionInputs]:
        step = replace(inputs, k_caches=[inputs.k_caches[0].clone()], v_caches=[inputs.v_caches[0].clone()])
        before, backend.FUSED_DECODE = backend.FUSED_DECODE, fused
        runner = backend.TritonAttention(bed.device)
        try:
            with cases.small_shapes(bed):
                runner.prepare(step)
                if style.rotated is None:
                    step_once = partial(runner.forward, layer, q, k, v)
                else:
                    more = {"eps": 1e-5, "offset": style.offset, "interleaved": style.interleaved}
                    norms = {"q_norm": weights[0], "k_norm": weights[1]}
                    step_once = partial(runner.forward_rope, layer, q, k, v, positions, table, **norms, **more)
                out = cases.same_twice(step_once) if fused else step_once()
        finally:
            backend.FUSED_DECODE = before
        return out, step

    (one, mine), (two, theirs) = attend(True), attend(False)
    cases.close(one, two, dtype)
    assert not one[real:].any(), "padding must be zero"
    exact = not bed.large and not style.norms
    for a, b in zip(mine.k_caches + mine.v_caches, theirs.k_caches + theirs.v_caches, strict=True):
        _same_pages(a, b, exact)
    assert torch.equal(mine.v_caches[0].view(torch.uint8), theirs.v_caches[0].view(torch.uint8)), "v as it is"
    if inputs.k_caches[0].dtype == dtype:
        _against_reference(one, mine, q, positions, table, weights, layer, style, dtype)


def _projection(
    bed: Bed, inputs: AttentionInputs, layer: Layer, dtype: torch.dtype, real: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as views of one product, not a number where tokens are padding; the tokens' positions."""
    widths = [layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim]
    widths.append(layer.num_kv_heads * (layer.v_head_dim or layer.head_dim))
    fused = bed.normal(inputs.num_tokens, sum(widths), dtype=dtype)
    fused[real:] = float("nan")
    q, k, v = fused.split(widths, 1)
    if inputs.v_caches[0].dtype == FLOAT8:
        v.copy_(v.float().clamp(-8, 8).to(FLOAT8).to(dtype))
    positions = torch.zeros(inputs.num_tokens, dtype=torch.int64, device=bed.device)
    positions[:real] = inputs.kv_len_R[:real] - 1
    loc = inputs.loc_T[:real]
    for cache in (*inputs.k_caches, *inputs.v_caches):
        # What is read before it is written is not a number.
        cache.flatten(0, 1).view(torch.uint8)[loc] = 0x7F if cache.dtype == FLOAT8 else 0xFF
    kv = layer.num_kv_heads
    return q.unflatten(1, (layer.num_heads, -1)), k.unflatten(1, (kv, -1)), v.unflatten(1, (kv, -1)), positions


def _same_pages(a: Tensor, b: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), "the pages differ"
        return
    off = (a.float() - b.float()).abs()
    limit = 0.13 if a.dtype == FLOAT8 else 1e-5 if a.dtype == torch.float32 else 8e-3
    assert bool((off <= limit * (b.float().abs() + 1e-1)).all()), "the pages differ"


def _against_reference(
    got: Tensor,
    written: AttentionInputs,
    q: Tensor,
    positions: Tensor,
    table: Tensor,
    weights: list[Tensor | None],
    layer: Layer,
    style: Style,
    dtype: torch.dtype,
) -> None:
    """The output is that of the reference over the pages as they are now, in which nothing is left unwritten."""
    if weights[0] is not None:
        q = cases.norm_reference.rms_norm(q, weights[0], 1e-5, offset=style.offset)
    if style.rotated is not None:
        q, _ = rotary_reference.apply_rope(q, q, positions, table, interleaved=style.interleaved)
    cases.close(got, attention_reference.paged_attention(q, written, layer).flatten(1), dtype)


cases.OPS["decode"] = decode_cases

if __name__ == "__main__":
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for operation in sys.argv[1].split(","):
        device = torch.device("cpu" if interpreted else "cuda")
        print(cases.run(operation, device, int(sys.argv[2])), operation, "cases agree")
