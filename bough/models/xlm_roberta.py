"""RoBERTa and XLM-RoBERTa: BERT's encoder with positions counted from the padding id on, and heads of their own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.bert import body_rules, read_encoder
from bough.weights.mapping import Ignore, Rename

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build


def read(config: Fields) -> ModelFacts:
    padding = config.any("pad_token_id")
    return read_encoder(config, first_position=(1 if padding is None else int(padding)) + 1)


BODY: Final = (*body_rules(""), *body_rules("roberta."))
NO_POOLER: Final = (Ignore("pooler.dense"), Ignore("roberta.pooler.dense"))
NO_HEAD: Final = (
    Ignore("lm_head"),
    Ignore("lm_head.dense"),
    Ignore("lm_head.layer_norm"),
    Ignore("lm_head.decoder"),
    Ignore("classifier.dense"),
    Ignore("classifier.out_proj"),
)
EMBEDDER: Final = (*BODY, *NO_POOLER, *NO_HEAD)
CLASSIFIER: Final = (
    *BODY,
    *NO_POOLER,
    Rename("classifier.dense", "head.dense"),
    Rename("classifier.out_proj", "head.out"),
)
MASKED_LM: Final = (
    *BODY,
    *NO_POOLER,
    Rename("lm_head.dense", "head.dense"),
    Rename("lm_head.layer_norm", "head.norm"),
    Rename("lm_head.decoder", "head.decoder"),
    Rename("lm_head", "head"),
)


def make_classifier(facts: ModelFacts, num_labels: int, build: Build) -> nn.Module:
    """From pooled states to a score for each label."""
    from bough.models.encoder import RobertaClassifier

    return RobertaClassifier(facts, num_labels, build)
