"""The experts of very few tokens on a Hopper GPU, with and without the norm and the router before them: any shapes and
choices, one launch after the other, the same bits."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases.bed import poison

from bough.kernels.moe import Routing, lone_hopper, reference, triton as moe
from bough.kernels.moe.lone_hopper import (
    MOST_LOGITS,
    MOST_PAIRS,
    LoneTiling,
    experts,
    routed_experts,
    suits,
    suits_routed,
)
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


def _check(gate_up: Tensor, down: Tensor, tokens: int, per_token: int, cut: LoneTiling | None = None) -> None:
    num_experts, width, inner = down.shape
    for kind in ("any", "repeated", "of another rank", "none"):
        x = torch.randn(tokens, width + 64, dtype=torch.bfloat16, device="cuda")[:, :width]
        ids = _choices(tokens, per_token, num_experts, kind)
        weights = torch.rand(tokens, per_token, device="cuda")
        if kind == "repeated":
            weights = weights.bfloat16()
        room = torch.full((tokens + 8, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        with poison():
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
def test_agrees_with_double_precision(width: int, inner: int) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(MOST_EXPERTS, width, inner)
    x = torch.empty(1, width, dtype=torch.bfloat16, device="cuda")
    for num_experts in (8, MOST_EXPERTS):
        stacks = gate_up[:num_experts], down[:num_experts]
        for per_token in (1, 2, 8):
            assert suits(x, *stacks, _choices(1, per_token, num_experts, "any"), "silu")
            for tokens in (1, 2, min(4, MOST_PAIRS // per_token)):
                _check(*stacks, tokens, per_token)
    many = torch.empty(MOST_PAIRS, width, dtype=torch.bfloat16, device="cuda")
    if suits(many, gate_up, down, _choices(MOST_PAIRS, 1, MOST_EXPERTS, "any"), "silu"):  # their ring fits
        _check(gate_up, down, MOST_PAIRS, 1)
    else:
        assert width == 4096


@pytest.mark.parametrize(("width", "inner"), [(264, 24), (2880, 2880), (1000, 40), (64, 2048), (2048, 96), (7168, 256)])
def test_odd_shapes(width: int, inner: int) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(32, width, inner)
    for tokens, per_token in ((1, 3), (2, 4), (1, 8)):
        _check(gate_up, down, tokens, per_token)


@pytest.mark.parametrize(
    "cut", [LoneTiling(2048, 768, 16 << 10, 8), LoneTiling(2048, 768, 32 << 10, 4), LoneTiling(2048, 768, 8 << 10, 16)]
)
def test_other_cuts(cut: LoneTiling) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(32, 2048, 768)
    for tokens, per_token in ((1, 8), (4, 8)):
        _check(gate_up, down, tokens, per_token, cut=cut)


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


Routed = tuple[Tensor, Tensor, Routing, Tensor, Tensor]


def _routed(
    tokens: int, per_token: int, gate_up: Tensor, down: Tensor, *, renormalise: bool = True, offset: float = 0.0
) -> Routed:
    """Of tokens whose choice is clear: logits that are nearly equal may be rounded, and chosen, one way or the other."""
    num_experts, width, _ = down.shape
    norm = torch.randn(width, dtype=torch.bfloat16, device="cuda")
    router = torch.randn(num_experts, width, dtype=torch.bfloat16, device="cuda").mul_(width**-0.5)
    how = Routing(norm, 1e-6, offset, router, per_token, renormalise)
    x, residual = torch.randn(2, 64 * tokens, width + 64, dtype=torch.bfloat16, device="cuda")[..., :width]
    logits = _before_experts(x, residual, how)[2].sort(-1, descending=True).values
    last = logits[:, per_token - 1]
    after = logits[:, per_token] if per_token < num_experts else last - 1
    clear = (last - after > 0.01 + 2**-6 * torch.maximum(last.abs(), after.abs())).nonzero().flatten()[:tokens]
    assert len(clear) == tokens
    found = torch.zeros(2, tokens, width + 64, dtype=torch.bfloat16, device="cuda")[..., :width]
    found.copy_(torch.stack([x[clear], residual[clear]]))
    return found[0], found[1], how, gate_up, down


def _before_experts(x: Tensor, residual: Tensor, how: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Sum (bf16), what comes out of the norm (bf16), and logits, in double precision between them."""
    total = (x.double() + residual.double()).bfloat16()
    scale = total.double().square().mean(-1, keepdim=True).add(how.eps).rsqrt()
    normed = (total.double() * scale * (how.norm_D.double() + how.offset)).bfloat16()
    return total, normed, normed.double() @ how.router_ED.double().T


