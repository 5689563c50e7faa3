"""Linear layers on CUDA: kernels of our own where they were measured to win, the vendor's library everywhere else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.activation.triton import silu_mul
from bough.kernels.launching import num_sms
from bough.kernels.linear import gated_hopper, reference
from bough.kernels.linear.skinny import MOST_TOKENS, SkinnyTiling, skinny, takes_norm
from bough.kernels.linear.table import choose
from bough.kernels.norm import inlined as norm
from bough.kernels.pitch import whole_rows

_CUT_FROM = 65
"""Tokens from which on multiplying takes longer than reading the weight."""
_CUT_DEPTH = 2048
"""The least D worth it."""
_TILE = 128
"""Of the vendor's tiles, tokens or rows. Measured on an H200, with the norm after it: at 192 tokens halves of D take 16.2 us
where 4096 x 4096 takes 20.6, and 38.6 where 4096 x 14336 takes 47.4; a decode step of 128 rows 5.84 ms instead of 6.01."""
_ADD_FROM = 256
"""Tokens from which on the vendor's product reads and adds a stream for less than the norm after it would; measured on an
H200: 0.6 us less at 256 tokens, 19 at 8,192."""


def _config(operation: str, x_TD: Tensor, weight: Tensor) -> SkinnyTiling | None:
    if x_TD.dim() != 2 or not 1 <= x_TD.shape[0] <= MOST_TOKENS or weight.stride(1) != 1:
        return None
    if x_TD.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x_TD.dtype:
        return None
    return choose(operation, x_TD.shape[0], weight.shape[0], weight.shape[1], x_TD.dtype, x_TD.device)


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    config = _config("linear", x_TD, weight_OD)
    if config is not None:
        return skinny(x_TD, weight_OD, config, bias=bias_O)
    return F.linear(*whole_rows(x_TD, weight_OD), bias_O)


def linear_onto(x_TD: Tensor, weight_OD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
    if x_TD.shape[0] >= _ADD_FROM:
        x_TD, weight_OD = whole_rows(x_TD, weight_OD)
        return stream_TO.addmm_(x_TD, weight_OD.t()), None
    if _is_cut(x_TD, weight_OD):
        half = x_TD.shape[1] // 2
        x_2TD, weight_2DO = x_TD.view(-1, 2, half).transpose(0, 1), weight_OD.view(-1, 2, half).permute(1, 2, 0)
        return torch.bmm(x_2TD, weight_2DO), stream_TO
    return linear(x_TD, weight_OD), stream_TO


def linear_after_norm(
    x_TD: Tensor,
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight_OD: Tensor,
    bias_O: Tensor | None = None,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    config = _config("linear", x_TD, weight_OD)
    if config is None or not norm.suits(x_TD, residual_TD, norm_D) or not takes_norm(x_TD, weight_OD, config, bias_O):
        return reference.linear_after_norm(x_TD, residual_TD, norm_D, eps, weight_OD, bias_O, offset=offset)
    total_TD = x_TD.new_empty(x_TD.shape)
    normed = norm.normed(x_TD, residual_TD, norm_D, eps, offset, total_TD)
    return skinny(x_TD, weight_OD, config, bias=bias_O, normed=normed), total_TD


def _is_cut(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """Whether a product leaves enough multiprocessors without a tile that computing halves of D apart, which the norm
    adds up, is faster.

    In bfloat16 only: in float16 half of a sum might not fit where the whole does.
    """
    (tokens, depth), rows = x_TD.shape, weight_OD.shape[0]
    if not _CUT_FROM <= tokens < _ADD_FROM or depth < _CUT_DEPTH or depth % 64 or x_TD.dtype != torch.bfloat16:
        return False
    tiles = -(-tokens // _TILE) * -(-rows // _TILE)
    return 2 * tiles <= num_sms(x_TD.device) and _config("linear", x_TD, weight_OD) is None


def linear_silu_mul(x_TD: Tensor, weight_2FD: Tensor) -> Tensor:
    tiling = gated_hopper.tiling_for(x_TD, weight_2FD)
    if tiling is not None:
        return gated_hopper.gated(x_TD, weight_2FD, tiling)
    config = _config("silu_mul", x_TD, weight_2FD)
    return silu_mul(F.linear(x_TD, weight_2FD)) if config is None else skinny(x_TD, weight_2FD, config, silu_mul=True)
