"""BERT and the encoders trained in its shape: learned positions and segments, norms after each half of a block, every token
seeing every other.

T tokens, D width, N heads, H width of a head, F inner width, R texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.encoder_facts import EncoderFacts, PlainActivation
from bough.config.model_facts import ModelFacts
from bough.core.errors import ConfigError
from bough.layers.attention import attention_of
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.embedding import Head, VocabEmbedding
from bough.layers.layer_norm import LayerNorm, Table, fill
from bough.layers.linear import ColumnLinear, QKVLinear, ReplicatedLinear, RowLinear
from bough.weights.mapping import Fuse, Ignore, Rename, Rule
from bough.weights.slots import Slot

ACTIVATIONS: Final[dict[PlainActivation, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def body_rules(prefix: str) -> tuple[Rule, ...]:
    """Names of an encoder's tensors under `prefix` ("bert.", "roberta.", or nothing)."""
    layer = f"{prefix}encoder.layer.*"
    return (
        Rename(f"{prefix}embeddings.word_embeddings", "body.embed"),
        Rename(f"{prefix}embeddings.position_embeddings", "body.positions"),
        Rename(f"{prefix}embeddings.token_type_embeddings", "body.segments"),
        Rename(f"{prefix}embeddings.LayerNorm", "body.norm"),
        Ignore(f"{prefix}embeddings"),
        Fuse(
            "body.layers.*.qkv",
            q=f"{layer}.attention.self.query",
            k=f"{layer}.attention.self.key",
            v=f"{layer}.attention.self.value",
        ),
        Rename(f"{layer}.attention.output.dense", "body.layers.*.out"),
        Rename(f"{layer}.attention.output.LayerNorm", "body.layers.*.attn_norm"),
        Rename(f"{layer}.intermediate.dense", "body.layers.*.up"),
        Rename(f"{layer}.output.dense", "body.layers.*.down"),
        Rename(f"{layer}.output.LayerNorm", "body.layers.*.ffn_norm"),
    )


BODY: Final = (*body_rules(""), *body_rules("bert."))
NO_POOLER: Final = (Ignore("pooler.dense"), Ignore("bert.pooler.dense"))
NO_HEAD: Final = (
    Ignore("cls.predictions"),
    Ignore("cls.predictions.decoder"),
    Ignore("cls.predictions.transform.dense"),
    Ignore("cls.predictions.transform.LayerNorm"),
    Ignore("cls.seq_relationship"),
    Ignore("classifier"),
)
EMBEDDER: Final = (*BODY, *NO_POOLER, *NO_HEAD)
CLASSIFIER: Final = (*BODY, Rename("bert.pooler.dense", "head.pooler"), Rename("classifier", "head.classifier"))
MASKED_LM: Final = (
    *BODY,
    *NO_POOLER,
    Rename("cls.predictions.transform.dense", "head.dense"),
    Rename("cls.predictions.transform.LayerNorm", "head.norm"),
    Rename("cls.predictions.decoder", "head.decoder"),
    Rename("cls.predictions", "head"),
    Ignore("cls.seq_relationship"),
)


class Block(nn.Module):
    def __init__(self, facts: ModelFacts, layer: int, build: Build) -> None:
        super().__init__()
        encoder = encoder_of(facts)
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.qkv = QKVLinear(facts.hidden, *heads, build, bias=True)
        self.attn = attention_of(facts, layer, build)
        self.out = RowLinear(facts.num_heads * facts.head_dim, facts.hidden, build, bias=True)
        self.attn_norm = LayerNorm(facts.hidden, encoder.norm_eps, build)
        self.up = ColumnLinear(facts.hidden, facts.intermediate, build, bias=True)
        self.activation = ACTIVATIONS[encoder.activation]
        self.down = RowLinear(facts.intermediate, facts.hidden, build, bias=True)
        self.ffn_norm = LayerNorm(facts.hidden, encoder.norm_eps, build)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        q_TNH, k_TNH, v_TNH = self.qkv(x_TD)
        x_TD = self.attn_norm(x_TD + self.out(self.attn(q_TNH, k_TNH, v_TNH, batch, None)))
        out_TD: Tensor = self.ffn_norm(x_TD + self.down(self.activation(self.up(x_TD))))
        return out_TD


class Encoder(nn.Module):
    """From token ids to hidden states at `batch.logits_at`."""

    def __init__(self, facts: ModelFacts, build: Build) -> None:
        super().__init__()
        encoder = encoder_of(facts)
        self.first_position = encoder.first_position
        self.embed = VocabEmbedding(facts.vocab, facts.hidden, build)
        self.positions = Table(encoder.num_positions, facts.hidden, build)
        self.segments = Table(encoder.num_segments, facts.hidden, build)
        self.norm = LayerNorm(facts.hidden, encoder.norm_eps, build)
        self.layers = nn.ModuleList(Block(facts, layer, build) for layer in range(facts.num_layers))

    def forward(self, batch: Batch) -> Tensor:
        x_TD: Tensor = self.embed(batch) + self.positions(batch.positions_T + self.first_position)
        if batch.segments_T is None or len(self.segments.weight) == 1:
            x_TD = x_TD + self.segments.weight[0]
        else:
            x_TD = x_TD + self.segments(batch.segments_T)
        x_TD = self.norm(x_TD)
        for block in self.layers:
            x_TD = block(x_TD, batch)
        return x_TD if batch.logits_at is None else x_TD.index_select(0, batch.logits_at)


class Classifier(nn.Module):
    """The first token's state through a tanh layer, then a score for each label."""

    def __init__(self, facts: ModelFacts, num_labels: int, build: Build) -> None:
        super().__init__()
        self.pooler = ReplicatedLinear(facts.hidden, facts.hidden, build, bias=True)
        self.classifier = ReplicatedLinear(facts.hidden, num_labels, build, bias=True)

    def forward(self, pooled_RD: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.pooler(pooled_RD)))  # type: ignore[no-any-return]


class MaskedLM(nn.Module):
    """Hidden states -> logits of the vocabulary, over the embedding's own matrix where the model ties them."""

    def __init__(self, facts: ModelFacts, embed: VocabEmbedding, build: Build) -> None:
        super().__init__()
        encoder = encoder_of(facts)
        self.dense = ReplicatedLinear(facts.hidden, facts.hidden, build, bias=True)
        self.activation = ACTIVATIONS[encoder.activation]
        self.norm = LayerNorm(facts.hidden, encoder.norm_eps, build)
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
            why=f"model_type is {facts.model_type!r}",
            fix="check config.json",
        )
    return facts.encoder
