"""What the linear kernels compute, in plain torch; what joins several of them, one after the other."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bough.kernels import linear as doors
from bough.kernels.activation import silu_mul
from bough.kernels.norm import add_rms_norm


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return F.linear(x_TD, weight_OD, bias_O)


def linear_onto(x_TD: Tensor, weight_OD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
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
    """One after the other, each by what the device has for it."""
    normed_TD, total_TD = add_rms_norm(x_TD, residual_TD, norm_D, eps, offset=offset)
    return doors.linear(normed_TD, weight_OD, bias_O), total_TD


def linear_silu_mul(x_TD: Tensor, weight_2FD: Tensor) -> Tensor:
    return silu_mul(F.linear(x_TD, weight_2FD))
