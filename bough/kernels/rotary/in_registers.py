# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Norm and rotation of heads within another kernel, each dimension of a head beside the one it is paired with.

Gives what the pass of its own (triton.py) gives. Pairs are (i, i + HALF), or (2i, 2i + 1) if INTERLEAVED; dimensions from
2 * HALF on are not rotated; HALF 0: none is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _partner(dim, HALF: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The dimension that each one of a tile WIDTH wide is paired with. Written so that loads by it stay wide."""
    if INTERLEAVED:
        other = dim + 1 - 2 * (dim % 2)
    else:
        other = (dim + HALF) % (2 * HALF)
    return other if WIDTH == 2 * HALF else tl.where(dim < 2 * HALF, other, dim)


@triton.jit
def turn(cos_sin, position, dim, HALF: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(cos, sin) of every dimension, such that `x * cos + partner * sin` is x turned to its position.

    `position` is a scalar, or [M, 1] for heads at positions of their own; `dim` is [1, WIDTH].
    """
    if HALF == 0:
        cos = dim * 0.0 + 1.0
        sin = dim * 0.0
    else:
        if INTERLEAVED:
            pair = dim // 2
            first = dim % 2 == 0
        else:
            pair = dim % HALF
            first = dim < HALF
        at = cos_sin + position * (2 * HALF) + pair
        if WIDTH == 2 * HALF:
            cos = tl.load(at)
            sin = tl.load(at + HALF)
        else:
            cos = tl.load(at, mask=dim < 2 * HALF, other=1.0)
            sin = tl.load(at + HALF, mask=dim < 2 * HALF, other=0.0)
        sin = tl.where(first, -sin, sin)
    return cos, sin


@triton.jit
def turned(
    base,
    dim,
    inside,
    cos,
    sin,
    weight,
    eps,
    offset,
    H: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Heads [M, WIDTH] that start at the addresses `base` [M, 1]: normed if NORM, turned, and rounded to their dtype.

    `inside` says which entries exist (`dim` below H, and real heads); the others are zero.
    """
    DTYPE: tl.constexpr = base.dtype.element_ty
    x = tl.load(base + dim, mask=inside, other=0.0)
    if NORM or HALF > 0:
        x = x.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, 1) / H + eps)[:, None]
            x = _normed(x, scale, weight, dim, offset, H).to(DTYPE).to(tl.float32)
        if HALF > 0:
            other = _partner(dim, HALF, WIDTH, INTERLEAVED)
            y = tl.load(base + other, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                y = _normed(y, scale, weight, other, offset, H).to(DTYPE).to(tl.float32)
            x = x * cos + y * sin
    return x.to(DTYPE)


@triton.jit
def _normed(x, scale, weight, dim, offset, H: tl.constexpr):
    return x * (scale * (tl.load(weight + dim, mask=dim < H, other=0.0).to(tl.float32) + offset))
