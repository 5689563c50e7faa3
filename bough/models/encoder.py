"""The modules of BERT's relatives: encoder, classifiers, masked language model. T tokens, D width, R texts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bough.config.encoder_facts import EncoderFacts
from bough.config.model_facts import Dense, ModelFacts
from bough.core.errors import ConfigError
from bough.layers.batch import Batch
from bough.layers.blocks import AfterNormBlock
from bough.layers.build import Build
from bough.layers.embedding import Head, Table, VocabEmbedding
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import ACTIVATIONS
from bough.layers.norm import fill, make_norm
from bough.layers.parts import Parts
from bough.layers.stream import Stream
from bough.weights.slots import Slot


class Encoder(nn.Module):
    """From token ids to hidden states at `batch.logits_at`."""

    def __init__(self, facts: ModelFacts, build: Build) -> None:
        super().__init__()
        encoder, parts = encoder_of(facts), Parts(facts, build)
        self.first_position = encoder.first_position
        self.embed = VocabEmbedding(facts.vocab, facts.hidden, build)
        self.positions = Table(encoder.num_positions, facts.hidden, build)
        self.segments = Table(encoder.num_segments, facts.hidden, build)
        self.norm = parts.norm()
        self.layers = nn.ModuleList(AfterNormBlock(parts, layer) for layer in range(facts.num_layers))

    def forward(self, batch: Batch) -> Tensor:
        x_TD: Tensor = self.embed(batch) + self.positions(batch.positions_T + self.first_position)
        if batch.segments_T is None or len(self.segments.weight) == 1:
            x_TD = x_TD + self.segments.weight[0]
        else:
            x_TD = x_TD + self.segments(batch.segments_T)
        stream = Stream(self.norm(x_TD), batch)
        for block in self.layers:
            block(stream, batch)
        x_TD = stream.read(None)
        return x_TD if batch.logits_at is None else x_TD.index_select(0, batch.logits_at)


class BertClassifier(nn.Module):
    """The first token's state through a tanh layer, then a score for each label."""

    def __init__(self, facts: ModelFacts, num_labels: int, build: Build) -> None:
        super().__init__()
        self.pooler = ReplicatedLinear(facts.hidden, facts.hidden, build, bias=True)
        self.classifier = ReplicatedLinear(facts.hidden, num_labels, build, bias=True)

    def forward(self, pooled_RD: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.pooler(pooled_RD)))  # type: ignore[no-any-return]


class RobertaClassifier(nn.Module):
    """The first token's state through a tanh layer, then a score for each label."""

    def __init__(self, facts: ModelFacts, num_labels: int, build: Build) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(facts.hidden, facts.hidden, build, bias=True)
        self.out = ReplicatedLinear(facts.hidden, num_labels, build, bias=True)

    def forward(self, pooled_RD: Tensor) -> Tensor:
        return self.out(torch.tanh(self.dense(pooled_RD)))  # type: ignore[no-any-return]


class MaskedLM(nn.Module):
    """Hidden states -> logits of the vocabulary, over the embedding's own matrix where the model ties them."""

    def __init__(self, facts: ModelFacts, embed: VocabEmbedding, build: Build) -> None:
        super().__init__()
        ffn = facts.layers[0].ffn
        assert isinstance(ffn, Dense), "encoders have no experts"
        self.dense = ReplicatedLinear(facts.hidden, facts.hidden, build, bias=True)
        self.activation = ACTIVATIONS[ffn.activation]
        self.norm = make_norm(facts.norm, facts.hidden, build)
        tied = embed if facts.tie_embeddings else None
        self.decoder = _Decoder(facts.vocab, facts.hidden, build, tied_to=tied)
        self.bias = nn.Parameter(torch.empty(facts.vocab, dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"bias": Slot(tuple(self.bias.shape), lambda stored: fill(self.bias, stored))}

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.norm(self.activation(self.dense(x_TD))))
        return out + self.bias


class _Decoder(Head):
    """Checkpoints may name the head's bias twice; the other place is read."""

    def slots(self) -> dict[str, Slot]:
        return {**super().slots(), "bias": Slot((self.vocab,), lambda stored: None, optional=True)}


def encoder_of(facts: ModelFacts) -> EncoderFacts:
    """What the config of an encoder of this kind must say."""
    if facts.encoder is None:
        raise ConfigError(
            what=f"{facts.architecture} needs the config of an encoder",
            fix="check config.json",
        )
    return facts.encoder
