"""Gemma 4's block."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from bough.config.model_facts import Moe
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.mlp import make_mlp
from bough.layers.moe import MixtureOfExperts
from bough.layers.norm import fill
from bough.layers.parts import Parts
from bough.layers.stream import Product, Stream
from bough.models.gemma4 import beside
from bough.weights.slots import Slot


class Scale(nn.Module):
    """One number, by which a block's result is multiplied. Some checkpoints leave it out: it is 1."""

    weight: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(1, dtype=build.dtype, device=build.device), persistent=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot((1,), partial(fill, self.weight), optional=True)}


class ExpertsBeside(nn.Module):
    """Experts beside the feed-forward block: each reads the stream through a norm of its own, and so does the router; what
    each gives is normed before both are added."""

    def __init__(self, parts: Parts, facts: Moe, layer: int) -> None:
        super().__init__()
        mixture = sum(isinstance(each.ffn, Moe) for each in parts.facts.layers[:layer])
        self.norm = parts.norm()
        self.router_norm = parts.norm()
        self.mixture = MixtureOfExperts(replace(facts, shared_intermediate=0), parts.facts.hidden, parts.build, mixture)
        self.after_norm = parts.norm()
        self.beside_norm = parts.norm()

    def forward(self, stream: Stream, beside: Tensor | Product) -> Tensor:
        """`beside`: what the feed-forward block gives."""
        by_TD = stream.norm(self.router_norm).value()
        made_TD = self.mixture(stream.norm(self.norm), by_TD)
        out: Tensor = self.beside_norm(beside) + self.after_norm(made_TD)
        return out


class Gemma4Block(nn.Module):
    """Gemma's sandwich, then what the layer makes of its own input; all of it scaled."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.layer = layer
        ffn = parts.layer(layer).ffn
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.after_attn_norm = parts.norm()
        self.mlp_norm = parts.norm()
        self.experts: ExpertsBeside | None = None
        if isinstance(ffn, Moe):
            self.mlp: nn.Module = make_mlp(beside(ffn), parts.facts.hidden, parts.build)
            self.experts = ExpertsBeside(parts, ffn, layer)
        else:
            self.mlp = parts.feed_forward(layer)
        self.after_mlp_norm = parts.norm()
        self.input = None if parts.facts.per_layer is None else parts.layer_input_gate()
        self.scale = Scale(parts.build)

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.after_attn_norm(self.attn(stream.norm(self.attn_norm), batch)))
        made = self.mlp(stream.norm(self.mlp_norm))
        if self.experts is not None:
            made = self.experts(stream, made)
        stream.add(self.after_mlp_norm(made))
        if self.input is not None:
            stream.add(self.input(stream.plain().value(), stream.layer_input(self.layer)))
        stream.scale(self.scale.weight)
