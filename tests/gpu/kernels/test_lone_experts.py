"""The experts of very few tokens on a Hopper GPU: any shapes and choices, one launch after the other, the same bits."""

import random
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.moe import lone_hopper, triton as moe
from bough.kernels.moe.lone_hopper import MOST_PAIRS, Cut, experts, suits
from bough.kernels.norm import add_rms_norm

pytestmark = pytest.mark.usefixtures("hopper")

MOST_EXPERTS = 128


def _weights(num_experts: int, width: int, inner: int) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(num_experts, 2 * inner, width, dtype=torch.bfloat16, device="cuda").mul_(width**-0.5)
    return gate_up, torch.randn(num_experts, width, inner, dtype=torch.bfloat16, device="cuda").mul_(inner**-0.5)


def _expected(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """In double precision, rounded where intermediate results would be stored."""
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for token, choices in enumerate(ids.tolist()):
        for choice, expert in enumerate(choices):
            if not 0 <= expert < gate_up.shape[0]:
                continue
            gate, up = (gate_up[expert].double() @ x[token].double()).bfloat16().double().chunk(2)
            hidden = (F.silu(gate) * up).bfloat16().double()
            out[token] += (down[expert].double() @ hidden).bfloat16().double() * weights[token, choice].double()
    return out


def _choices(tokens: int, per_token: int, num_experts: int, kind: str) -> Tensor:
    ids = torch.stack([torch.randperm(num_experts)[:per_token] for _ in range(tokens)])
    if kind == "repeated":
        ids[:] = ids[0, 0]
    if kind == "of another rank":
        elsewhere = torch.tensor([-1, num_experts, 2**31 - 1, -(2**31)])[torch.randint(4, ids.shape)]
        ids = torch.where(torch.rand(ids.shape) < 0.4, elsewhere, ids)
    if kind == "none":
        ids[:] = -1
    return ids.to(torch.int32).cuda()


def _check(
    gate_up: Tensor, down: Tensor, tokens: int, per_token: int, cases: ModuleType, cut: Cut | None = None
) -> None:
    num_experts, width, inner = down.shape
    for kind in ("any", "repeated", "of another rank", "none"):
        x = torch.randn(tokens, width + 64, dtype=torch.bfloat16, device="cuda")[:, :width]
        ids = _choices(tokens, per_token, num_experts, kind)
        weights = torch.rand(tokens, per_token, device="cuda")
        if kind == "repeated":
            weights = weights.bfloat16()
        room = torch.full((tokens + 8, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        with cases.poison():
            experts(x, gate_up, down, weights, ids, room[:tokens], cut)
            again = torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda")
            experts(x, gate_up, down, weights, ids, again, cut)
        expected = _expected(x, gate_up, down, weights, ids)
        case = (width, inner, num_experts, tokens, per_token, kind)
        error = (room[:tokens].double() - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < 4e-3, (case, float(error))
        assert torch.equal(room[:tokens], again), case
        assert room[tokens:].isnan().all(), case


@pytest.mark.parametrize("inner", [256, 768, 1024, 1536])
@pytest.mark.parametrize("width", [512, 2048, 4096])
def test_agrees_with_double_precision(width: int, inner: int, cases: ModuleType) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(MOST_EXPERTS, width, inner)
    x = torch.empty(1, width, dtype=torch.bfloat16, device="cuda")
    for num_experts in (8, MOST_EXPERTS):
        stacks = gate_up[:num_experts], down[:num_experts]
        for per_token in (1, 2, 8):
            assert suits(x, *stacks, _choices(1, per_token, num_experts, "any"), "silu")
            for tokens in (1, 2, min(4, MOST_PAIRS // per_token)):
                _check(*stacks, tokens, per_token, cases)
    many = torch.empty(MOST_PAIRS, width, dtype=torch.bfloat16, device="cuda")
    if suits(many, gate_up, down, _choices(MOST_PAIRS, 1, MOST_EXPERTS, "any"), "silu"):  # their ring fits
        _check(gate_up, down, MOST_PAIRS, 1, cases)
    else:
        assert width == 4096


@pytest.mark.parametrize(("width", "inner"), [(264, 24), (2880, 2880), (1000, 40), (64, 2048), (2048, 96), (7168, 256)])
def test_odd_shapes(width: int, inner: int, cases: ModuleType) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(32, width, inner)
    for tokens, per_token in ((1, 3), (2, 4), (1, 8)):
        _check(gate_up, down, tokens, per_token, cases)


@pytest.mark.parametrize("cut", [Cut(2048, 768, 16 << 10, 8), Cut(2048, 768, 32 << 10, 4), Cut(2048, 768, 8 << 10, 16)])
def test_other_cuts(cut: Cut, cases: ModuleType) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(32, 2048, 768)
    for tokens, per_token in ((1, 8), (4, 8)):
        _check(gate_up, down, tokens, per_token, cases, cut)


def _count_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each launch, as they come."""
    served: list[int] = []
    real = lone_hopper.experts

    def watch(x: Tensor, *rest: object) -> None:
        served.append(x.shape[0])
        real(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(lone_hopper, "experts", watch)
    return served


def test_serves_few_tokens_as_the_portable_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    served = _count_launches(monkeypatch)
    torch.manual_seed(3)
    gate_up, down = _weights(MOST_EXPERTS, 2048, 768)
    for tokens in (1, 4, 5):
        x = torch.randn(tokens, 2048, dtype=torch.bfloat16, device="cuda")
        weights, ids = moe.topk_softmax(torch.randn(tokens, MOST_EXPERTS, device="cuda"), 8, True)
        got = moe.fused_experts(x, gate_up, down, weights, ids)
        assert served == ([tokens] if tokens <= 4 else [])
        served.clear()
        with monkeypatch.context() as context:
            context.setattr(lone_hopper, "suits", lambda *_: False)
            portable = moe.fused_experts(x, gate_up, down, weights, ids)
        assert (got.double() - portable.double()).norm() / portable.double().norm() < 4e-3
    moe.fused_experts(x[:1], gate_up, down, weights[:1], ids[:1], "gelu_tanh")
    assert not served


@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_in_a_graph_give_the_same_bits_at_each_replay(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 layers, each routed by what the one before wrote, without a pause; and once with a pause after every kernel."""
    served = _count_launches(monkeypatch)
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    width, per_token = 2048, 8
    layers = [_weights(MOST_EXPERTS, width, 256) for _ in range(5)]
    start = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    scale = torch.ones(width, dtype=torch.bfloat16, device="cuda")

    def run(pause: bool) -> Tensor:
        x = residual = start
        for layer in range(50):
            weights, ids = moe.topk_softmax(x[:, 7 * layer : 7 * layer + MOST_EXPERTS], per_token, True)
            out = moe.fused_experts(x, *layers[layer % len(layers)], weights, ids)
            if pause:
                torch.cuda.synchronize()
            x, residual = add_rms_norm(out, residual, scale, 1e-6)
            if pause:
                torch.cuda.synchronize()
        return x

    expected = run(pause=True)
    assert expected.isfinite().all()
    assert torch.equal(run(pause=False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(pause=False)
    assert served == [tokens] * 150
    for _ in range(40):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)


def test_launches_without_anything_between_them() -> None:
    """Each reads what the one before wrote, and may start while that one runs."""
    torch.manual_seed(8)
    layers = [_weights(16, 2048, 768) for _ in range(4)]
    ids = torch.arange(8, dtype=torch.int32, device="cuda")[None]
    weights = torch.full((1, 8), 0.58, device="cuda")
    start = torch.randn(1, 2048, dtype=torch.bfloat16, device="cuda")

    def run(pause: bool) -> list[Tensor]:
        found = [start]
        for gate_up, down in layers:
            out = torch.empty_like(start)
            experts(found[-1], gate_up, down, weights, ids, out)
            found.append(out)
            if pause:
                torch.cuda.synchronize()
        return found

    expected = run(pause=True)
    for _ in range(100):
        assert all(map(torch.equal, run(pause=False), expected))
