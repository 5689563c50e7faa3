"""What a step needs before its first layer: the page table brought up to date, and the ids, positions and KV locations of
rows whose length only the device knows.

in: the step's page-table writes and arrays, and what the device keeps by slot. out: both, changed in place. never: what a
page or a token means.

The arrays of a step begin with those of decode rows. What the host does not know of them is *derived* here from the slot:
`derived` says how many leading tokens, rows and samples that are. Everything behind them is as the host wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


@dataclass(slots=True)
class DraftTrees:
    """By slot, how its drafts hang together where they form a tree: int64 [slots + 1, most drafts] each. Node n of a row is
    its draft n - 1; node 0 is its newest token, the root. A node comes behind its parent."""

    parents: Tensor
    """The node that each follows."""
    depth: Tensor
    """Nodes from the root to each: 1 for its children."""
    seen: Tensor
    """Bits: the root, the nodes on the way to each, and itself."""


@dataclass(slots=True)
class SlotState:
    """What lives on the device by slot, advanced by the sampler or the verifier. The last slot is spare, for padding."""

    tables: tuple[Tensor, ...]
    """By line of the KV cache (`core.kv`): int32 [slots + 1, pages per slot]."""
    table_entries: Tensor
    """int32: the same memory, as page-table writes count it."""
    last_token: Tensor
    """int64 [slots + 1]: the newest token of the slot's row. Its KV is not in memory yet."""
    kv_len: Tensor
    """int64 [slots + 1]: KV tokens of the row."""
    num_output: Tensor
    """int64 [slots + 1]: output tokens of the row: the number of its next draw, and of its place in its stream of noise."""
    drafts: Tensor
    """int64 [slots + 1, most drafts]: tokens that a proposer on the device expects to follow `last_token`."""
    room: Tensor
    """int64 [slots + 1]: KV tokens that the row's pages hold, for a proposer that writes beyond `kv_len`."""
    tree: DraftTrees | None = None
    """None: each draft follows the one before it."""
    odds: Tensor | None = None
    """float32 [slots + 1, most drafts, vocabulary]: what drafts were drawn with, where that is asked for; else None."""
    media_tables: tuple[Tensor, ...] = ()
    """By line of media (`core.kv`), where cross attention reads some: int32 [slots + 1, pages per slot]."""
    media_len: Tensor | None = None
    """int64 [slots + 1]: positions of the row's media there; None: the model has no cross attention."""
    turn: Tensor | None = None
    """int64 [slots + 1]: how far the row's positions stand from where its KV lies, behind media whose positions have
    several axes (`StepMedia.turns`); None: positions have one axis."""
    adapter: Tensor | None = None
    """int32 [slots + 1]: the row's adapter (`Step.adapters`); None: the model has none."""

    @staticmethod
    def make(
        num_slots: int,
        pages_per_slot: int,
        device: torch.device,
        *,
        most_drafts: int = 0,
        trees: bool = False,
        turns: bool = False,
        adapters: bool = False,
        line_parts: Sequence[int] = (1,),
        media_widths: Sequence[int] = (),
        odds: int = 0,
    ) -> SlotState:
        """`line_parts`: by line, pages of a column; a slot has `pages_per_slot` columns. `media_widths`: by line of media,
        pages of a slot. `odds`: the vocabulary, if what drafts were drawn with is kept."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((num_slots + 1, *shape), dtype=dtype, device=device)

        widths = [*(pages_per_slot * parts for parts in line_parts), *media_widths]
        entries = zeros(sum(widths), dtype=torch.int32).view(-1)
        lines = entries.split_with_sizes([(num_slots + 1) * width for width in widths])
        tables = tuple(line.view(num_slots + 1, width) for line, width in zip(lines, widths, strict=True))
        return SlotState(
            tables=tables[: len(line_parts)],
            media_tables=tables[len(line_parts) :],
            media_len=zeros() if media_widths else None,
            table_entries=entries,
            last_token=zeros(),
            kv_len=zeros(),
            num_output=zeros(),
            drafts=zeros(most_drafts),
            room=zeros(),
            tree=DraftTrees(*(zeros(most_drafts) for _ in range(3))) if trees else None,
            odds=zeros(most_drafts, odds, dtype=torch.float32) if odds else None,
            turn=zeros() if turns else None,
            adapter=zeros(dtype=torch.int32) if adapters else None,
        )

    @property
    def page_table(self) -> Tensor:
        """The first line's."""
        return self.tables[0]


class StepInputs(Protocol):
    """The arrays of a step that `start_step` reads and completes. Contiguous; int64 unless said otherwise."""

    table_at_U: Tensor
    """Page-table writes: flat places..."""
    table_pages_U: Tensor
    """...and int32 pages. A place that is written twice gets the same page both times."""
    derived: Tensor
    """int32 [3]: leading tokens, rows and samples that are derived."""
    ids_T: Tensor
    """Of derived tokens: -1 becomes the slot's last token, -2 - i its draft i."""
    positions_T: Tensor
    """Of derived tokens: the place among the row's query tokens, to which the row's KV length is added."""
    token_slots_T: Tensor
    loc_T: Tensor
    """Of derived tokens: the row's positions end here; becomes the KV location, or -1 for a position beyond that."""
    kv_len_R: Tensor
    """int32. Of derived rows: the number of query tokens, to which the row's KV length is added."""
    slots_R: Tensor
    """int32"""
    sample_slots_L: Tensor
    counter_L: Tensor
    """Of derived samples: the place among the row's samples, to which the row's output tokens are added."""


def start_step(state: SlotState, inputs: StepInputs, page_size: int) -> None:
    """Makes the page-table writes, then completes what is derived, in place. KV locations are those of the first line, of
    pages of `page_size` tokens."""
    _IMPLEMENTATIONS.pick("start_step", inputs.ids_T.device)(state, inputs, page_size)


def locate(state: SlotState, inputs: StepInputs, page_sizes: Sequence[int]) -> list[Tensor]:
    """KV locations of the step's tokens in each line but the first, of pages of `page_sizes[line]` tokens; -1 where the
    first line has it. To be called once the step has started."""
    located: list[Tensor] = _IMPLEMENTATIONS.pick("locate", inputs.ids_T.device)(state, inputs, page_sizes)
    return located
