"""Qwen2-MoE: Qwen2's attention, then a mixture of experts beside a shared expert with a gate of its own; some layers may be
dense.

T tokens, D width, N heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from bough.config.model_facts import ModelFacts, MoeFacts
from bough.layers.attention import attention_of
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.linear import GateUpLinear, QKVLinear, RowLinear
from bough.layers.moe import MixtureOfExperts
from bough.layers.norm import RMSNorm
from bough.layers.rotary import Rope, every_rope
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, NORMS
from bough.models.registry import needs_experts
from bough.weights.mapping import Fuse, Mapping, Rename

WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *FEED_FORWARD,
    *EXPERTS,
    Rename("model.layers.*.mlp.shared_expert_gate", "layers.*.moe.shared.gate"),
    Fuse(
        "layers.*.moe.shared.gate_up",
        gate="model.layers.*.mlp.shared_expert.gate_proj",
        up="model.layers.*.mlp.shared_expert.up_proj",
    ),
    Rename("model.layers.*.mlp.shared_expert.down_proj", "layers.*.moe.shared.down"),
)


class Block(nn.Module):
    def __init__(self, facts: ModelFacts, moe: MoeFacts, layer: int, rope: Rope, build: Build) -> None:
        super().__init__()
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.attn_norm = RMSNorm(facts.hidden, facts.norm_eps, build)
        self.qkv = QKVLinear(facts.hidden, *heads, build, bias=facts.qkv_bias)
        self.rope = rope
        self.attn = attention_of(facts, layer, build)
        self.out = RowLinear(facts.num_heads * facts.head_dim, facts.hidden, build, bias=facts.out_bias)
        self.ffn_norm = RMSNorm(facts.hidden, facts.norm_eps, build)
        self.is_sparse = facts.sparse_layers[layer]
        if self.is_sparse:
            self.moe = MixtureOfExperts(moe, facts.hidden, facts.activation, build)
        else:
            self.gate_up = GateUpLinear(facts.hidden, facts.intermediate, build, activation=facts.activation)
            self.down = RowLinear(facts.intermediate, facts.hidden, build)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        heads, residual_TD = self.attn.project(self.attn_norm, self.qkv, x_TD, residual_TD, batch)
        x_TD = self.attn(*heads, batch, self.rope)
        stream = self.out.onto(x_TD, batch.beside(x_TD, residual_TD))
        if self.is_sparse:
            return self.moe.after(self.ffn_norm, *stream)
        x_TD, residual_TD = self.ffn_norm.add(*stream)
        return self.down.onto(self.gate_up(x_TD), residual_TD)


def make(facts: ModelFacts, build: Build) -> Decoder:
    moe = needs_experts(facts)
    ropes = every_rope(facts.ropes, build)
    return Decoder(facts, (Block(facts, moe, layer, rope, build) for layer, rope in enumerate(ropes)), build)
