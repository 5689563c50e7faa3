"""The interface between planning and speculative decoding: how many drafts a row gets, and which.

`bough.speculative` implements it. Planning knows bounds, memory and tokens; it does not know how drafts are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from bough.core.step import I32, I64, Bool

if TYPE_CHECKING:
    from bough.scheduler.queues import Job, Queues


NUM_DRAFT_POSITIONS = 16
"""Number of draft positions for which accepted drafts are counted separately."""


MOST_DRAFTS = 63
"""Of a row in one step."""


class Offer(Struct):
    """Drafts for the decode rows of a step; at least one row has some."""

    counts: I32
    """Per row."""
    tokens: I32
    """Row after row: token ids, or `core.step.FIRST_DRAFT - i` for what the device has."""


class Drafter(Protocol):
    """Decides about drafts, and learns from how many were accepted. `waits` and `offer` change nothing that counts."""

    @property
    def is_resting(self) -> bool:
        """Steps are planned as if there were no drafter: it is neither asked for drafts, nor for proposals. That does not
        change while a step is planned."""
        ...

    def waits(self, queues: Queues, slots: I64) -> Bool:
        """Which of these rows, all of them in a step in flight, should sit this step out, because their drafts can be made
        only when that step has settled."""
        ...

    def offer(self, queues: Queues, slots: I64, most: I32, num_tokens: int) -> Offer | None:
        """Drafts for the rows of a step: at most `most[row]` each, and `num_tokens` in all. None: drafting does not
        pay."""
        ...

    def proposals(self, num_rows: int, *, prompts: bool) -> int:
        """Drafts that the proposer on the device leaves for each row of a step in which `num_rows` rows decode;
        `core.step.NO_PROPOSER`: it does not run, or there is none. `prompts`: the step may have parts of prompts."""
        ...

    def reach(self, proposals: int) -> int:
        """KV tokens behind a row's own that the proposer writes while it makes these drafts. Without pages for them its
        drafts are less often right."""
        ...

    def begin(self, slot: int, job: Job) -> None:
        """Called when a request gets the slot."""
        ...

    def learn(self, queues: Queues, slots: I64, drafts: I32, accepted: I32) -> None:
        """Called when a step in which these rows decoded has settled: per row, the number of its drafts and of those
        accepted. Their tokens are in the history."""
        ...

    def timed(self, num_rows: int, num_tokens: int, ms: float, proposals: int) -> None:
        """Records the duration of a step with decode rows only that left `proposals` drafts."""
        ...

    def prompts_timed(self, ms: float, proposals: int) -> None:
        """Records the duration of a step with prompt chunks that left `proposals` drafts."""
        ...

    def forget(self, queues: Queues, slot: int, job: Job, *, has_ended: bool) -> None:
        """Called when the request loses the slot: it has ended, or was retracted."""
        ...
