"""Checkpoint of what drafts -> its network on the device, weights loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bough.config.draft_facts import DraftFacts
from bough.config.hf import Checkpoint
from bough.distributed.mesh import SINGLE, Mesh
from bough.kernels.linear import linear
from bough.layers.blocks import PreNormBlock
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.dflash import DflashModel
from bough.layers.draft_heads import Eagle3Head, FusedHead, StateHead
from bough.layers.medusa import MedusaHeads
from bough.layers.place import place_weights
from bough.models import dflash, eagle, eagle3, medusa, nextn
from bough.models.registry import block_of, find_architecture
from bough.quantization.choose import choose_scheme
from bough.quantization.names import weight_name
from bough.weights.dummy import fill_dummy
from bough.weights.load import load_weights
from bough.weights.mapping import Mapping


class SharedEnds:
    """The ends of a target that heads share."""

    def __init__(self, model: Decoder, tokens: tuple[int, ...] = ()) -> None:
        """`tokens`: the only ones whose logits are wanted; none: all."""
        self._model = model
        self.ids_V: Tensor | None = None
        if tokens:
            self.ids_V = torch.tensor(tokens, device=model.like.device)
            self._rows_VD = model.head.matrix.lookup(self.ids_V)

    def embed(self, ids_T: Tensor) -> Tensor:
        return self._model.embed.tokens.of(ids_T)

    def vectors(self, ids_T: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._model.embed.tokens.vectors(ids_T)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        if self.ids_V is None:
            return self._model.logits(hidden_LD)
        head = self._model.head
        bias = None if head.bias is None else head.bias[self.ids_V]
        return head.shaped(linear(hidden_LD, self._rows_VD, bias))


class DraftBuild(NamedTuple):
    """Where and how what drafts is made."""

    checkpoint: Checkpoint
    facts: DraftFacts
    dtype: torch.dtype
    device: torch.device
    context_length: int
    first_layer: int
    """Where its KV begins: behind that of the target..."""
    target_layers: int
    """...which has as many layers."""
    mesh: Mesh = SINGLE
    load_format: str = "auto"
    quantization: str = "auto"
    seed: int = 0

    @property
    def is_dummy(self) -> bool:
        return self.load_format == "dummy" or self.checkpoint.kind == "config-only"

    def of(self, mapping: Mapping, first_layer: int) -> Build:
        return Build(
            scheme=choose_scheme(self.checkpoint, self.quantization, self.device, mapping, dummy=self.is_dummy),
            dtype=self.dtype,
            device=self.device,
            context_length=self.context_length,
            mesh=self.mesh,
            first_layer=first_layer,
        )


def build_heads(given: DraftBuild, target: Decoder) -> list[StateHead]:
    """Heads that draft from the states of `target`, one after the other: this rank's share of them."""
    facts, ends = given.facts, SharedEnds(target, given.facts.tokens)
    if facts.method == "EAGLE3":
        eagle3_head = Eagle3Head(facts, given.of(eagle3.WEIGHTS, given.first_layer), ends)
        _keep_to(eagle3_head, ends)
        _fill(eagle3_head, given, eagle3.WEIGHTS, eagle3.canonical)
        return [eagle3_head]
    if facts.method == "EAGLE":
        head = FusedHead(facts, given.of(eagle.WEIGHTS, given.first_layer), ends, PreNormBlock)
        _keep_to(head, ends)
        _fill(head, given, eagle.WEIGHTS, eagle.canonical)
        return [head]
    return [_nextn_head(given, ends, number) for number in range(facts.num_heads)]


def _keep_to(head: Eagle3Head | FusedHead | MedusaHeads, ends: SharedEnds) -> None:
    """Its logits are those of some tokens only, if the shared ends' are."""
    if ends.ids_V is not None:
        head.target_ids_V = ends.ids_V


def _nextn_head(given: DraftBuild, ends: SharedEnds, number: int) -> FusedHead:
    """One of a checkpoint's own heads. Its block is like the model's last one."""
    architecture, num_layers = given.facts.model.architecture, given.target_layers
    names = nextn.names_of(architecture)
    mapping = nextn.weights_of(find_architecture(architecture).weights)
    facts = replace(given.facts, model=replace(given.facts.model, layers=given.facts.model.layers[:1]))
    build = given.of(mapping, given.first_layer + number)
    head = FusedHead(facts, build, ends, block_of(architecture), num_layers + number)
    _keep_to(head, ends)
    _fill(head, given, mapping, partial(nextn.canonical, names=names, num_layers=num_layers, number=number))
    return head


def build_medusa(given: DraftBuild, target: Decoder) -> MedusaHeads:
    ends = SharedEnds(target, given.facts.tokens)
    heads = MedusaHeads(given.facts, given.of(medusa.WEIGHTS, given.first_layer), ends)
    _keep_to(heads, ends)
    _fill(heads, given, medusa.WEIGHTS, medusa.canonical)
    return heads


def build_dflash(given: DraftBuild, target: Decoder) -> DflashModel:
    drafter = DflashModel(given.facts, given.of(dflash.WEIGHTS, given.first_layer), SharedEnds(target))
    _fill(drafter, given, dflash.WEIGHTS, dflash.canonical)
    return drafter


def _fill(network: nn.Module, given: DraftBuild, mapping: Mapping, names: Callable[[str], str | None]) -> None:
    place_weights(network)
    if given.is_dummy:
        fill_dummy(network, given.seed, "normal")
    else:

        def named(name: str) -> str | None:
            kept = weight_name(name, quantised=bool(given.checkpoint.quantization))
            return None if kept is None else names(kept)

        load_weights(network, mapping, given.checkpoint, None, named)
    network.eval()
