"""What the norm kernels compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    x = x_TD.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * (weight_D.float() + offset)).to(x_TD.dtype)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    added = x_TD.float() if x_TD.dim() == residual_TD.dim() else x_TD.float().sum(0)
    total = (added + residual_TD.float()).to(x_TD.dtype)
    return rms_norm(total, weight_D, eps, offset=offset), total
