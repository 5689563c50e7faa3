"""A product for the norm after it: what two steps would give, whichever way it is cut; the stream stays or is used up."""

import random

import pytest
import torch

from bough.kernels.linear import linear_onto
from bough.kernels.norm import add_rms_norm

SHAPES = [(4096, 4096), (4096, 14336), (4096, 1024), (576, 1536), (8, 40)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_adds_to_the_stream(rows: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    weight = (torch.randn(rows, depth, device="cuda") / depth**0.5).to(dtype)
    for tokens in (1, 8, 64, 65, 100, 129, 255, 256, 257, 300, 2048):
        x = torch.randn(tokens, depth + 8, device="cuda").to(dtype)[:, :depth]
        stream = torch.randn(tokens, rows, device="cuda").to(dtype)
        before, expected = stream.clone(), stream.double() + x.double() @ weight.double().t()
        added, rest = linear_onto(x, weight, stream)
        if rest is None:
            total = added
        else:
            assert rest is stream
            assert torch.equal(stream, before)
            total = add_rms_norm(added, rest, torch.ones(rows, device="cuda", dtype=dtype), 1e-5)[1]
        error = (total.double() - expected).norm() / expected.norm()
        assert error < (1e-3 if dtype == torch.float32 else 4e-3), (tokens, float(error))


def test_is_cut_where_multiprocessors_would_be_idle() -> None:
    weight = torch.zeros(4096, 14336, device="cuda", dtype=torch.bfloat16)

    def ways(tokens: int) -> tuple[int, bool]:
        x, stream = (torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16) for width in (14336, 4096))
        added, rest = linear_onto(x, weight, stream)
        return added.dim(), rest is None

    assert [ways(tokens) for tokens in (8, 64, 96, 255, 256)] == [
        (2, False),
        (2, False),
        (3, False),
        (3, False),
        (2, True),
    ]
