"""Mistral: Llama's block, whose attention sees a sliding window in every layer where the config sets one."""

from __future__ import annotations

from bough.config.model_facts import ModelFacts
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.rotary import ropes_of
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, NORMS
from bough.models.llama import Block
from bough.weights.mapping import Mapping

WEIGHTS = Mapping(*ENDS, *NORMS, *ATTENTION, *FEED_FORWARD)


def make(facts: ModelFacts, build: Build) -> Decoder:
    ropes = ropes_of(facts.ropes, build)
    return Decoder(facts, (Block(facts, layer, rope, build) for layer, rope in enumerate(ropes)), build)
