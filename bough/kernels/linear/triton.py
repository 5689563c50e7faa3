"""Linear layers on CUDA: kernels of our own where they were measured to win, the vendor's library everywhere else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.activation.triton import silu_mul
from bough.kernels.linear import gated_hopper
from bough.kernels.linear.skinny import MOST_TOKENS, Config, skinny
from bough.kernels.linear.table import choose

_ADD_FROM = 256
"""Tokens from which on the vendor's product reads and adds a stream for less than the norm after it would; measured on an
H200: 0.6 us less at 256 tokens, 19 at 8,192."""


def _config(operation: str, x_TD: Tensor, weight: Tensor) -> Config | None:
    if x_TD.dim() != 2 or not 1 <= x_TD.shape[0] <= MOST_TOKENS or weight.stride(1) != 1:
        return None
    if x_TD.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x_TD.dtype:
        return None
    return choose(operation, x_TD.shape[0], weight.shape[0], weight.shape[1], x_TD.dtype, x_TD.device)


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    config = _config("linear", x_TD, weight_OD)
    return F.linear(x_TD, weight_OD, bias_O) if config is None else skinny(x_TD, weight_OD, config, bias=bias_O)


def linear_onto(x_TD: Tensor, weight_OD: Tensor, stream_TO: Tensor) -> Tensor | None:
    return None if x_TD.shape[0] < _ADD_FROM else stream_TO.addmm_(x_TD, weight_OD.t())


def linear_silu_mul(x_TD: Tensor, weight_2FD: Tensor) -> Tensor:
    tiling = gated_hopper.tiling_for(x_TD, weight_2FD)
    if tiling is not None:
        return gated_hopper.gated(x_TD, weight_2FD, tiling)
    config = _config("silu_mul", x_TD, weight_2FD)
    return silu_mul(F.linear(x_TD, weight_2FD)) if config is None else skinny(x_TD, weight_2FD, config, silu_mul=True)
