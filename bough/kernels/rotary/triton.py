# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Rotary embedding, q/k norms and the KV write on the GPU: one program a token and a group of heads of one kind."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.kv_codes import SMALLEST_STEP, Ranges, bits_of
from bough.kernels.launching import Launcher, cdiv, pdl_options, power_of_two, trigger, wait

_HEADS = 8
"""Heads a program handles."""
_SMALLEST_STEP = tl.constexpr(SMALLEST_STEP)


@triton.jit
def to_cache(value, inverse_scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Converts to the cache's dtype, saturating where that is float8."""
    if SCALED:
        value = value.to(tl.float32) * inverse_scale
    if tl.float8e4nv == DTYPE:
        value = _rounded_to_float8(tl.clamp(value.to(tl.float32), -448.0, 448.0))
    return value.to(DTYPE)


@triton.jit
def _rounded_to_float8(value):
    """The nearest e4m3 value of a float32 one, ties to even. A conversion may go by way of 16 bits, and round twice."""
    bits = value.to(tl.int32, bitcast=True)
    sign = bits & -0x80000000
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2**-6 steps are 2**-9, which is what 24576.0 leaves of a sum.
    small = ((tl.abs(value) + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | sign
    return tl.where(tl.abs(value) < 0.015625, small, normal).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["q_tokens", "tokens"])
def _heads_kernel(
    q,
    k,
    v,
    q_out,
    k_out,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    loc,
    q_weight,
    k_weight,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    k_cache_token,
    k_cache_head,
    v_cache_token,
    v_cache_head,
    q_tokens,
    tokens,
    eps,
    offset,
    inverse_k_scale,
    inverse_v_scale,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    VH: tl.constexpr,
    HALF: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    WRITE: tl.constexpr,
    SCALED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    Q_PARTS: tl.constexpr = (N + HEADS - 1) // HEADS
    program = tl.program_id(0)
    is_query = program < q_tokens * Q_PARTS
    program = tl.where(is_query, program, program - q_tokens * Q_PARTS)
    count = tl.where(is_query, q_tokens, tokens)
    part = program // count
    token = (program % count).to(tl.int64)
    trigger(PDL)
    if K == 0:  # queries alone are of some tokens, whose positions may just have been gathered
        wait(PDL)
    # Otherwise positions are inputs of the step, which only its first kernel may write: that waits and does not trigger.
    position = tl.load(positions + token).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HALF
    cos = tl.load(cos_sin + position * (2 * HALF) + half, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + half, mask=in_half, other=0.0)[None, :]
    wait(PDL)
    if is_query:
        head = part * HEADS + tl.arange(0, HEADS)
        a, b, rest = _load_head(
            q + token * q_token, q_head, head, N, H, HALF, q_weight, eps, offset,
            NORM_Q, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
        a, b = (a * cos - b * sin).to(q_out.dtype.element_ty), (b * cos + a * sin).to(q_out.dtype.element_ty)
        rest = rest.to(q_out.dtype.element_ty)
        _store_head(
            q_out + token * (N * H), H, head, N, H, HALF, a, b, rest, INTERLEAVED, BLOCK_HALF, BLOCK_REST
        )  # fmt: skip
    else:
        head = part * HEADS + tl.arange(0, HEADS)
        a, b, rest = _load_head(
            k + token * k_token, k_head, head, K, H, HALF, k_weight, eps, offset,
            NORM_K, INTERLEAVED, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
        a, b = (a * cos - b * sin).to(k_out.dtype.element_ty), (b * cos + a * sin).to(k_out.dtype.element_ty)
        rest = rest.to(k_out.dtype.element_ty)
        _store_head(
            k_out + token * (K * H), H, head, K, H, HALF, a, b, rest, INTERLEAVED, BLOCK_HALF, BLOCK_REST
        )  # fmt: skip
        if WRITE:
            at = tl.load(loc + token).to(tl.int64)
            if at >= 0:
                DTYPE: tl.constexpr = k_cache.dtype.element_ty
                cached_a = to_cache(a, inverse_k_scale, SCALED, DTYPE)
                cached_b = to_cache(b, inverse_k_scale, SCALED, DTYPE)
                cached_rest = to_cache(rest, inverse_k_scale, SCALED, DTYPE)
                _store_head(
                    k_cache + at * k_cache_token, k_cache_head, head, K, H, HALF, cached_a, cached_b, cached_rest,
                    INTERLEAVED, BLOCK_HALF, BLOCK_REST,
                )  # fmt: skip
                dim = tl.arange(0, BLOCK_V)
                inside = (head < K)[:, None] & (dim < VH)[None, :]
                value = tl.load(v + token * v_token + head[:, None] * v_head + dim[None, :], mask=inside, other=0.0)
                value = to_cache(value, inverse_v_scale, SCALED, v_cache.dtype.element_ty)
                target = v_cache + at * v_cache_token + head[:, None] * v_cache_head + dim[None, :]
                tl.store(target, value, mask=inside)


_ROTATION = Launcher(_heads_kernel)


@triton.jit
def _pairs(BLOCK_HALF: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Offsets of the two members of each rotated pair."""
    half = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        return 2 * half, 2 * half + 1
    return half, half + HALF


@triton.jit
def _load_head(
    base,
    stride,
    head,
    NUM: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    weight,
    eps,
    offset,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    first, second = _pairs(BLOCK_HALF, HALF, INTERLEAVED)
    inside = (head < NUM)[:, None] & (tl.arange(0, BLOCK_HALF) < HALF)[None, :]
    base += head[:, None] * stride
    a = tl.load(base + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + second[None, :], mask=inside, other=0.0).to(tl.float32)
    tail = 2 * HALF + tl.arange(0, BLOCK_REST)
    in_tail = (head < NUM)[:, None] & (tail < H)[None, :]
    rest = tl.load(base + tail[None, :], mask=in_tail, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(square / H + eps)[:, None]
        half_mask = tl.arange(0, BLOCK_HALF) < HALF
        a *= scale * (tl.load(weight + first, mask=half_mask, other=0.0).to(tl.float32) + offset)[None, :]
        b *= scale * (tl.load(weight + second, mask=half_mask, other=0.0).to(tl.float32) + offset)[None, :]
        rest *= scale * (tl.load(weight + tail, mask=tail < H, other=0.0).to(tl.float32) + offset)[None, :]
        DTYPE: tl.constexpr = base.dtype.element_ty
        a, b = a.to(DTYPE).to(tl.float32), b.to(DTYPE).to(tl.float32)
    return a, b, rest


@triton.jit
def _store_head(
    base,
    stride,
    head,
    NUM: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    a,
    b,
    rest,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    first, second = _pairs(BLOCK_HALF, HALF, INTERLEAVED)
    inside = (head < NUM)[:, None] & (tl.arange(0, BLOCK_HALF) < HALF)[None, :]
    base += head[:, None] * stride
    tl.store(base + first[None, :], a, mask=inside)
    tl.store(base + second[None, :], b, mask=inside)
    if H > 2 * HALF:
        tail = 2 * HALF + tl.arange(0, BLOCK_REST)
        tl.store(base + tail[None, :], rest, mask=(head < NUM)[:, None] & (tail < H)[None, :])


@triton.jit
def _write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    loc,
    inverse_k_scale,
    inverse_v_scale,
    k_token,
    k_head,
    v_token,
    v_head,
    k_cache_token,
    k_cache_head,
    v_cache_token,
    v_cache_head,
    K: tl.constexpr,
    H: tl.constexpr,
    VH: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    trigger(PDL)
    wait(PDL)
    at = tl.load(loc + token).to(tl.int64)
    if at >= 0:
        head = tl.arange(0, BLOCK_K)[:, None]
        dim = tl.arange(0, BLOCK_H)[None, :]
        inside = (head < K) & (dim < H)
        value = tl.load(k + token * k_token + head * k_head + dim, mask=inside, other=0.0)
        value = to_cache(value, inverse_k_scale, SCALED, k_cache.dtype.element_ty)
        tl.store(k_cache + at * k_cache_token + head * k_cache_head + dim, value, mask=inside)
        dim = tl.arange(0, BLOCK_V)[None, :]
        inside = (head < K) & (dim < VH)
        value = tl.load(v + token * v_token + head * v_head + dim, mask=inside, other=0.0)
        value = to_cache(value, inverse_v_scale, SCALED, v_cache.dtype.element_ty)
        tl.store(v_cache + at * v_cache_token + head * v_cache_head + dim, value, mask=inside)


@triton.jit
def _write_codes(
    x, head_step, cache, ranges, at, K: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and ranges of one token's heads: what `kv_codes.encode` makes, to the bit, by the two halves of a vector.

    Its kernel is compiled without fused multiply-add, which would round a number's place in its range once instead of
    twice: numbers in the middle between two codes (1 of 1,000 where they are of 16 bits) would get the other one.
    """
    HALF: tl.constexpr = D // 2
    MOST: tl.constexpr = (1 << BITS) - 1
    head = tl.arange(0, BLOCK_K)
    dim = tl.arange(0, BLOCK)
    inside = (head < K)[:, None] & (dim < HALF)[None, :]
    first_at = x + head[:, None] * head_step + dim[None, :]
    a = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first_at + HALF, mask=inside, other=0.0).to(tl.float32)
    lowest = tl.min(tl.where(inside, tl.minimum(a, b), float("inf")), 1)
    highest = tl.max(tl.where(inside, tl.maximum(a, b), float("-inf")), 1)
    bits = (tl.where(head < K, lowest, 0.0) + 0.0).to(tl.int32, bitcast=True)
    low_bits = tl.where(bits < 0, bits + 0xFFFF, bits) & -0x10000
    low = low_bits.to(tl.float32, bitcast=True)
    span = tl.where(head < K, highest, 0.0) - low
    step_bits = (tl.div_rn(span, MOST * 1.0).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    step = step_bits.to(tl.float32, bitcast=True)
    step_bits = tl.where(step < _SMALLEST_STEP, 0, step_bits)
    inverse = tl.where(step < _SMALLEST_STEP, 0.0, tl.div_rn(1.0, tl.where(step < _SMALLEST_STEP, 1.0, step)))
    a = _nearest((a - low[:, None]) * inverse[:, None], MOST)
    b = _nearest((b - low[:, None]) * inverse[:, None], MOST)
    WIDTH: tl.constexpr = D * BITS // 8
    to = cache + (at * K + head[:, None]) * WIDTH + dim[None, :]
    if BITS == 4:
        tl.store(to, (a | (b << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(to, a.to(tl.uint8), mask=inside)
        tl.store(to + HALF, b.to(tl.uint8), mask=inside)
    tl.store(ranges + at * K + head, step_bits | ((low_bits >> 16) & 0xFFFF), mask=head < K)


@triton.jit
def _nearest(value, MOST: tl.constexpr):
    """The nearest whole number, ties to even: 1.5 * 2**23 leaves no more of a sum."""
    whole = ((value + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.minimum(tl.maximum(whole, 0), MOST)


@triton.jit
def _write_codes_kernel(
    k,
    v,
    k_cache,
    v_cache,
    k_ranges,
    v_ranges,
    loc,
    k_token,
    k_head,
    v_token,
    v_head,
    K: tl.constexpr,
    H: tl.constexpr,
    VH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    trigger(PDL)
    wait(PDL)
    at = tl.load(loc + token).to(tl.int64)
    if at >= 0:
        if tl.program_id(1) == 0:
            _write_codes(k + token * k_token, k_head, k_cache, k_ranges, at, K, H, BITS, BLOCK_K, BLOCK_H)
        else:
            _write_codes(v + token * v_token, v_head, v_cache, v_ranges, at, K, VH, BITS, BLOCK_K, BLOCK_V)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_cache(cache: Tensor) -> None:
    if cache.stride(-1) != 1 or cache.stride(0) != cache.shape[1] * cache.stride(1):
        raise ValueError(f"KV pages must lie one after the other with dense heads; strides are {cache.stride()}")


def _heads(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool,
    v: Tensor | None = None,
    caches: tuple[Tensor, Tensor] | None = None,
    loc: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    q, k = _dense(q), _dense(k)
    (q_tokens, num_heads, width), (tokens, kv_heads, _) = q.shape, k.shape
    half = cos_sin.shape[1] // 2
    q_out, k_out = q.new_empty((q_tokens, num_heads, width)), k.new_empty((tokens, kv_heads, width))
    if tokens == 0:
        return q_out, k_out
    value = k if v is None else _dense(v)
    k_cache, v_cache = (k_out, k_out) if caches is None else caches
    if caches is not None:
        _check_cache(k_cache)
        _check_cache(v_cache)
    heads = min(_HEADS, power_of_two(max(num_heads, kv_heads)))
    (q_token, q_head, _), (k_token, k_head, _), (v_token, v_head, _) = q.stride(), k.stride(), value.stride()
    _ROTATION.launch(
        (q_tokens * cdiv(num_heads, heads) + tokens * cdiv(kv_heads, heads), 1),
        (
            q, k, value, q_out, k_out, positions, cos_sin, k_cache, v_cache, positions if loc is None else loc,
            q if q_norm is None else q_norm, k if k_norm is None else k_norm,
        ),
        (q_token, q_head, k_token, k_head, v_token, v_head, *k_cache.stride()[-3:-1], *v_cache.stride()[-3:-1]),
        (eps, offset, 1.0 / k_scale, 1.0 / v_scale),
        (
            num_heads, kv_heads, width, value.shape[2], half, q_norm is not None, k_norm is not None, caches is not None,
            k_scale != 1.0 or v_scale != 1.0, interleaved, heads, power_of_two(half),
            power_of_two(max(width - 2 * half, 1)), power_of_two(value.shape[2]),
        ),
        num_warps=2,
        counts=(q_tokens, tokens),
    )  # fmt: skip
    return q_out, k_out


def apply_rope(
    q_TNH: Tensor, k_TKH: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return _heads(q_TNH, k_TKH, positions_T, cos_sin_PR, interleaved=interleaved)


def qk_norm_rope(
    q_TNH: Tensor,
    k_TKH: Tensor,
    q_weight_H: Tensor,
    k_weight_H: Tensor,
    eps: float,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    return _heads(
        q_TNH,
        k_TKH,
        positions_T,
        cos_sin_PR,
        interleaved=interleaved,
        q_norm=q_weight_H,
        k_norm=k_weight_H,
        eps=eps,
        offset=offset,
    )


def rope_queries(
    q_TNH: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    q_norm: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    *,
    interleaved: bool = False,
) -> Tensor:
    """What `rope_and_write` makes of queries, for queries alone."""
    no_keys = q_TNH[:, :0]
    return _heads(
        q_TNH, no_keys, positions_T, cos_sin_PR, interleaved=interleaved, q_norm=q_norm, eps=eps, offset=offset
    )[0]


def rope_and_write(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    positions_T: Tensor,
    cos_sin_PR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc_T: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    *,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    ranges: Ranges | None = None,
) -> tuple[Tensor, Tensor]:
    if ranges is not None:
        q, k = _heads(
            q_TNH, k_TKH, positions_T, cos_sin_PR, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps,
            offset=offset,
        )  # fmt: skip
        write_kv(k, v_TKH, k_cache, v_cache, loc_T, ranges=ranges)
        return q, k
    return _heads(
        q_TNH,
        k_TKH,
        positions_T,
        cos_sin_PR,
        interleaved=interleaved,
        v=v_TKH,
        caches=(k_cache, v_cache),
        loc=loc_T,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        offset=offset,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def write_kv(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc_T: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    ranges: Ranges | None = None,
) -> None:
    k, v = _dense(k_TKH), _dense(v_TKH)
    _check_cache(k_cache)
    _check_cache(v_cache)
    tokens, kv_heads, width = k.shape
    if tokens == 0:
        return
    if ranges is not None:
        widest = power_of_two(kv_heads) * power_of_two(max(width, v.shape[2]) // 2)
        _write_codes_kernel[(tokens, 2)](
            k,
            v,
            k_cache,
            v_cache,
            ranges.keys,
            ranges.values,
            loc_T,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            K=kv_heads,
            H=width,
            VH=v.shape[2],
            BITS=bits_of(k_cache, width),
            BLOCK_K=power_of_two(kv_heads),
            BLOCK_H=power_of_two(width // 2),
            BLOCK_V=power_of_two(v.shape[2] // 2),
            num_warps=max(1, min(8, widest // 256)),
            enable_fp_fusion=False,
            **pdl_options(k.device),
        )
        return
    block = power_of_two(kv_heads) * power_of_two(max(width, v.shape[2]))
    _write_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        loc_T,
        1.0 / k_scale,
        1.0 / v_scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(1),
        v_cache.stride(2),
        K=kv_heads,
        H=width,
        VH=v.shape[2],
        SCALED=k_scale != 1.0 or v_scale != 1.0,
        BLOCK_K=power_of_two(kv_heads),
        BLOCK_H=power_of_two(width),
        BLOCK_V=power_of_two(v.shape[2]),
        num_warps=max(1, min(8, block // 256)),
        **pdl_options(k.device),
    )
