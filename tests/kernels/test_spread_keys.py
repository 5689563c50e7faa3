"""Keys that are spread over their channels: scores stay, and codes of 4 bits lose less."""

from __future__ import annotations

import pytest
import torch

from bough.kernels.attention.spread_keys import hadamard
from bough.kernels.kv_codes import decode, encode

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [64, 128, 80, 12, 7])
def test_it_is_orthogonal_and_its_own_inverse(width: int) -> None:
    matrix = hadamard(width, CPU)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(width))


def test_scores_of_keys_with_large_channels() -> None:
    """Two channels ten times as large as the others, as in real keys: the error of scores is less than half."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(256, 64, generator=generator) for _ in range(2))
    k[:, [5, 40]] *= 10
    matrix, exact = hadamard(64, CPU), q @ k.T
    torch.testing.assert_close((q @ matrix) @ (k @ matrix).T, exact, atol=1e-3, rtol=1e-4)

    def error(q: torch.Tensor, k: torch.Tensor) -> float:
        return float((q @ decode(*encode(k, 4), 64).T - exact).square().mean())

    assert error(q @ matrix, k @ matrix) < 0.5 * error(q, k)
