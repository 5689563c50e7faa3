"""Heads that draft from the target's states, one token after the other: EAGLE, EAGLE-2, EAGLE-3, and the layers that
checkpoints bring along (NextN).

A head's KV of a token is made from the target's state there and from the token that follows: the last one of a row is known
when the step's tokens have been drawn. It lies at the token's own place in the pages, so that a cached prefix has it, too.
Where a prefix is shared up to a page's last token exactly, that token's entry is of whatever followed it first: one entry
that is a little off, and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bough.layers.draft_heads import Made, StateHead
from bough.runner.proposing import Drafting, Reads, TreeDrafts
from bough.speculative.proposers.tree import Frontier, TreeShape, grow_tree
from bough.speculative.proposers.vocabulary import draw_among


class HeadProposer:
    """Drives one `StateHead`, whose own results take the place of the target's states, or several, each of which reads the
    results of the one before it."""

    def __init__(
        self, heads: Sequence[StateHead], taps: Sequence[int], vocab: int, shape: TreeShape | None = None
    ) -> None:
        """`taps`: as in `DraftFacts`; without any it reads the states after the final norm. `vocab`: the target's. `shape`:
        of trees; None: each draft follows the one before it."""
        self.heads = list(heads)
        self.taps = tuple(taps)
        self._shape = shape
        self.num_layers = sum(head.num_layers for head in heads)
        self.reads = Reads(tuple(sorted(set(taps))), hidden=not taps)
        self._order = [self.reads.layers.index(layer) for layer in taps]
        self._vocab = vocab

    def propose(self, step: Drafting) -> list[Tensor] | TreeDrafts:
        states = [step.states[place] for place in self._order] or [step.hidden_TD]
        features_TD = self.heads[0].features(states)
        if len(self.heads) > 1:
            return self._in_turn(step, features_TD)
        (head,) = self.heads
        following = step.following_ids()
        made = head.run(following, features_TD, step.whole(following, head.last_layer))
        if self._shape is not None and step.count:
            return self._tree(step, head, made, self._shape)
        return self._chain(step, head, made)

    def _tree(self, step: Drafting, head: StateHead, root: Made, shape: TreeShape) -> TreeDrafts:
        num_rows, topk = len(root.ready), shape.topk
        states_RKD = root.carried[:, None].expand(-1, topk, -1)

        def expand(frontier: Frontier) -> Tensor:
            nonlocal states_RKD
            generation = frontier.number
            if generation:
                states_RKD = states_RKD.gather(1, frontier.parent[..., None].expand(-1, -1, states_RKD.shape[2]))
            batch = step.frontier(frontier.tokens, frontier.seen, generation, generation)
            made = head.run(batch.ids_T, states_RKD.flatten(0, 1), batch)
            states_RKD = made.carried.view(num_rows, topk, -1)
            return head.logits(made.ready).view(num_rows, topk, -1)

        return grow_tree(head.logits(root.ready), expand, shape, step.count, head.target_ids_V)

    def _chain(self, step: Drafting, head: StateHead, made: Made) -> list[Tensor]:
        drafts: list[Tensor] = []
        for place in range(step.count):
            if place:
                made = head.run(drafts[-1], made.carried, step.behind(drafts[-1], place - 1))
            drafts.append(draw_among(step, head.logits(made.ready), place, head.target_ids_V, self._vocab))
        return drafts

    def _in_turn(self, step: Drafting, states_TD: Tensor) -> list[Tensor]:
        """Head k reads, at each token, the token k + 1 behind it; where that is not known, a draft."""
        drafts: list[Tensor] = []
        ids_T = step.following_ids()
        for place, head in enumerate(self.heads):
            states_TD, ready_TD = head.run(ids_T, states_TD, step.whole(ids_T, None))
            if place < step.count:
                logits_RV = head.logits(ready_TD[step.rows.at_R])
                drafts.append(draw_among(step, logits_RV, place, head.target_ids_V, self._vocab))
            if place + 1 < len(self.heads):
                ids_T = step.moved_on(ids_T, drafts[place] if place < len(drafts) else step.rows.last_R)
        return drafts
