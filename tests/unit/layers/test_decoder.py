"""The frame of a model: what it is made of is found where it was put last."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bough.layers.batch import AttentionSpec, Batch
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.linear import GateUpLinear
from bough.layers.place import place_weights
from bough.models import llama
from bough.models.registry import facts_of
from bough.quantization.unquantized import Unquantized

BUILD = Build(scheme=Unquantized(), dtype=torch.float32, device=torch.device("cpu"), context_length=32)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 24,
    "max_position_embeddings": 32,
}


class Values:
    """An attention that gives every token its own value."""

    def forward(self, _spec: AttentionSpec, _q_TNH: Tensor, _k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        return v_TKH.flatten(1)


@pytest.fixture
def model() -> Decoder:
    made = llama.make(facts_of(CONFIG), BUILD)
    place_weights(made)
    generator = torch.Generator().manual_seed(7)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made


def run(model: Decoder) -> Tensor:
    ids = torch.tensor([3, 1, 4])
    return model.forward(Batch(ids_T=ids, positions_T=torch.arange(3), attention=Values(), num_tokens=3))


def block(model: Decoder) -> Any:
    return model.layers[0]


def test_modules_are_ordinary_attributes_too(model: Decoder) -> None:
    for module in (*model.modules(), *copy.deepcopy(model).modules()):
        for name, child in module.named_children():
            assert vars(module)[name] is child


def test_a_copy_computes_with_its_own_modules(model: Decoder) -> None:
    before, other = run(model), copy.deepcopy(model)
    nn.init.zeros_(block(model).mlp.gate_up.matrix.weight)
    assert torch.equal(run(other), before)


def test_another_module_is_used_once_it_is_assigned(model: Decoder) -> None:
    before = run(model)
    other = GateUpLinear(16, 32, BUILD, activation="silu")
    place_weights(other)
    nn.init.zeros_(other.matrix.weight)
    block(model).mlp.gate_up = other
    assert block(model).mlp.gate_up is other
    assert dict(block(model).mlp.named_children())["gate_up"] is other
    changed = run(model)
    assert not torch.equal(changed, before)
    nn.init.ones_(other.matrix.weight)
    assert not torch.equal(run(model), changed)


@pytest.mark.parametrize("how", ["in place", "its memory", "the parameter"])
def test_a_weight_that_changes_is_the_one_used(model: Decoder, how: str) -> None:
    before = run(model)
    matrix = block(model).mlp.gate_up.matrix
    zeros = torch.zeros_like(matrix.weight)
    if how == "in place":
        matrix.weight.copy_(zeros)
    elif how == "its memory":
        matrix.weight.data = zeros
    else:
        matrix.weight = nn.Parameter(zeros, requires_grad=False)
    nothing = GateUpLinear(16, 32, BUILD, activation="silu")
    place_weights(nothing)
    nn.init.zeros_(nothing.matrix.weight)
    changed = run(model)
    block(model).mlp.gate_up = nothing
    assert torch.equal(changed, run(model))
    assert not torch.equal(changed, before)


def test_converted_weights_are_the_ones_used(model: Decoder) -> None:
    assert run(model.to(torch.float64)).dtype == torch.float64