def _check_routed(given: Routed, cut: LoneTiling | None = None) -> None:
    x, residual, how, gate_up, down = given
    (tokens, width), num_experts = x.shape, down.shape[0]
    case = (width, down.shape[2], num_experts, tokens, how.per_token, how.renormalise)
    room = torch.full((2, tokens + 8, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    out, total = room[0, :tokens], room[1, :tokens]
    with poison():
        routed_experts(*given, out, total, cut)
        again = torch.empty(2, tokens, width, dtype=torch.bfloat16, device="cuda")
        routed_experts(*given, again[0], again[1], cut)
    assert torch.equal(torch.stack([out, total]), again), case
    assert room[:, tokens:].isnan().all(), case
    want_total, normed, logits = _before_experts(x, residual, how)
    assert torch.equal(total, want_total), case
    choice = reference.topk_softmax(logits.bfloat16(), how.per_token, how.renormalise)
    expected = _expected(normed, gate_up, down, *choice)
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < 4e-2, (case, error)  # the last bit of a logit, which may be rounded otherwise, is 3% of its weight


@pytest.mark.parametrize("inner", [256, 768])
@pytest.mark.parametrize("width", [512, 2048, 4096])
def test_a_router_before_them(width: int, inner: int) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(MOST_EXPERTS, width, inner)
    for num_experts, per_token in ((8, 2), (8, 8), (100, 6), (MOST_EXPERTS, 1), (MOST_EXPERTS, 8)):
        stacks = gate_up[:num_experts], down[:num_experts]
        for tokens in (1, 2, 4):
            for renormalise, offset in ((True, 0.0), (False, 1.0)):
                given = _routed(tokens, per_token, *stacks, renormalise=renormalise, offset=offset)
                assert tokens > 1 or suits_routed(*given, "silu")
                _check_routed(given)


@pytest.mark.parametrize(
    ("width", "inner", "num_experts", "per_token"),
    [(264, 24, 9, 3), (1000, 40, 60, 4), (64, 2048, 33, 32), (7168, 256, 64, 8), (2880, 96, 32, 4), (256, 64, 512, 10)],
)
def test_a_router_of_odd_shapes(width: int, inner: int, num_experts: int, per_token: int) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(num_experts, width, inner)
    for tokens in (1, 3):
        if tokens * per_token <= MOST_PAIRS and tokens * num_experts <= MOST_LOGITS:
            _check_routed(_routed(tokens, per_token, gate_up, down))


def test_a_router_with_other_cuts() -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    gate_up, down = _weights(32, 2048, 768)
    for cut in (
        LoneTiling(2048, 768, 16 << 10, 8, 32),
        LoneTiling(2048, 768, 32 << 10, 4, 32),
        LoneTiling(2048, 768, 8 << 10, 16, 32),
    ):
        for tokens in (1, 4):
            _check_routed(_routed(tokens, 8, gate_up, down), cut=cut)


def _experts_that_say_who_they_are(num_experts: int, width: int) -> tuple[Tensor, Tensor]:
    """Expert e adds silu(1) = 0.73 to element e, and nothing else, for a token that starts with (1, 1)."""
    gate_up = torch.zeros(num_experts, 16, width, dtype=torch.bfloat16, device="cuda")
    gate_up[:, 0, 0] = gate_up[:, 8, 1] = 1.0
    down = torch.zeros(num_experts, width, 8, dtype=torch.bfloat16, device="cuda")
    down[torch.arange(num_experts), torch.arange(num_experts), 0] = 1.0
    return gate_up, down


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_choice_is_that_of_the_logits(renormalise: bool) -> None:
    """Logits are set exactly: equal ones, infinities, one that outweighs all."""
    num_experts, width, per_token = 100, 512, 8
    gate_up, down = _experts_that_say_who_they_are(num_experts, width)
    x = torch.zeros(1, width, dtype=torch.bfloat16, device="cuda")
    x[0, :2] = 1.0
    residual = torch.zeros_like(x)
    norm = torch.full((width,), (2 / width) ** 0.5, dtype=torch.bfloat16, device="cuda")  # the token stays as it is
    tied = torch.randint(-3, 4, (num_experts,), device="cuda").float()
    infinite = torch.randn(num_experts, device="cuda")
    infinite[::3] = float("-inf")
    cases = {
        "all equal": torch.full((num_experts,), 0.5), "tied": tied, "any": torch.randn(num_experts),
        "one": torch.eye(num_experts)[71] * 200,
        "all negative": -torch.rand(num_experts) - 1, "some never": infinite,
    }  # fmt: skip
    for name, logits in cases.items():
        router = torch.zeros(num_experts, width, dtype=torch.bfloat16, device="cuda")
        router[:, 0] = logits.cuda().bfloat16()
        how = Routing(norm, 0.0, 0.0, router, per_token, renormalise)
        out, total = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
        routed_experts(x, residual, how, gate_up, down, out, total)
        assert torch.equal(total, x)
        _, normed, _ = _before_experts(x, residual, how)
        stored = (router[:, 0].float() * normed[0, 0].float()).bfloat16()
        weights, ids = reference.topk_softmax(stored[None], per_token, renormalise)
        expected = _expected(normed, gate_up, down, weights, ids)[0]
        assert set(out[0].nonzero().flatten().tolist()) == set(expected.bfloat16().nonzero().flatten().tolist()), name
        torch.testing.assert_close(out[0].double(), expected, atol=0, rtol=1e-2, msg=name)


@pytest.mark.parametrize("tokens", [1, 3])
def test_routed_layers_in_a_graph_give_the_same_bits_at_each_replay(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 layers without anything between them, each of what the one before wrote; every fifth is given its choice."""
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    served: list[int] = []
    real = lone_hopper.routed_experts

    def watch(x: Tensor, *rest: object) -> None:
        served.append(x.shape[0])
        real(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(lone_hopper, "routed_experts", watch)
    layers = [_routed(tokens, 8, *_weights(MOST_EXPERTS, 2048, 256)) for _ in range(5)]
    start = layers[0][:2]

    def run(pause: bool) -> Tensor:
        x, residual = start
        for layer in range(50):
            _, _, how, gate_up, down = layers[layer % 5]
            in_one = layer % 5 != 4
            door = moe.routed_experts if in_one else reference.routed_experts
            x, residual = door(x, residual, how, gate_up, down)
            if pause:
                torch.cuda.synchronize()
        return torch.stack([x, residual])

    expected = run(pause=True)
    assert expected.isfinite().all()
    assert torch.equal(run(pause=False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(pause=False)
    assert served == [tokens] * 120
    for _ in range(40):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        assert torch.equal(run(pause=False), expected)


def test_one_launch_is_as_good_as_several() -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    for tokens in (1, 4):
        given = _routed(tokens, 8, *_weights(MOST_EXPERTS, 2048, 768))
        got, several = moe.routed_experts(*given), reference.routed_experts(*given)
        assert torch.equal(got[1], several[1])
        assert (got[0].double() - several[0].double()).norm() / several[0].double().norm() < 4e-2
