"""Router and experts with the norm before them: the same as one after the other, by one kernel where that is possible."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from bough.config.model_facts import Moe, Scored
from bough.distributed.mesh import Mesh
from bough.kernels.moe import Routing, routed_experts
from bough.layers import moe
from bough.layers.batch import AttentionBackend, Batch
from bough.layers.build import Build
from bough.layers.choice import ExpertChoice
from bough.layers.moe import MixtureOfExperts, route_uniformly
from bough.layers.norm import RMSNorm
from bough.layers.place import place_weights
from bough.layers.stream import Stream
from bough.quantization import unquantized
from bough.quantization.unquantized import Unquantized

WIDTH = 16
ALONE = Build(
    scheme=Unquantized(), dtype=torch.float32, device=torch.device("cpu"), context_length=32, mesh=Mesh.tensor(0, 1)
)


def layers(shared: int = 0) -> tuple[MixtureOfExperts, RMSNorm]:
    facts = Moe(num_experts=6, experts_per_token=2, intermediate=8, shared_intermediate=shared, renormalise=True)
    experts, norm = MixtureOfExperts(facts, WIDTH, ALONE), RMSNorm(WIDTH, 1e-5, ALONE, offset=1.0)
    place_weights(experts)
    for parameter in (*experts.parameters(), *norm.parameters()):
        parameter.copy_(torch.randn(parameter.shape))
    return experts, norm


def stream_of(x: Tensor, residual: Tensor | None, *, fuses: bool = True) -> Stream:
    """A stream to which `x`, perhaps in parts, has just been added."""
    ids = torch.zeros(x.shape[-2], dtype=torch.int64)
    batch = Batch(ids_T=ids, positions_T=ids, attention=cast(AttentionBackend, None))
    stream = Stream(x, batch, fuses=fuses)
    stream.residual_TD = residual
    return stream


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[Routing]:
    """What was routed in one call, as it comes."""
    calls: list[Routing] = []

    def watch(x: Tensor, residual: Tensor, routing: Routing, *rest: object) -> tuple[Tensor, Tensor]:
        calls.append(routing)
        return routed_experts(x, residual, routing, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(unquantized, "routed_experts", watch)
    return calls


@pytest.mark.parametrize("given", ["both", "parts", "sum"])
@pytest.mark.parametrize("shared", [0, 8])
def test_after_a_norm(given: str, shared: int, at_once: list[Routing]) -> None:
    experts, norm = layers(shared)
    x, residual = torch.randn(2 if given == "parts" else 1, 5, WIDTH), torch.randn(5, WIDTH)
    total = x.sum(0) + residual
    pair = {"both": (x[0], residual), "parts": (x, residual), "sum": (total, None)}[given]
    normed = torch.nn.functional.rms_norm(total, (WIDTH,), 1 + norm.weight, 1e-5)
    stream = stream_of(*pair)
    out = experts(stream.norm(norm))
    torch.testing.assert_close(stream.tap(), total)
    torch.testing.assert_close(out, experts(normed), atol=1e-4, rtol=1e-4)
    assert len(at_once) == (given != "sum" and not shared), "nothing else reads the norm, and there is a sum to make"


def test_a_stream_that_joins_nothing_norms_first(at_once: list[Routing]) -> None:
    experts, norm = layers()
    x, residual = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    apart = experts(stream_of(x, residual, fuses=False).norm(norm))
    assert not at_once
    torch.testing.assert_close(apart, experts(stream_of(x, residual).norm(norm)), atol=1e-4, rtol=1e-4)
    assert len(at_once) == 1


def test_uniform_routing_reaches_all_experts_alike(at_once: list[Routing], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "_FORCED", 3000)
    pair = torch.nn.ModuleList(layers()[0] for _ in range(2))
    norm = layers()[1]
    route_uniformly(pair, seed=3)
    seen: list[Tensor] = []
    for each in pair:
        each.experts.register_forward_pre_hook(lambda _, given: seen.append(given[2]))
    x = torch.randn(1, WIDTH).expand(4000, WIDTH)  # the router would send all of them to the same two
    for each in pair:
        each(x)
        each(stream_of(x[:7], x[:7]).norm(norm))
    assert not at_once, "what is chosen in one launch is chosen by the router"
    first, after, second, _ = seen
    assert after.tolist() == first[:7].tolist()
    assert first[:3000].tolist() != second[:3000].tolist(), "layers differ"
    for ids in (first, second):
        assert ids.shape == (4000, 2)
        assert ids.dtype == torch.int32
        assert (ids[:, 0] != ids[:, 1]).all()
        counts = torch.bincount(ids.flatten())
        assert len(counts) == 6
        assert counts.min() > 0.9 * counts.float().mean()
    again = layers()[0]
    route_uniformly(again, seed=3)
    assert again.forced_ids is not None
    assert again.forced_ids[:7].tolist() == after.tolist()
    pair[0](stream_of(x[:1], x[:1]).norm(norm))
    assert len(at_once) == 1, "a lone token's experts are others in any case"


@pytest.mark.parametrize("way", ["joined", "apart", "forced", "other choice"])
def test_padding_reaches_no_expert(way: str) -> None:
    """A graph's step may be padded: experts that only padding chose would be read for nothing."""
    experts, norm = layers()
    if way == "forced":
        route_uniformly(experts, seed=3)
    if way == "other choice":
        scored = Scored(by="softmax", softcap=3.0)
        experts.choose = ExpertChoice(replace(experts.facts, scored=scored), ALONE)
    x, residual = torch.randn(7, WIDTH), torch.randn(7, WIDTH)
    loc = torch.tensor([3, -1, 0, 7, 9, -1, -1])
    wanted = experts(stream_of(x, residual, fuses=way == "joined").norm(norm))
    stream = stream_of(x, residual, fuses=way == "joined")
    stream._batch.loc_T = loc
    got = experts(stream.norm(norm))
    torch.testing.assert_close(got[loc >= 0], wanted[loc >= 0], atol=1e-4, rtol=1e-4)
    assert not got[loc < 0].any()
