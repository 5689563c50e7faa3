"""The Hopper gate/up kernel on a Hopper GPU: any rows, odd features and depths, strided inputs, nothing written beyond."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.linear.gated_hopper import TILINGS, Tiling, can_serve, gated, tiling_for

pytestmark = pytest.mark.usefixtures("hopper")

ALL = [
    *TILINGS,
    Tiling(128, True, 3, 0, 3),
    Tiling(112, False, 3, 0, 3),
    Tiling(96, True, 5, 2, 4),
    Tiling(96, False, 5, 0, 3, parts=2),
    Tiling(80, False, 3, 1, 4, parts=2, turns=2, streamed=True),
]


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    halves = (x.double() @ weight.double().t()).to(torch.bfloat16).double()
    gate, up = halves.chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.mark.parametrize("tiling", ALL)
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


@pytest.mark.parametrize("tiling", TILINGS[:5])
def test_extreme_gates(tiling: Tiling) -> None:
    """Gates far from zero neither overflow nor lose the sign, and a NaN stays where it is."""
    weight = torch.zeros(2 * 128, 512, dtype=torch.bfloat16, device="cuda")
    weight[:128, 0] = torch.linspace(-200, 200, 128)
    weight[128:, 1] = 1.0
    x = torch.zeros(300, 512, dtype=torch.bfloat16, device="cuda")
    x[:, :2] = 1.0
    x[7, 5] = float("nan")
    out = gated(x, weight, tiling)
    assert out[7].isnan().all()
    rest = torch.cat([out[:7], out[8:]])
    expected = _reference(x[:1], weight).to(torch.float32)
    assert torch.allclose(rest.float(), expected.expand_as(rest), rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("tiling", TILINGS)
def test_a_graph_replays_it_between_kernels_that_overlap(tiling: Tiling) -> None:
    """A chain in which each kernel may start before the one before it has ended, and x and out are used again."""
    weight = (torch.randn(2 * 1024, 1024, device="cuda") / 32).to(torch.bfloat16)
    start = torch.randn(300, 1024, dtype=torch.bfloat16, device="cuda")
    x, out = torch.empty_like(start), torch.empty_like(start)

    def chain(times: int) -> None:
        x.copy_(start)
        for _ in range(times):
            gated(x, weight, tiling, out)
            gated(out, weight, tiling, x)
            x.copy_(F.rms_norm(x, (1024,), eps=1e-6))

    chain(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(10)
    start.copy_(torch.randn_like(start))
    graph.replay()
    got = x.clone()
    expected = start.clone()
    for _ in range(10):
        for _ in range(2):
            torch.cuda.synchronize()
            expected = gated(expected, weight, tiling)
        expected = F.rms_norm(expected, (1024,), eps=1e-6)
    assert 0.5 < got.float().square().mean() < 2.0
    assert torch.equal(got, expected)


def test_a_tiling_is_chosen_for_the_products_of_a_decoding_batch() -> None:
    weight = torch.empty(2 * 14336, 4096, dtype=torch.bfloat16, device="cuda")
    x = torch.empty(512, 4096, dtype=torch.bfloat16, device="cuda")
    assert tiling_for(x[:64], weight) is None
    assert tiling_for(x.half(), weight.half()) is None
    chosen = tiling_for(x[:256], weight)
    assert chosen is not None
    assert chosen.features == 112 or torch.cuda.get_device_properties(0).multi_processor_count != 132
