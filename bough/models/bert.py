"""BERT and the encoders trained in its shape: learned positions and segments, norms after each half of a block, every token
seeing every other. Its modules are in `models/encoder.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bough.config import reading
from bough.config.encoder_facts import EncoderFacts
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, NormFacts
from bough.core.errors import UnsupportedModel
from bough.weights.mapping import Fuse, Ignore, Rename, Rule

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build


def read(config: Fields) -> ModelFacts:
    return read_encoder(config, first_position=0)


def read_encoder(config: Fields, *, first_position: int) -> ModelFacts:
    """`first_position`: the row of the position table that a text's first token takes.

    Raises `UnsupportedModel` for variants that can't be computed.
    """
    kind = config.any("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise UnsupportedModel(
            what=f"the model's positions are {kind!r}",
            why="of this family only absolute positions can be computed",
            fix="choose a checkpoint with absolute positions",
        )
    encoder = EncoderFacts(
        num_positions=config.count("max_position_embeddings", default=512),
        first_position=first_position,
        num_segments=config.count("type_vocab_size", default=2),
    )
    ropes = (None,) * reading.num_layers(config)
    attention = reading.gqa(config, ropes=ropes, causal=False, qkv_bias=True, out_bias=True)
    ffn = reading.dense(config, default="gelu", gated=False, bias=True)
    return reading.decoder(
        config,
        attention,
        [ffn] * len(ropes),
        norm=NormFacts(eps=config.number("layer_norm_eps", default=1e-12), kind="layer", bias=True),
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        max_context=encoder.max_context,
        encoder=encoder,
    )


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
            "body.layers.*.attn.qkv",
            q=f"{layer}.attention.self.query",
            k=f"{layer}.attention.self.key",
            v=f"{layer}.attention.self.value",
        ),
        Rename(f"{layer}.attention.output.dense", "body.layers.*.attn.out"),
        Rename(f"{layer}.attention.output.LayerNorm", "body.layers.*.attn_norm"),
        Rename(f"{layer}.intermediate.dense", "body.layers.*.mlp.up"),
        Rename(f"{layer}.output.dense", "body.layers.*.mlp.down"),
        Rename(f"{layer}.output.LayerNorm", "body.layers.*.mlp_norm"),
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


def make_classifier(facts: ModelFacts, num_labels: int, build: Build) -> nn.Module:
    """From pooled states to a score for each label."""
    from bough.models.encoder import BertClassifier

    return BertClassifier(facts, num_labels, build)
