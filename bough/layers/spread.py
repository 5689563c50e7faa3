"""Tokens that ranks of a stage hold for themselves, and feed-forward blocks that are split over all of them.

With replicas of attention each rank holds the tokens of its own requests. Weights of feed-forward blocks are split over all
ranks of the stage, so that a block first gathers the tokens of all replicas, and hands each its own results.

T tokens of this rank, N gathered tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from bough.distributed.mesh import Axis, Mesh

Partial = Callable[[Tensor], Tensor]
"""This rank's share of a sum: [N, D] -> [N, D]."""


class TokenSpread:
    """How the tokens of a step lie on the ranks, agreed before the step. All ranks bring equally many rows: those that have
    fewer tokens add zeros."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.rows = 0
        """Tokens that each rank brings."""
        self._owners, self._sharers = mesh.tokens, mesh.heads
        self.blocks: list[Callable[[Tensor], Tensor]] = []
        """The feed-forward blocks of the stage, in their order..."""
        self.passed = 0
        """...and how many of them this step has passed."""
        self.within = False
        """A block's exchange has begun and not ended."""
        self.blank_1D: Tensor | None = None
        """A token of zeros; the model brings it."""

    @property
    def owners(self) -> Axis:
        """Ranks that hold different tokens..."""
        return self._owners

    @property
    def sharers(self) -> Axis:
        """...and ranks that hold the same."""
        return self._sharers

    def begin(self, rows: int, *, alike: bool = False) -> None:
        """Before a step: what was agreed. `alike`: ranks on the axis `cp` hold the same tokens in it."""
        self.rows = rows
        self.passed, self.within = 0, False
        self._owners = self._mesh.dp if alike else self._mesh.tokens
        self._sharers = self._mesh.replica if alike else self._mesh.heads

    def gather(self, x: Tensor) -> Tensor:
        """[T, ...] of each owner -> [N, ...] of all: `rows` of each, zeros where it has fewer."""
        self.within = True
        short = self.rows - len(x)
        assert short >= 0, f"{len(x)} tokens, {self.rows} were agreed on"
        padded = F.pad(x, (0,) * (2 * x.dim() - 2) + (0, short)) if short else x
        return self.owners.talk.all_gather(padded).flatten(0, 1)

    def own(self, x_N: Tensor, num_tokens: int) -> Tensor:
        """This rank's tokens among those of all."""
        first = self.owners.rank * self.rows
        return x_N[first : first + num_tokens]

    def reduce(self, part_ND: Tensor, num_tokens: int) -> Tensor:
        """[T, D]: the sum over all ranks of the stage, for this rank's tokens."""
        parts = part_ND.view(self.owners.size, self.rows, *part_ND.shape[1:])
        mine = self.owners.talk.reduce_scatter(parts)
        return self.done(self.sharers.talk.all_reduce(mine)[:num_tokens])

    def done(self, out: Tensor) -> Tensor:
        """A block has ended with this result."""
        self.passed, self.within = self.passed + 1, False
        return out

    def through(self, x_TD: Tensor, compute: Partial) -> Tensor:
        """What a block adds to this rank's tokens; `compute` gives its share of the sum for all."""
        return self.reduce(compute(self.gather(x_TD)), len(x_TD))

    def join_rest(self) -> bool:
        """After this rank's step has failed: takes part in what the other ranks still do together, with zeros. False: it
        failed in the middle of an exchange, and the others can't be helped."""
        if self.within or self.blank_1D is None:
            return False
        for block in self.blocks[self.passed :]:
            block(self.blank_1D)
        return True
