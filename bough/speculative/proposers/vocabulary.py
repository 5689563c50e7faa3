"""Drafts of networks that know only a part of the target's vocabulary."""

from __future__ import annotations

from torch import Tensor

from bough.runner.proposing import Drafting


def draw_among(step: Drafting, logits_RV: Tensor, place: int, ids_V: Tensor | None, vocab: int) -> Tensor:
    """int64 [R]: tokens of the target's vocabulary, which has `vocab` tokens; `ids_V` are those that logits stand for.

    Noise goes by the target's ids, so logits are spread over them where noise counts.
    """
    if ids_V is None:
        return step.draw(logits_RV, place)
    if step.bounds.greedy:
        return ids_V[step.draw(logits_RV, place)]
    spread = logits_RV.new_full((len(logits_RV), vocab), float("-inf"))
    spread[:, ids_V] = logits_RV
    return step.draw(spread, place)
