"""Router and experts with the norm before them: the same as one after the other, by one kernel where that is possible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bough.config.model_facts import MoeFacts
from bough.distributed.mesh import Mesh
from bough.kernels.moe import Routing, routed_experts
from bough.layers import moe
from bough.layers.build import Build
from bough.layers.moe import MixtureOfExperts
from bough.layers.norm import RMSNorm
from bough.quantization.unquantized import Unquantized

WIDTH = 16
ALONE = Build(
    scheme=Unquantized(), dtype=torch.float32, device=torch.device("cpu"), context_length=32, mesh=Mesh(0, 1, None)
)


def layers(shared: int = 0) -> tuple[MixtureOfExperts, RMSNorm]:
    facts = MoeFacts(num_experts=6, experts_per_token=2, intermediate=8, shared_intermediate=shared, renormalise=True)
    experts, norm = MixtureOfExperts(facts, WIDTH, "silu", ALONE), RMSNorm(WIDTH, 1e-5, ALONE, offset=1.0)
    for parameter in (*experts.parameters(), *norm.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    return experts, norm


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[Routing]:
    """What was routed in one call, as it comes."""
    calls: list[Routing] = []

    def watch(x: Tensor, residual: Tensor, routing: Routing, *rest: object) -> tuple[Tensor, Tensor]:
        calls.append(routing)
        return routed_experts(x, residual, routing, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(moe, "routed_experts", watch)
    return calls


@pytest.mark.parametrize("given", ["both", "parts", "sum"])
@pytest.mark.parametrize("shared", [0, 8])
def test_after_a_norm(given: str, shared: int, at_once: list[Routing]) -> None:
    experts, norm = layers(shared)
    x, residual = torch.randn(2 if given == "parts" else 1, 5, WIDTH), torch.randn(5, WIDTH)
    total = x.sum(0) + residual
    pair = {"both": (x[0], residual), "parts": (x, residual), "sum": (total, None)}[given]
    normed = torch.nn.functional.rms_norm(total, (WIDTH,), 1 + norm.weight, 1e-5)
    out, stream = experts.after(norm, *pair)
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(out, experts(normed), atol=1e-4, rtol=1e-4)
    assert len(at_once) == (given != "sum" and not shared), "nothing else reads the norm, and there is a sum to make"


def test_who_watches_sees_what_is_added(at_once: list[Routing]) -> None:
    experts, norm = layers()
    seen: list[Tensor] = []
    x, residual = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    handle = experts.register_forward_hook(lambda module, inputs, output: seen.append(output))
    watched = experts.after(norm, x, residual)
    assert seen[0] is watched[0]
    assert not at_once
    handle.remove()
    torch.testing.assert_close(experts.after(norm, x, residual), watched)
    assert [routing.per_token for routing in at_once] == [2]
