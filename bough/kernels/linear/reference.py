"""What the linear kernels compute, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bough.kernels.activation import silu_mul


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return F.linear(x_TD, weight_OD, bias_O)


def linear_onto(x_TD: Tensor, weight_OD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
    return linear(x_TD, weight_OD), stream_TO


def linear_silu_mul(x_TD: Tensor, weight_2FD: Tensor) -> Tensor:
    return silu_mul(F.linear(x_TD, weight_2FD))
