"""Phi-3 and Phi-4: Llama's block, stored with queries, keys and values fused, gate and up fused, and rotary factors found by
search for long contexts."""

from __future__ import annotations

from bough.config.model_facts import ModelFacts
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.rotary import ropes_of
from bough.models.hf_names import ENDS, NORMS
from bough.models.llama import Block
from bough.weights.mapping import Mapping, Rename, Split

WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    Split("model.layers.*.self_attn.qkv_proj", "layers.*.qkv", parts=("q", "k", "v")),
    Rename("model.layers.*.self_attn.o_proj", "layers.*.out"),
    Split("model.layers.*.mlp.gate_up_proj", "layers.*.gate_up", parts=("gate", "up")),
    Rename("model.layers.*.mlp.down_proj", "layers.*.down"),
)


def make(facts: ModelFacts, build: Build) -> Decoder:
    ropes = ropes_of(facts.ropes, build)
    return Decoder(facts, (Block(facts, layer, rope, build) for layer, rope in enumerate(ropes)), build)
