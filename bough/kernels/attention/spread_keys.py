"""Keys whose large channels are spread over a head before they are kept in 4 bits.

A few channels of keys are far larger than the others, and the range of a vector's codes must hold them. Keys and queries are
multiplied by the same orthogonal matrix (Hadamard's): scores stay, and every channel of a key becomes a mean of all of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionSpec


class _Inner(Protocol):
    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor: ...

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor: ...


def hadamard(width: int, device: torch.device) -> Tensor:
    """float32 [width, width]: symmetric and its own inverse, so that what is multiplied twice is as before. Widths that are
    no power of two have blocks of the largest one that divides them."""
    matrix = torch.ones(1, 1, device=device)
    while width % (2 * len(matrix)) == 0:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.kron(torch.eye(width // len(matrix), device=device), matrix / len(matrix) ** 0.5)


class SpreadKeysAttention:
    """An attention backend around another one, whose pages hold spread keys."""

    def __init__(self, inner: _Inner, matrices: dict[int, Tensor]) -> None:
        """`matrices`: `hadamard` by the width of keys."""
        self._inner = inner
        self._matrices = matrices

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """[T, N * V]"""
        return self._inner.forward(spec, self._spread(q_TNH), self._spread(k_TKH), v_TKH)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """[T, N * V], of KV that is in the pages."""
        return self._inner.attend(spec, self._spread(q_TNH))

    def _spread(self, x_TNH: Tensor) -> Tensor:
        return x_TNH @ self._matrices[x_TNH.shape[-1]].to(x_TNH.dtype)
