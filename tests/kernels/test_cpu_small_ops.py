"""Norms, rotary embedding, activations and thin matrix products: the compiled ones against plain torch."""

from __future__ import annotations

import pytest
import torch

from bough.kernels.activation import cpu as activation, reference as activation_reference
from bough.kernels.cpu_build import library
from bough.kernels.linear import cpu as linear
from bough.kernels.norm import cpu as norm, reference as norm_reference
from bough.kernels.rotary import cpu as rotary, reference as rotary_reference

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 100), (300, 576), (2, 3, 64)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...], offset: float) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for weight in (torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1])):
        close(norm.rms_norm(x, weight, 1e-5, offset=offset), norm_reference.rms_norm(x, weight, 1e-5, offset=offset))
        for actual, expected in zip(
            norm.add_rms_norm(x, residual, weight, 1e-5, offset=offset),
            norm_reference.add_rms_norm(x, residual, weight, 1e-5, offset=offset),
            strict=True,
        ):
            close(actual, expected)


def test_norm_of_a_slice() -> None:
    wide = torch.randn(5, 200)
    close(
        norm.rms_norm(wide[:, 7:107], torch.ones(100), 1e-6),
        norm_reference.rms_norm(wide[:, 7:107], torch.ones(100), 1e-6),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("shape", [(1, 3072), (200, 3072), (3, 70), (2, 2, 64)])
def test_activations(dtype: torch.dtype, name: str, shape: tuple[int, ...]) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    close(vars(activation)[name](x), vars(activation_reference)[name](x))


def test_activations_of_extreme_values() -> None:
    x = torch.tensor([[-1e4, -90.0, -1e-20, 0.0, 1e-20, 50.0, 90.0, 1e4] + [1.0] * 8])
    for name in ("silu_mul", "gelu_tanh_mul"):
        close(vars(activation)[name](x), vars(activation_reference)[name](x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (96, 32), (20, 20), (128, 128)])
@pytest.mark.parametrize("tokens", [1, 120])
def test_rotary(dtype: torch.dtype, interleaved: bool, dim: int, rotated: int, tokens: int) -> None:
    fused = torch.randn(tokens, 7 * dim).to(dtype)
    q, k = fused[:, : 4 * dim].unflatten(1, (4, dim)), fused[:, 4 * dim : 6 * dim].unflatten(1, (2, dim))
    angles = torch.outer(torch.arange(500.0), 1e4 ** -(torch.arange(0, rotated, 2) / rotated))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 500, (tokens,))
    for actual, expected in zip(
        rotary.apply_rope(q, k, positions, table, interleaved=interleaved),
        rotary_reference.apply_rope(q, k, positions, table, interleaved=interleaved),
        strict=True,
    ):
        close(actual, expected)
    q_weight, k_weight = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    for actual, expected in zip(
        rotary.qk_norm_rope(q, k, q_weight, k_weight, 1e-6, positions, table, offset=1.0, interleaved=interleaved),
        rotary_reference.qk_norm_rope(
            q, k, q_weight, k_weight, 1e-6, positions, table, offset=1.0, interleaved=interleaved
        ),
        strict=True,
    ):
        torch.testing.assert_close(
            actual.float(), expected.float(), rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("rows", "cols"), [(576, 576), (101, 70), (3, 1536)])
def test_thin_products(dtype: torch.dtype, tokens: int, rows: int, cols: int) -> None:
    x, weight = torch.randn(tokens, cols).to(dtype), (torch.randn(rows, cols) / cols**0.5).to(dtype)
    bias = torch.randn(rows).to(dtype)
    exact = x.double() @ weight.double().T
    close(linear.linear(x, weight), exact.to(dtype))
    close(linear.linear(x, weight, bias), (exact + bias.double()).to(dtype))
    if rows % 2 == 0:
        close(linear.linear_silu_mul(x, weight), activation_reference.silu_mul(linear.linear(x, weight)))
