"""Trees of drafts, grown as EAGLE-2 grows them: from the likeliest nodes of each generation on, and of all of these the
likeliest are kept.

R rows, K children of a node and nodes of a generation that go on, N nodes that are kept, C nodes that were looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bough.runner.proposing import TreeDrafts

_STEP_DOWN = 1e-4
"""A node's score is at least this much less than its parent's, so that parents always come first."""


class TreeShape(NamedTuple):
    """How a tree grows."""

    steps: int
    """Generations."""
    topk: int

    @property
    def looked_at(self) -> int:
        """C: nodes that there are to choose from."""
        return self.topk + (self.steps - 1) * self.topk**2


class Frontier(NamedTuple):
    """The nodes of a generation that go on. [R, K] each."""

    tokens: Tensor
    """int64, of the target's vocabulary."""
    seen: Tensor
    """int64 bits of the nodes that went on in their generations, K each: those on the way to each, and itself."""
    parent: Tensor
    """int64: which of the generation before each follows."""
    number: int
    """Of the generation, from 0."""


class _Grown(NamedTuple):
    """A generation: scores, tokens and parents (among all nodes looked at, -1: the root) of its nodes, [R, nodes] each."""

    scores: Tensor
    tokens: Tensor
    parents: Tensor


def grow_tree(
    first_RV: Tensor,
    expand: Callable[[Frontier], Tensor],
    shape: TreeShape,
    count: int,
    ids_V: Tensor | None,
) -> TreeDrafts:
    """A tree of the `count` likeliest nodes. `first_RV`: logits behind the root. `expand`: gives logits [R, K, V] behind the
    nodes of a generation. `ids_V`: the target's tokens that logits stand for; None: all."""
    topk = shape.topk
    scores_RK, tokens_RK = _children(first_RV, topk, ids_V)
    scores_RK = scores_RK - _STEP_DOWN
    num_rows, device = len(first_RV), first_RV.device
    generations = [_Grown(scores_RK, tokens_RK, torch.full_like(tokens_RK, -1))]
    places = torch.arange(topk, device=device).expand(num_rows, -1)
    at_RK = places
    """Of the nodes that go on: their place among all that were looked at."""
    frontier = Frontier(tokens_RK, 1 << places, places, 0)
    begin = topk
    for step in range(1, shape.steps):
        more_RKK, children_RKK = _children(expand(frontier), topk, ids_V)
        grown = (scores_RK[..., None] + more_RKK - _STEP_DOWN).flatten(1)
        tokens = children_RKK.flatten(1)
        generations.append(_Grown(grown, tokens, at_RK.repeat_interleave(topk, 1)))
        scores_RK, chosen = grown.topk(topk, 1)
        parent = chosen // topk
        bits = 1 << (places + step * topk).clamp_max(63)
        seen = frontier.seen.gather(1, parent) | bits
        frontier = Frontier(tokens.gather(1, chosen), seen, parent, step)
        at_RK = chosen + begin
        begin += topk * topk
    return _best(generations, shape, count)


def _children(logits: Tensor, topk: int, ids_V: Tensor | None) -> tuple[Tensor, Tensor]:
    """[..., K]: log-probabilities and tokens of the likeliest."""
    best, at = logits.float().topk(topk, -1)
    total = torch.logsumexp(logits.float(), -1, keepdim=True)
    return best - total, at if ids_V is None else ids_V[at]


def _best(generations: list[_Grown], shape: TreeShape, count: int) -> TreeDrafts:
    scores, tokens, parents = (torch.cat(part, 1) for part in zip(*generations, strict=True))
    depth = torch.cat([torch.full_like(each.tokens, number) for number, each in enumerate(generations, 1)], 1)
    _, kept = scores.topk(count, 1)
    num_rows, device = len(kept), kept.device
    place_of = torch.full_like(tokens, -1).scatter_(1, kept, torch.arange(count, device=device).expand(num_rows, -1))
    parent = parents.gather(1, kept)
    # A parent is likelier than its child, so it was kept.
    parent = torch.where(parent < 0, 0, place_of.gather(1, parent.clamp_min(0)) + 1)
    node = torch.arange(1, count + 1, device=device)
    seen = (1 << node).expand(num_rows, -1) | 1
    above = parent
    for _ in range(shape.steps - 1):
        seen = seen | (1 << above)
        above = torch.where(above > 0, parent.gather(1, (above - 1).clamp_min(0)), 0)
    return TreeDrafts(tokens.gather(1, kept), parent, depth.gather(1, kept), seen)
