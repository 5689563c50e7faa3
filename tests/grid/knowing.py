"""Drafts of real proposers, made right here and there by somebody who knows the answers: runs and paths of every length are
accepted, not only those that random weights happen to guess."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bough.runner.proposing import Drafting, Proposer, TreeDrafts

Known = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Prompts and their answers."""


class KnowingProposer:
    """Drafts of another proposer, with some of what will be answered put in their place."""

    def __init__(self, proposer: Proposer, known: Known) -> None:
        self._inner = proposer
        self._known = known
        self.reads = proposer.reads
        self.num_layers = proposer.num_layers

    def propose(self, step: Drafting) -> list[Tensor] | TreeDrafts:
        made = self._inner.propose(step)
        rows = step.rows
        for row in range(len(rows.last_R) if step.count else 0):
            count = int(rows.counter_R[row])
            follows = self._answer(int(rows.kv_len_R[row]) + 1 - count, count, int(rows.last_R[row]))
            if isinstance(made, TreeDrafts):
                _put_into_tree(made, row, follows, count)
            else:
                for place, (draft, token) in enumerate(zip(made, follows, strict=False)):
                    if (count + place) % 4 != 3:
                        draft[row] = token
        return made

    def _answer(self, num_prompt: int, count: int, last: int) -> Sequence[int]:
        """What follows the row's `count` output tokens, the last of which is given; of several it could be, the first."""
        for prompt, answer in self._known:
            if len(prompt) == num_prompt and 0 < count <= len(answer) and answer[count - 1] == last:
                return answer[count:]
        return ()


def _put_into_tree(tree: TreeDrafts, row: int, follows: Sequence[int], salt: int) -> None:
    """Some path of the tree becomes right, for as many nodes as it has, or fewer."""
    node = 0
    for depth, token in enumerate(follows):
        children = [at + 1 for at, parent in enumerate(tree.parents[row].tolist()) if parent == node]
        if not children or (salt + depth) % 5 == 4:
            return
        said = {int(tree.tokens[row, child - 1]): child for child in children}
        node = said.get(token, children[(salt + token) % len(children)])
        tree.tokens[row, node - 1] = token
