"""Queries made in one product with latents: each rank has its heads' queries and all latents, from the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bough.config.model_facts import Mla, NormFacts
from bough.distributed.mesh import Mesh
from bough.layers import latent_attention
from bough.layers.build import Build
from bough.layers.latent_attention import LatentAttention, QueriesBeside
from bough.layers.place import place_weights
from bough.quantization.unquantized import Unquantized
from bough.weights.slots import owners_of

WIDTH = 16
FACTS = Mla(num_heads=4, q_rank=None, kv_rank=12, nope_dim=6, rope_dim=4, v_dim=5, scale=0.3, norm=NormFacts(eps=1e-5))


class InMemory:
    def __init__(self, tensor: Tensor) -> None:
        self.name, self.kind, self.shape, self.tensor = "t", "F32", tuple(tensor.shape), tensor

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]

    def blocks(self, start: int, stop: int) -> Tensor:
        raise AssertionError


def filled(weights: dict[str, Tensor], rank: int = 0, size: int = 1) -> LatentAttention:
    """Filled with these, or with random ones that are added to them."""
    device, mesh = torch.device("cpu"), Mesh.tensor(rank, size)
    build = Build(scheme=Unquantized(), dtype=torch.float32, device=device, context_length=32, mesh=mesh)
    made = LatentAttention(FACTS, 0, WIDTH, None, build)
    place_weights(made)
    slots = {name: slot for owner in owners_of(made) for name, slot in owner.slots.items()}
    if not weights:
        weights |= {name: torch.randn(slot.shape) for name, slot in slots.items()}
    assert {name: tuple(each.shape) for name, each in weights.items()} == {n: slot.shape for n, slot in slots.items()}
    assert slots["q_up.weight"].head_rows == FACTS.head_dim
    for name, slot in slots.items():
        slot.put(InMemory(weights[name]))
    return made


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_as_apart(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: dict[str, Tensor] = {}
    with monkeypatch.context() as patch:
        patch.setattr(latent_attention, "_joins_queries", lambda facts, build: False)
        apart = filled(weights)
    x = torch.randn(3, WIDTH)
    q, source, kv = apart._products(x)
    assert source is x
    ranks = [filled(weights, rank, size) for rank in range(size)]
    assert all(isinstance(each.q_up, QueriesBeside) for each in ranks)
    made = [each._products(x) for each in ranks]
    torch.testing.assert_close(torch.cat([each[0] for each in made], 1), q)
    for each in made:
        torch.testing.assert_close(each[2], kv)
