"""Rotary position embedding, with the q/k norms and the KV-cache write that surround it in a decoder layer.

in: q, k, v (views of a fused projection are fine), positions, a cos/sin table, KV pages. out: rotated q, k; written pages.
never: attention itself.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard
from bough.kernels.kv_codes import Ranges

_IMPLEMENTATIONS = standard(__name__)


def apply_rope(
    q_TNH: Tensor, k_TKH: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates the first R of H dimensions of each head.

    `cos_sin_PR` is float32 [max_position, R]: R/2 cosines, then R/2 sines. Pairs are (i, i + R/2), or (2i, 2i + 1) if
    `interleaved`.
    """
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("apply_rope", q_TNH.device)(
        q_TNH, k_TKH, positions_T, cos_sin_PR, interleaved=interleaved
    )
    return out


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
    """RMS norm of each head with its weight, then `apply_rope`."""
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("qk_norm_rope", q_TNH.device)(
        q_TNH, k_TKH, q_weight_H, k_weight_H, eps, positions_T, cos_sin_PR, offset=offset, interleaved=interleaved
    )
    return out


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
    """(Norm and) rotate q and k, and write k and v to their pages, in one pass. Returns the rotated (q, k).

    There may be fewer queries than keys: those of the first tokens. `ranges` as in `write_kv`.
    """
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("rope_and_write", q_TNH.device)(
        q_TNH,
        k_TKH,
        v_TKH,
        positions_T,
        cos_sin_PR,
        k_cache,
        v_cache,
        loc_T,
        q_norm,
        k_norm,
        eps,
        offset,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
        ranges=ranges,
    )
    return out


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
    """Writes token t's k / k_scale and v / v_scale at flat location `loc_T[t]` of the pages; -1 writes nothing.

    Caches are [num_pages, page_size, K, H]; values beyond the range of a float8 cache saturate. With `ranges`, caches hold
    codes (see `kernels.kv_codes`), and a token's ranges are written too.
    """
    _IMPLEMENTATIONS.pick("write_kv", k_TKH.device)(
        k_TKH, v_TKH, k_cache, v_cache, loc_T, k_scale=k_scale, v_scale=v_scale, ranges=ranges
    )
