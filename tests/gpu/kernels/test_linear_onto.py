"""A product that adds the stream: what two steps would give, in the stream's memory, and nothing where it says so."""

import random

import pytest
import torch

from bough.kernels.linear import linear_onto


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "depth"), [(4096, 1024), (576, 1536), (8, 40)])
def test_adds_to_the_stream(rows: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    for tokens in (256, 300, 2048):
        x = torch.randn(tokens, depth + 8, device="cuda").to(dtype)[:, :depth]
        weight = (torch.randn(rows, depth, device="cuda") / depth**0.5).to(dtype)
        stream = torch.randn(tokens, rows, device="cuda").to(dtype)
        expected = stream.double() + x.double() @ weight.double().t()
        out = linear_onto(x, weight, stream)
        assert out is not None
        error = (out.double() - expected).norm() / expected.norm()
        assert error < (1e-3 if dtype == torch.float32 else 4e-3), (tokens, float(error))


@pytest.mark.parametrize("tokens", [1, 8, 255])
def test_leaves_few_tokens_to_the_norm(tokens: int) -> None:
    stream = torch.randn(tokens, 64, device="cuda")
    before = stream.clone()
    assert linear_onto(torch.randn(tokens, 32, device="cuda"), torch.randn(64, 32, device="cuda"), stream) is None
    assert torch.equal(stream, before)
