"""Experts of many tokens on Hopper, by tiles grouped by expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bough.kernels import moe
from bough.kernels.moe import grouped_hopper, reference, triton as portable
from bough.kernels.moe.grouped_hopper import HIGH, LOW, MIDDLE, GroupedTilings, Weights

CUTS = {
    "high": GroupedTilings(HIGH[0], HIGH[1]),
    "high, odd": GroupedTilings(HIGH[2], HIGH[1]),
    "middle": GroupedTilings(MIDDLE[0], MIDDLE[2]),
    "low": GroupedTilings(LOW[0], LOW[2]),
}
FP8_CUTS = {
    "high": GroupedTilings(HIGH[0], HIGH[2]),
    "middle": GroupedTilings(MIDDLE[0], MIDDLE[0]),
    "low": GroupedTilings(LOW[0], LOW[0]),
}


@pytest.fixture(scope="module", autouse=True)
def compiled(hopper: None) -> None:
    """All at once: one after the other they would take a minute."""
    grouped_hopper.load_cuts(list(CUTS.values()), torch.device("cuda", 0), fp8=False)
    grouped_hopper.load_cuts(list(FP8_CUTS.values()), torch.device("cuda", 0), fp8=True)


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * scale


def _rounded(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As e4m3 with a scale per row, and what that is worth."""
    scale = stack.abs().amax(-1).float().clamp_min(1e-12) / 448
    small = (stack.float() / scale[..., None]).to(torch.float8_e4m3fn)
    return small, scale, small.float() * scale[..., None]


def _choice(tokens: int, experts: int, per_token: int, routing: str) -> tuple[Tensor, Tensor]:
    scores = torch.rand(tokens, experts, device="cuda")
    if routing == "few experts":
        scores[:, : max(per_token, experts // 8)] += 2
    ids = scores.topk(per_token, 1).indices.to(torch.int32)
    if routing == "some elsewhere":
        ids[torch.rand(tokens, per_token, device="cuda") < 0.3] = -1
    if routing == "nowhere":
        ids.fill_(experts + 3)
    return torch.rand(tokens, per_token, device="cuda"), ids


def _check(
    tokens: int, shape: tuple[int, int, int, int], cut: GroupedTilings | None, routing: str, *, fp8: bool = False
) -> None:
    experts, per_token, width, inner = shape
    x = _random(tokens, width)
    gate_up, down = (
        _random(experts, 2 * inner, width, scale=width**-0.5),
        _random(experts, width, inner, scale=inner**-0.5),
    )
    shares, ids = _choice(tokens, experts, per_token, routing)
    weights, worth = Weights(gate_up, down), (gate_up.float(), down.float())
    if fp8:
        (small_up, up_scale, up_worth), (small_down, down_scale, down_worth) = _rounded(gate_up), _rounded(down)
        weights, worth = Weights(small_up, small_down, up_scale, down_scale), (up_worth, down_worth)
    out = torch.full((tokens, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    grouped_hopper.experts(x, weights, shares, ids, out, cut)
    wanted = reference.fused_experts(x.float(), *worth, shares, ids)
    assert torch.isfinite(out).all()
    error = (out.float() - wanted).norm() / wanted.norm().clamp_min(1e-6)
    assert error < (0.05 if fp8 else 8e-3), float(error)


@pytest.mark.parametrize("routing", ["even", "few experts", "some elsewhere", "nowhere"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tokens", [1, 77, 600, 3000])
def test_agrees_with_float32(tokens: int, cut: str, routing: str) -> None:
    _check(tokens, (16, 4, 2048, 768), CUTS[cut], routing)


@pytest.mark.parametrize("shape", [(8, 2, 4096, 1536), (6, 2, 1032, 520), (5, 5, 2048, 776)])
@pytest.mark.parametrize("cut", CUTS)
def test_odd_shapes(shape: tuple[int, int, int, int], cut: str) -> None:
    _check(900, shape, CUTS[cut], "even")


@pytest.mark.parametrize("tokens", [77, 3000])
@pytest.mark.parametrize("cut", FP8_CUTS)
def test_e4m3(cut: str, tokens: int) -> None:
    _check(tokens, (16, 4, 2048, 1024), FP8_CUTS[cut], "even", fp8=True)


@pytest.mark.parametrize("tokens", [300, 2500, 12_000])
def test_as_it_is_chosen(tokens: int) -> None:
    _check(tokens, (128, 8, 2048, 768), None, "even")


def test_many_tokens_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation's door, for which padding and experts of other ranks have ids that no expert has."""
    experts, per_token, width, inner = 16, 4, 2048, 768
    x = _random(900, width)
    gate_up = _random(experts, 2 * inner, width, scale=width**-0.5)
    down = _random(experts, width, inner, scale=inner**-0.5)
    shares, ids = _choice(900, experts, per_token, "some elsewhere")
    monkeypatch.setattr(portable, "portable_experts", None)
    out = moe.fused_experts(x, gate_up, down, shares, ids)
    wanted = reference.fused_experts(x.float(), gate_up.float(), down.float(), shares, ids)
    assert (out.float() - wanted).norm() / wanted.norm() < 8e-3


def test_a_graph_replays_it() -> None:
    """With other routing each time, and kernels before and after it that overlap."""
    experts, per_token, width, inner = 16, 4, 2048, 768
    weights = Weights(_random(experts, 2 * inner, width, scale=0.02), _random(experts, width, inner, scale=0.03))
    x, shares = _random(700, width), torch.rand(700, per_token, device="cuda")
    ids = torch.zeros(700, per_token, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)

    def run() -> None:
        for _ in range(3):
            grouped_hopper.experts(x, weights, shares, ids, out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for routing in ("even", "few experts", "some elsewhere", "even"):
        ids.copy_(_choice(700, experts, per_token, routing)[1])
        x.copy_(_random(700, width))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        wanted = reference.fused_experts(x.float(), weights.gate_up_E2FD.float(), weights.down_EDF.float(), shares, ids)
        error = (out.float() - wanted).norm() / wanted.norm()
        assert error < 8e-3, (routing, float(error))
