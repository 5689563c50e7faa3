"""Layers on one rank of a mesh: the ranks' shares put together are the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bough.config.model_facts import ModelFacts
from bough.config.rope_facts import RopeFacts
from bough.core.errors import ConfigError
from bough.distributed.mesh import Mesh
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.embedding import Head, VocabEmbedding
from bough.layers.linear import ColumnLinear, GateUpLinear, QKVLinear, ReplicatedLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.parts import Parts
from bough.layers.place import place_weights
from bough.layers.rotary import rope_frequencies, rope_table
from bough.quantization.read import LayerKind
from bough.quantization.scheme import Matrix, Part
from bough.quantization.unquantized import Unquantized
from bough.weights.slots import TakesWeights

CPU = torch.device("cpu")


class InMemory:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.name, self.kind, self.shape, self.tensor = "t", "F32", tuple(tensor.shape), tensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def blocks(self, start: int, stop: int) -> torch.Tensor:
        raise AssertionError


def on_rank(rank: int, size: int) -> Build:
    """A mesh without a group: what a rank computes before it talks to others."""
    return Build(scheme=Unquantized(), dtype=torch.float32, device=CPU, context_length=32, mesh=Mesh.tensor(rank, size))


ALONE = on_rank(0, 1)


def fill(layer: TakesWeights, **tensors: torch.Tensor) -> None:
    assert isinstance(layer, nn.Module)
    place_weights(layer)
    slots = layer.slots()
    assert slots.keys() == {name.replace("__", ".") for name in tensors}
    with torch.no_grad():
        for name, tensor in tensors.items():
            slot = slots[name.replace("__", ".")]
            assert slot.shape == tuple(tensor.shape)
            slot.put(InMemory(tensor))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_shares_side_by_side(size: int) -> None:
    weight, bias, x = torch.randn(8, 6), torch.randn(8), torch.randn(3, 6)
    parts = []
    for rank in range(size):
        layer = ColumnLinear(6, 8, on_rank(rank, size), bias=True)
        fill(layer, weight=weight, bias=bias)
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, -1), x @ weight.T + bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_shares_summed(size: int) -> None:
    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(3, 8)
    total = torch.zeros(3, 6)
    for rank in range(size):
        layer = RowLinear(8, 6, on_rank(rank, size), bias=True, reduce=False)
        fill(layer, weight=weight, bias=bias)
        total += layer(x.chunk(size, -1)[rank]).value()
    torch.testing.assert_close(total, x @ weight.T + bias)


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (4, 4)])
def test_each_rank_has_its_heads_and_the_keys_they_read(size: int, kv_heads: int) -> None:
    num_heads, head_dim = 8, 4
    q, k, v = (torch.randn(n * head_dim, 6) for n in (num_heads, kv_heads, kv_heads))
    x = torch.randn(3, 6)
    all_q = (x @ q.T).view(3, num_heads, head_dim)
    all_k = (x @ k.T).view(3, kv_heads, head_dim)
    all_v = (x @ v.T).view(3, kv_heads, head_dim)
    for rank in range(size):
        layer = QKVLinear(6, num_heads, kv_heads, head_dim, on_rank(rank, size))
        fill(layer, q__weight=q, k__weight=k, v__weight=v)
        own_q, own_k, own_v = layer(x)
        share = num_heads // size
        for local in range(share):
            head = rank * share + local
            kv = head * kv_heads // num_heads
            own_kv = local * own_k.shape[1] // share
            torch.testing.assert_close(own_q[:, local], all_q[:, head])
            torch.testing.assert_close(own_k[:, own_kv], all_k[:, kv])
            torch.testing.assert_close(own_v[:, own_kv], all_v[:, kv])


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="6 attention heads can't be split over 8 ranks"):
        QKVLinear(6, 6, 3, 4, on_rank(0, 8))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_up(activation: str, bias: bool) -> None:
    gate, up, x = torch.randn(8, 6), torch.randn(8, 6), torch.randn(3, 6)
    b_gate, b_up = (torch.randn(8), torch.randn(8)) if bias else (torch.zeros(8), torch.zeros(8))
    parts = []
    for rank in range(2):
        layer = GateUpLinear(6, 8, on_rank(rank, 2), activation=activation, bias=bias)  # type: ignore[arg-type]
        biases = {"gate__bias": b_gate, "up__bias": b_up} if bias else {}
        fill(layer, gate__weight=gate, up__weight=up, **biases)
        parts.append(layer(x))
    act = (
        torch.nn.functional.silu if activation == "silu" else lambda t: torch.nn.functional.gelu(t, approximate="tanh")
    )
    torch.testing.assert_close(torch.cat(parts, -1), act(x @ gate.T + b_gate) * (x @ up.T + b_up))


def test_replicated() -> None:
    weight, x = torch.randn(5, 6), torch.randn(3, 6)
    layer = ReplicatedLinear(6, 5, on_rank(1, 2))
    fill(layer, weight=weight)
    torch.testing.assert_close(layer(x), x @ weight.T)


def test_head_shares_its_embedding_and_caps() -> None:
    table = torch.randn(11, 6)
    embedding = VocabEmbedding(11, 6, ALONE, scale=2.0)
    fill(embedding, weight=table)
    head = Head(11, 6, ALONE, tied_to=embedding, softcap=3.0)
    place_weights(head)
    x = torch.randn(2, 6)
    torch.testing.assert_close(head(x), torch.tanh(x @ table.T / 3.0) * 3.0)
    ids = torch.tensor([3, 0, 10])
    batch = Batch(ids_T=ids, positions_T=ids, attention=None)  # type: ignore[arg-type]
    torch.testing.assert_close(embedding(batch), table[ids] * 2.0)


def test_norm_adds() -> None:
    norm = RMSNorm(6, 1e-6, ALONE, offset=1.0)
    weight = torch.randn(6)
    fill(norm, weight=weight)
    x, residual = torch.randn(4, 6), torch.randn(4, 6)

    def expected(t: torch.Tensor) -> torch.Tensor:
        return t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)

    normed, stream = norm.add(x, residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(normed, expected(x + residual))


def rope(**changes: object) -> RopeFacts:
    plain = {
        "kind": "default",
        "theta": 1e4,
        "rotary_dim": 8,
        "max_position": 64,
        "original_max_position": 16,
        "factor": 4.0,
    }
    return RopeFacts(**{**plain, **changes})  # type: ignore[arg-type]


def test_layers_that_rotate_alike_share_a_table() -> None:
    one, other = rope(), rope(theta=1e6)
    parts = Parts(cast(ModelFacts, None), ALONE)
    ropes = [parts.rope(each) for each in (one, other, None, rope())]
    assert ropes[0] is ropes[3]
    assert ropes[0] is not ropes[1]
    assert ropes[2] is None


def test_rope_table_is_cosines_then_sines() -> None:
    table = rope_table(rope(), 5, CPU)
    angle = 3 / 1e4 ** (2 / 8)
    assert table.shape == (5, 8)
    torch.testing.assert_close(table[3, [1, 5]], torch.tensor([math.cos(angle), math.sin(angle)]))


@pytest.mark.parametrize("length", [16, 63, 64, 128])
def test_dynamic_scaling_starts_beyond_the_trained_length(length: int) -> None:
    """A server with a shorter context than the model was trained for rotates as one with all of it."""
    scaled = rope_table(rope(kind="dynamic"), length, CPU)
    plain = rope_table(rope(), length, CPU)
    assert torch.equal(scaled, plain) == (length <= 64)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("dim", [8, 64])
def test_yarn_ramps_as_transformers_does(truncate: bool, dim: int) -> None:
    """The ramp begins and ends between two frequencies, unless its ends are rounded."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": truncate,
               "beta_fast": 2.0, "beta_slow": 0.5, "rope_theta": 1e4}  # fmt: skip
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim, max_position_embeddings=64,
                         rope_parameters=scaling)  # fmt: skip
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    facts = rope(kind="yarn", rotary_dim=dim, truncate=truncate, beta_fast=2.0, beta_slow=0.5)
    torch.testing.assert_close(rope_frequencies(facts, 64), expected)
    angles = torch.arange(64.0)[:, None] * expected
    torch.testing.assert_close(rope_table(facts, 64, CPU)[:, : dim // 2], angles.cos() * magnitude)
    if dim == 64:
        other = rope_frequencies(
            rope(kind="yarn", rotary_dim=dim, truncate=not truncate, beta_fast=2.0, beta_slow=0.5), 64
        )
        assert not torch.allclose(other, expected), "it makes a difference here"


def test_longrope_picks_its_factors_by_the_longest_sequence() -> None:
    facts = rope(kind="longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, attention_factor=1.0)
    assert torch.equal(rope_table(facts, 16, CPU), rope_table(rope(), 16, CPU))
    assert torch.equal(rope_table(facts, 17, CPU), rope_table(rope(kind="linear", factor=2.0), 17, CPU))


def test_a_scheme_is_asked_with_each_layers_path_in_the_model() -> None:
    class Asked(Unquantized):
        def matrix(
            self,
            name: str,
            parts: Sequence[Part],
            *,
            kind: LayerKind = "linear",
            dtype: torch.dtype,
            device: torch.device,
        ) -> Matrix:
            names[name] = [part.name for part in parts]
            return super().matrix(name, parts, dtype=dtype, device=device)

    names: dict[str, list[str]] = {}
    build = Build(scheme=Asked(), dtype=torch.float32, device=CPU, context_length=32)
    embedding = VocabEmbedding(11, 6, build)
    block = nn.ModuleDict({"qkv": QKVLinear(6, 4, 2, 4, build), "down": RowLinear(8, 6, build)})
    place_weights(nn.ModuleDict({"embed": embedding, "layers": nn.ModuleList([block]), "head": Head(11, 6, build)}))
    assert names == {"embed": [""], "layers.0.qkv": ["q", "k", "v"], "layers.0.down": [""], "head": [""]}
