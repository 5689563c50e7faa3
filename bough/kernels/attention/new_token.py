# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Decode rows whose token is new to this launch of attention: q, k and v come as the projection left them."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.rotary.in_registers import turned
from bough.kernels.rotary.triton import to_cache

BLOCKS_AHEAD = 2
"""Blocks of a program's KV asked into L2 while the projection still runs: those no kernel of the step writes."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Queries, keys and values of rows of one token each, as the projection left them.

    The launches of such a step norm and rotate the queries as they read them. The launch over the rows also norms and
    rotates the new keys and writes them, and the values, to their pages. See `bough.kernels.rotary.rope_and_write`.
    """

    k_TKH: Tensor
    v_TKV: Tensor
    loc_T: Tensor
    """int64 [T]: where in the flat cache the token's KV goes; -1: nowhere."""
    positions_T: Tensor
    cos_sin_PR: Tensor | None
    """None: nothing is rotated."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    interleaved: bool = False

    def arguments(self, k_cache: Tensor, v_cache: Tensor, k_scale: float, v_scale: float) -> dict[str, object]:
        """What the kernel is told of it."""
        k, v, cos_sin = self.k_TKH, self.v_TKV, self.cos_sin_PR
        return {
            "new_k": k,
            "new_v": v,
            "loc": self.loc_T,
            "positions": self.positions_T,
            "cos_sin": self.positions_T if cos_sin is None else cos_sin,
            "q_weight": k if self.q_norm is None else self.q_norm,
            "k_weight": k if self.k_norm is None else self.k_norm,
            "eps": self.eps,
            "offset": self.offset,
            "inverse_k_scale": 1.0 / k_scale,
            "inverse_v_scale": 1.0 / v_scale,
            "new_k_token": k.stride(0),
            "new_k_head": k.stride(1),
            "new_v_token": v.stride(0),
            "new_v_head": v.stride(1),
            "RAW": True,
            "HALF": 0 if cos_sin is None else cos_sin.shape[1] // 2,
            "INTERLEAVED": self.interleaved,
            "NORM_Q": self.q_norm is not None,
            "NORM_K": self.k_norm is not None,
            "AHEAD": BLOCKS_AHEAD if _can_be_asked_for(k_cache) and _can_be_asked_for(v_cache) else 0,
            "SCALED": k_scale != 1.0 or v_scale != 1.0,
        }


def _can_be_asked_for(cache: Tensor) -> bool:
    """Whether the tokens of every head lie as `ask_for` needs them."""
    item = cache.element_size()
    return not any(size * item % 16 for size in (cache.shape[3], cache.stride(1), cache.stride(2)))


NOT_RAW = dict.fromkeys(
    (
        "new_k", "new_v", "loc", "positions", "cos_sin", "q_weight", "k_weight", "eps", "offset", "inverse_k_scale",
        "inverse_v_scale", "new_k_token", "new_k_head", "new_v_token", "new_v_head",
    )
) | dict.fromkeys(("RAW", "INTERLEAVED", "NORM_Q", "NORM_K", "SCALED"), False) | {"HALF": 0, "AHEAD": 0}  # fmt: skip


@triton.jit
def spread(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M, WIDTH] from [ROWS, WIDTH], which repeats."""
    return tl.broadcast_to(x[None, :, :], [BLOCK_M // ROWS, ROWS, WIDTH]).reshape([BLOCK_M, WIDTH])


@triton.jit
def new_key_value(
    k,
    v,
    k_to,
    v_to,
    mine,
    written,
    cos,
    sin,
    weight,
    eps,
    offset,
    inverse_k_scale,
    inverse_v_scale,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    VH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A row's new key, normed and turned, and its value [1, BLOCK_V], both as a later step will read them.

    `k` and `v` point to them, `k_to` and `v_to` to their places in the cache, where they go if `written` is 1. Both are zero
    if `mine` is 0. The key comes once for each of ROWS queries: laid out as they are, it meets them without a detour.
    """
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, BLOCK_H)[None, :]
    v_dim = tl.arange(0, BLOCK_V)[None, :]
    value = tl.load(v + v_dim, mask=v_dim < VH * mine, other=0.0)
    key = turned(
        k + row * 0, dim, dim + row * 0 < H * mine, cos, sin, weight, eps, offset, H, HALF, BLOCK_H, NORM, INTERLEAVED
    )
    key = to_cache(key, inverse_k_scale, SCALED, k_to.dtype.element_ty)
    value = to_cache(value, inverse_v_scale, SCALED, v_to.dtype.element_ty)
    tl.store(k_to + row * 0 + dim, key, mask=(row == 0) & (dim < H * written))
    tl.store(v_to + v_dim, value, mask=v_dim < VH * written)
    return key.to(DTYPE).to(tl.float32), value.to(DTYPE).to(tl.float32)


@triton.jit
def ask_for(rows, BYTES: tl.constexpr):
    """Asks for BYTES from each address on into L2; both must be multiples of 16."""
    address = rows.to(tl.int64)
    size = tl.zeros_like(address).to(tl.int32) + BYTES
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
