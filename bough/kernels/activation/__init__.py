"""Gated activations: the two halves of the last dimension are gate and value.

in: [..., 2F]. out: [..., F] in the same dtype, float32 arithmetic. never: in-place changes.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def silu_mul(x_T2F: Tensor) -> Tensor:
    """silu(first half) * second half."""
    out: Tensor = _IMPLEMENTATIONS.pick("silu_mul", x_T2F.device)(x_T2F)
    return out


def gelu_mul(x_T2F: Tensor) -> Tensor:
    """gelu(first half), by the error function, * second half."""
    out: Tensor = _IMPLEMENTATIONS.pick("gelu_mul", x_T2F.device)(x_T2F)
    return out


def relu2_mul(x_T2F: Tensor) -> Tensor:
    """relu(first half) ** 2 * second half."""
    out: Tensor = _IMPLEMENTATIONS.pick("relu2_mul", x_T2F.device)(x_T2F)
    return out


def relu_mul(x_T2F: Tensor) -> Tensor:
    """relu(first half) * second half."""
    out: Tensor = _IMPLEMENTATIONS.pick("relu_mul", x_T2F.device)(x_T2F)
    return out


def gelu_tanh_mul(x_T2F: Tensor) -> Tensor:
    """gelu(first half), tanh approximation, * second half."""
    out: Tensor = _IMPLEMENTATIONS.pick("gelu_tanh_mul", x_T2F.device)(x_T2F)
    return out
