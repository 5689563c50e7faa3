"""Drafts of networks that know only a part of the target's vocabulary."""

from __future__ import annotations

from torch import Tensor

from bough.runner.proposing import Drafting, SomeTokens


def draw_among(step: Drafting, logits_RV: Tensor, place: int, ids_V: Tensor | None, vocab: int) -> Tensor:
    """int64 [R]: tokens of the target's vocabulary, which has `vocab` tokens; `ids_V` are those that logits stand for.

    Noise goes by the target's ids.
    """
    return step.draw(logits_RV, place, None if ids_V is None else SomeTokens(ids_V, vocab))
