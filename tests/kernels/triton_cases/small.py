"""Norms, activations, rotary embedding and the KV write."""

from functools import partial

import torch
from torch import Tensor

from bough.kernels.activation import reference as activation_reference, triton as activation
from bough.kernels.kv_codes import Ranges
from bough.kernels.norm import reference as norm_reference, triton as norm
from bough.kernels.rotary import reference as rotary_reference, triton as rotary
from bough.kernels.rows import triton as rows
from triton_cases.bed import FLOAT8, Bed, Cases, close, poison, same_twice


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


def row_cases(bed: Bed) -> Cases:
    for count, widths in ((1, (2048, 40)), (16, (1500,)), (16, (24, 1024)), (300, (24, 40))):
        for dtype in bed.dtypes:
            yield f"{count} rows of {widths} {dtype}", partial(_rows, bed, count, widths, dtype)


def _rows(bed: Bed, count: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    tables = [bed.normal(50, width + 8, dtype=dtype)[:, :width] for width in widths]
    at = torch.randint(0, 50, (count,), device=bed.device)
    with poison():
        got = rows.take_rows(at, *tables)
    for made, table in zip(got, tables, strict=True):
        assert torch.equal(made, table[at])


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
        differs = (mine.long() - theirs.long()).abs()
        assert not differs.any(), (
            f"{int(differs.count_nonzero())} of {differs.numel()} codes or ranges are not those of the reference"
        )
