"""RoBERTa and XLM-RoBERTa: BERT's encoder with positions counted from the padding id on, and heads of their own names.

R texts, D width.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from bough.config.model_facts import ModelFacts
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.models.bert import body_rules
from bough.weights.mapping import Ignore, Rename

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


class Classifier(nn.Module):
    """The first token's state through a tanh layer, then a score for each label."""

    def __init__(self, facts: ModelFacts, num_labels: int, build: Build) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(facts.hidden, facts.hidden, build, bias=True)
        self.out = ReplicatedLinear(facts.hidden, num_labels, build, bias=True)

    def forward(self, pooled_RD: Tensor) -> Tensor:
        return self.out(torch.tanh(self.dense(pooled_RD)))  # type: ignore[no-any-return]
