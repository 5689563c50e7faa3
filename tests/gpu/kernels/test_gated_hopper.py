"""The Hopper gate/up kernel on a Hopper GPU: any rows, odd features and depths, strided inputs, nothing written beyond."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.linear.gated_hopper import Tiling, can_serve, gated

pytestmark = pytest.mark.gpu

TILINGS = [
    Tiling(along, group, lag, stages) for along in (True, False) for group, lag, stages in ((8, 1, 4), (3, 0, 3))
]


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    halves = (x.double() @ weight.double().t()).to(torch.bfloat16).double()
    gate, up = halves.chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("features", "depth"), [(1024, 512), (1000, 1096), (8, 640), (14336, 4096)])
def test_agrees_with_double_precision(tiling: Tiling, features: int, depth: int) -> None:
    draw = random.SystemRandom()
    torch.manual_seed(draw.randrange(2**31))
    weight = (torch.randn(2 * features, depth, device="cuda") / depth**0.5).to(torch.bfloat16)
    for tokens in (1, 127, 257, draw.randrange(2, 1200), draw.randrange(1200, 3000)):
        x = torch.randn(tokens, depth + 64, dtype=torch.bfloat16, device="cuda")[:, :depth]
        assert can_serve(x, weight)
        room = torch.full((tokens + 300, features), float("nan"), dtype=torch.bfloat16, device="cuda")
        out = gated(x, weight, tiling, room[:tokens])
        expected = _reference(x, weight)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < 4e-3, (tokens, float(error))
        assert room[tokens:].isnan().all()
        assert torch.equal(gated(x, weight, tiling), out)


def test_extreme_gates() -> None:
    """Gates far from zero neither overflow nor lose the sign, and a NaN stays where it is."""
    weight = torch.zeros(2 * 128, 512, dtype=torch.bfloat16, device="cuda")
    weight[:128, 0] = torch.linspace(-200, 200, 128)
    weight[128:, 1] = 1.0
    x = torch.zeros(300, 512, dtype=torch.bfloat16, device="cuda")
    x[:, :2] = 1.0
    x[7, 5] = float("nan")
    out = gated(x, weight, Tiling())
    assert out[7].isnan().all()
    rest = torch.cat([out[:7], out[8:]])
    expected = _reference(x[:1], weight).to(torch.float32)
    assert torch.allclose(rest.float(), expected.expand_as(rest), rtol=1e-2, atol=1e-12)


def test_a_graph_replays_it() -> None:
    weight = (torch.randn(2 * 512, 1024, device="cuda") / 32).to(torch.bfloat16)
    x = torch.randn(700, 1024, dtype=torch.bfloat16, device="cuda")
    gated(x, weight, Tiling())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated(x.mul(2.0), weight, Tiling())
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, gated(x * 2.0, weight, Tiling()))
