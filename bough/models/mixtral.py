"""Mixtral: Mistral's attention, and in place of the feed-forward a mixture of experts whose chosen weights sum to 1.

T tokens, D width, N heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from bough.config.model_facts import ModelFacts, MoeFacts
from bough.layers.attention import attention_of
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.linear import QKVLinear, RowLinear
from bough.layers.moe import MixtureOfExperts
from bough.layers.norm import RMSNorm
from bough.layers.rotary import Rope, every_rope
from bough.models.hf_names import ATTENTION, ENDS, NORMS
from bough.models.registry import needs_experts
from bough.weights.mapping import Mapping, Rename

WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    Rename("model.layers.*.block_sparse_moe.gate", "layers.*.moe.router"),
    Rename("model.layers.*.block_sparse_moe.experts.*.w1", "layers.*.moe.experts.*.gate"),
    Rename("model.layers.*.block_sparse_moe.experts.*.w3", "layers.*.moe.experts.*.up"),
    Rename("model.layers.*.block_sparse_moe.experts.*.w2", "layers.*.moe.experts.*.down"),
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
        self.moe = MixtureOfExperts(moe, facts.hidden, facts.activation, build)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        heads, residual_TD = self.attn.project(self.attn_norm, self.qkv, x_TD, residual_TD, batch)
        x_TD = self.attn(*heads, batch, self.rope)
        return self.moe.after(self.ffn_norm, *self.out.onto(x_TD, batch.beside(x_TD, residual_TD)))


def make(facts: ModelFacts, build: Build) -> Decoder:
    moe = needs_experts(facts)
    ropes = every_rope(facts.ropes, build)
    return Decoder(facts, (Block(facts, moe, layer, rope, build) for layer, rope in enumerate(ropes)), build)
