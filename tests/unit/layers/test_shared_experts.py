"""A shared expert that is computed as the last ones of a stack: the same as by itself, from the same checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bough.config.experts import ExpertPlan
from bough.config.model_facts import ClampedGate, Moe, Scored
from bough.distributed.mesh import Mesh
from bough.layers import moe
from bough.layers.build import Build
from bough.layers.moe import MixtureOfExperts, SharedExpert, SharedInStack
from bough.layers.place import place_weights
from bough.quantization.unquantized import Unquantized
from bough.weights.slots import owners_of

WIDTH = 16
FACTS = Moe(
    num_experts=6, experts_per_token=2, intermediate=8, shared_intermediate=24, shared_gated=False, shared_scale=0.5,
    renormalise=True, scored=Scored(bias="flat"), scale=1.5,
)  # fmt: skip


class InMemory:
    def __init__(self, tensor: Tensor) -> None:
        self.name, self.kind, self.shape, self.tensor = "t", "F32", tuple(tensor.shape), tensor

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]

    def blocks(self, start: int, stop: int) -> Tensor:
        raise AssertionError


def build(rank: int = 0, size: int = 1) -> Build:
    device = torch.device("cpu")
    mesh = Mesh.tensor(rank, size)
    return Build(scheme=Unquantized(), dtype=torch.float32, device=device, context_length=32, mesh=mesh)


def filled(of: Build, weights: dict[str, Tensor]) -> MixtureOfExperts:
    """Filled with these, or with random ones that are added to them."""
    made = MixtureOfExperts(FACTS, WIDTH, of)
    place_weights(made)
    slots = {name: slot for owner in owners_of(made) for name, slot in owner.slots.items()}
    if not weights:
        weights |= {name: torch.randn(slot.shape) for name, slot in slots.items()}
    assert {name: tuple(each.shape) for name, each in weights.items()} == {n: slot.shape for n, slot in slots.items()}
    for parameter in made.parameters():
        parameter.fill_(torch.nan)
    for name, slot in slots.items():
        slot.put(InMemory(weights[name]))
    return made


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_as_by_itself(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: dict[str, Tensor] = {}
    with monkeypatch.context() as patch:
        patch.setattr(moe, "MOST_ALWAYS", 0)
        apart = filled(build(), weights)
    assert isinstance(apart.shared, SharedExpert)
    x = torch.randn(7, WIDTH)
    total = torch.zeros(7, WIDTH)
    for rank in range(size):
        joined = filled(build(rank, size), weights)
        assert isinstance(joined.shared, SharedInStack)
        chosen, ids = joined._chosen(x, x)
        assert ids[:, 2:].tolist() == [[6, 7, 8]] * 7
        assert chosen[:, 2:].tolist() == [[0.5] * 3] * 7
        total += joined.experts(x, chosen, ids)
    torch.testing.assert_close(total, apart(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "other",
    [
        replace(FACTS, shared_gated=True),
        replace(FACTS, shared_intermediate=20),
        replace(FACTS, shared_intermediate=8 * (moe.MOST_ALWAYS + 1)),
        replace(FACTS, clamped=ClampedGate(alpha=1.7, limit=7.0)),
        replace(FACTS, gated=False),
        ExpertPlan(redundant=2),
        ExpertPlan(moves=True),
    ],
)
def test_stays_by_itself(other: Moe | ExpertPlan) -> None:
    """Where it is not like the others, or these may be moved."""
    facts = other if isinstance(other, Moe) else FACTS
    of = build() if isinstance(other, Moe) else replace(build(), experts_plan=other)
    assert isinstance(MixtureOfExperts(facts, WIDTH, of).shared, SharedExpert)
