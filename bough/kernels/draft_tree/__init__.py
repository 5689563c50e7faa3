"""Drafts that form a tree: where its nodes stand, what they see, and which of its paths the model has taken.

in: the slots' trees, the step's arrays, drawn tokens. out: positions and masks before the step; after it the path that was
taken, and the KV along it put together. never: logits, or how a tree is grown.

A row's query tokens are the *root*, its newest token, and *nodes*, each of which follows the root or a node before it. Their
KV lies in this order behind the row's, whatever their depth. At each of them the model draws with the noise of its depth;
the row goes on to the child that is what was drawn, and ends where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bough.kernels.choices import standard
from bough.kernels.step_end import SampleInputs
from bough.kernels.step_start import SlotState, StepInputs

_IMPLEMENTATIONS = standard(__name__)


@dataclass(slots=True)
class TreeStep:
    """A step whose rows have trees of drafts."""

    seen_T: Tensor
    """int64, a bit for each query token of the row: which of them each sees. 0 for tokens of rows without a tree."""
    tail_T: Tensor
    """int32: every token sees the KV tokens before this one, and of those from it on the ones of `seen_T`."""
    positions_T: Tensor
    """int64: what positions would be if each node followed the one before it..."""
    counter_L: Tensor
    """int64: ...and the counters of samples."""


@dataclass(slots=True)
class TreePath:
    """What became of the trees."""

    result: Tensor
    """int64 [rows, 1 + width], as `step_end.verify` gives it."""
    from_L: Tensor
    """int64: the sample whose place each one takes on its row's path; itself where there is no path."""
    from_T: Tensor
    """int64: the same of tokens."""
    root_R: Tensor
    """int64: the first query token of each row..."""
    places_RW: Tensor
    """int64 [rows, width]: ...and the nodes on its path, from the root on; the first ones of `result` count."""


def start_tree(state: SlotState, inputs: StepInputs, sample_at_L: Tensor) -> TreeStep:
    """To be called behind `start_step`: moves the nodes of derived rows, and what is sampled behind them, to their depth."""
    made: TreeStep = _IMPLEMENTATIONS.pick("start_tree", inputs.ids_T.device)(state, inputs, sample_at_L)
    return made


def walk_tree(
    state: SlotState,
    inputs: SampleInputs,
    tree: TreeStep,
    drawn_L: Tensor,
    num_rows: int,
    width: int,
    blocked_L: Tensor | None = None,
) -> TreePath:
    """As `step_end.verify`, for rows whose drafts are trees at most `width` - 1 deep."""
    made: TreePath = _IMPLEMENTATIONS.pick("walk_tree", drawn_L.device)(
        state, inputs, tree, drawn_L, num_rows, width, blocked_L
    )
    return made


def gather_path(caches: Sequence[Tensor], loc_T: Tensor, path: TreePath) -> None:
    """Puts the KV along each row's path together: in each cache, [pages, page size, ...], a token's goes to where the path
    has it."""
    _IMPLEMENTATIONS.pick("gather_path", loc_T.device)(caches, loc_T, path)
