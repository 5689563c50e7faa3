"""Qwen3: Llama's block with each head of queries and keys normed before it is rotated.

T tokens, D width, N heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from bough.config.model_facts import ModelFacts
from bough.kernels.decoder_stack import BlockParts
from bough.layers.attention import attention_of
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.fused import parts_of
from bough.layers.linear import GateUpLinear, QKVLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.rotary import Rope, every_rope
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, NORMS
from bough.weights.mapping import Mapping

WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD)


class Block(nn.Module):
    def __init__(self, facts: ModelFacts, layer: int, rope: Rope, build: Build) -> None:
        super().__init__()
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.attn_norm = RMSNorm(facts.hidden, facts.norm_eps, build)
        self.qkv = QKVLinear(facts.hidden, *heads, build, bias=facts.qkv_bias)
        self.q_norm = RMSNorm(facts.head_dim, facts.norm_eps, build)
        self.k_norm = RMSNorm(facts.head_dim, facts.norm_eps, build)
        self.rope = rope
        self.attn = attention_of(facts, layer, build)
        self.out = RowLinear(facts.num_heads * facts.head_dim, facts.hidden, build, bias=facts.out_bias)
        self.ffn_norm = RMSNorm(facts.hidden, facts.norm_eps, build)
        self.gate_up = GateUpLinear(facts.hidden, facts.intermediate, build, activation=facts.activation)
        self.down = RowLinear(facts.intermediate, facts.hidden, build)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        heads, residual_TD = self.attn.project(self.attn_norm, self.qkv, x_TD, residual_TD, batch)
        x_TD = self.attn(*heads, batch, self.rope, self.q_norm, self.k_norm)
        x_TD, residual_TD = self.ffn_norm.add(*self.out.onto(x_TD, batch.beside(x_TD, residual_TD)))
        return self.down.onto(self.gate_up(x_TD), residual_TD)

    def parts(self) -> BlockParts | None:
        return parts_of(
            self,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )


def make(facts: ModelFacts, build: Build) -> Decoder:
    ropes = every_rope(facts.ropes, build)
    return Decoder(facts, (Block(facts, layer, rope, build) for layer, rope in enumerate(ropes)), build)
