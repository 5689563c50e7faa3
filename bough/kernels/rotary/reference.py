"""What the rotary kernels compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from bough.kernels.kv_codes import Ranges, bits_of, encode
from bough.kernels.norm.reference import rms_norm


def _rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool) -> Tensor:
    half = cos_T1R.shape[-1]
    x, rest = x_TNH[..., : 2 * half].float(), x_TNH[..., 2 * half :]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x[..., :half], x[..., half:]
    parts = (a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R)
    rotated = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((rotated.to(x_TNH.dtype), rest), -1)


def apply_rope(
    q_TNH: Tensor, k_TKH: Tensor, positions_T: Tensor, cos_sin_PR: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, -1)
    num = len(q_TNH)  # there may be fewer than keys
    return _rotate(q_TNH, cos[:num], sin[:num], interleaved), _rotate(k_TKH, cos, sin, interleaved)


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
    q = rms_norm(q_TNH, q_weight_H, eps, offset=offset)
    k = rms_norm(k_TKH, k_weight_H, eps, offset=offset)
    return apply_rope(q, k, positions_T, cos_sin_PR, interleaved=interleaved)


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
    q = q_TNH if q_norm is None else rms_norm(q_TNH, q_norm, eps, offset=offset)
    k = k_TKH if k_norm is None else rms_norm(k_TKH, k_norm, eps, offset=offset)
    q, k = apply_rope(q, k, positions_T, cos_sin_PR, interleaved=interleaved)
    write_kv(k, v_TKH, k_cache, v_cache, loc_T, k_scale=k_scale, v_scale=v_scale, ranges=ranges)
    return q, k


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
    token = (loc_T >= 0).nonzero().squeeze(1)
    loc = loc_T[token].long()
    if ranges is not None:
        for new, cache, each in ((k_TKH, k_cache, ranges.keys), (v_TKH, v_cache, ranges.values)):
            codes, made = encode(new[token], bits_of(cache, new.shape[-1]))
            cache.flatten(0, 1)[loc] = codes
            each.flatten(0, 1)[loc] = made
        return
    for new, cache, scale in ((k_TKH, k_cache, k_scale), (v_TKH, v_cache, v_scale)):
        values = new[token] if scale == 1.0 else new[token].float() / scale
        flat = cache.flatten(0, 1)
        if cache.dtype.itemsize == 1:
            limit = torch.finfo(cache.dtype).max
            flat.view(torch.uint8)[loc] = values.float().clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
        else:
            flat[loc] = values.to(cache.dtype)
