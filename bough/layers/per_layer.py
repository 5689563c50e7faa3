"""Embeddings of tokens that each layer has of its own (Gemma 3n, Gemma 4). T tokens, D width, L layers, P their width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bough.config.model_facts import ModelFacts, PerLayerInputs
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.embedding import VocabEmbedding
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import ACTIVATIONS
from bough.layers.norm import make_norm


class LayerInputs(nn.Module):
    """What all layers get: the mean of a table's vectors and of a product of the embeddings, normed to equal size."""

    def __init__(self, facts: ModelFacts, own: PerLayerInputs, build: Build) -> None:
        super().__init__()
        self.own = own
        self.num_layers = facts.num_layers
        width = facts.num_layers * own.width
        self.tokens = VocabEmbedding(own.vocab, width, build, scale=own.width**0.5)
        self.project = ReplicatedLinear(facts.hidden, width, build)
        self.norm = make_norm(facts.norm, own.width, build)
        self.scale = torch.tensor(facts.hidden**-0.5, dtype=build.dtype).item()
        self.mean_scale = torch.tensor(2.0**-0.5, dtype=build.dtype).item()

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """[T, L, P]. `x_TD`: the embeddings."""
        ids_T = batch.ids_T
        ids_T = ids_T.masked_fill(ids_T >= self.own.vocab, 0)
        if batch.media is not None:
            ids_T = ids_T.index_fill(0, batch.media.at_M, self.own.media_token)
        made_TLP: Tensor = self.norm(self._by_layer(self.project(x_TD) * self.scale))
        return (made_TLP + self._by_layer(self.tokens.of(ids_T))) * self.mean_scale

    def _by_layer(self, x_TW: Tensor) -> Tensor:
        return x_TW.view(len(x_TW), self.num_layers, self.own.width)


class LayerInputGate(nn.Module):
    """What a layer makes of its input: gated by the stream, brought to its width, and normed."""

    def __init__(self, facts: ModelFacts, own: PerLayerInputs, build: Build) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(facts.hidden, own.width, build)
        self.project = ReplicatedLinear(own.width, facts.hidden, build)
        self.norm = make_norm(facts.norm, facts.hidden, build)
        self.activation = ACTIVATIONS[own.activation]

    def forward(self, x_TD: Tensor, input_TP: Tensor) -> Tensor:
        """[T, D]"""
        gated_TP = self.activation(self.gate(x_TD)) * input_TP
        out: Tensor = self.norm(self.project(gated_TP))
        return out
