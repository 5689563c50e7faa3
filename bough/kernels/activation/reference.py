"""What the activation kernels compute, in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(x_T2F: Tensor) -> Tensor:
    gate, up = x_T2F.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x_T2F.dtype)


def gelu_mul(x_T2F: Tensor) -> Tensor:
    gate, up = x_T2F.float().chunk(2, -1)
    return (F.gelu(gate) * up).to(x_T2F.dtype)


def relu2_mul(x_T2F: Tensor) -> Tensor:
    gate, up = x_T2F.float().chunk(2, -1)
    return (F.relu(gate).square() * up).to(x_T2F.dtype)


def relu_mul(x_T2F: Tensor) -> Tensor:
    gate, up = x_T2F.float().chunk(2, -1)
    return (F.relu(gate) * up).to(x_T2F.dtype)


def gelu_tanh_mul(x_T2F: Tensor) -> Tensor:
    gate, up = x_T2F.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(x_T2F.dtype)
