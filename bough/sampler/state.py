"""Sampling parameters by slot, on the host, and those of what a step samples.

A slot is filled once when a request starts (or re-enters); a step then only gathers. Most rows are *plain*: temperature,
top-k, top-p, min-p and a seed say everything. What else a row may want (penalties, biases, masks, log-probabilities) makes
it *rich*, and a step with a rich row pays for it outside the captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.core.step import I32, I64, SlotSetup, Step


@dataclass(slots=True)
class Samples:
    """What a step draws, in row order: behind the last certain token of each sampling row and behind each of its drafts."""

    rows: I64
    """The sampling rows: indices into the step's rows."""
    slots: I32
    """Of each sample."""
    floats: npt.NDArray[np.float32]
    """[3, samples]: temperature, top_p, min_p"""
    longs: I64
    """[3, samples]: top_k, seed, counter. The counter of a derived sample is its place among its row's samples: how many
    tokens the row has drawn before is known to the device."""
    num_derived: int
    """Leading samples that belong to decode rows."""
    rich: I64
    """Samples whose slots are rich."""
    starts: I32 | None = None
    """[sampling rows + 1]: the first sample of each row, and their number; None: each row has one."""

    @property
    def count(self) -> int:
        return len(self.slots)

    @property
    def width(self) -> int:
        """Samples of the row that has most of them."""
        return 1 if self.starts is None else int(np.diff(self.starts).max())

    def owners(self) -> I64:
        """Of each sample: its place in `rows`."""
        count = len(self.rows)
        return np.arange(count) if self.starts is None else np.arange(count).repeat(np.diff(self.starts))

    def of_rows(self, rows: I32) -> I64:
        """The samples of some of the step's rows, which sample, row after row."""
        found = np.searchsorted(self.rows, rows)
        if self.starts is None:
            return found.astype(np.int64)
        first, count = self.starts[found], self.starts[found + 1] - self.starts[found]
        found_samples: I64 = (first - (np.cumsum(count) - count)).repeat(count) + np.arange(count.sum())
        return found_samples


_NONE: I64 = np.empty(0, np.int64)


class SlotParams:
    """Host arrays by slot; one extra slot at the end serves padded rows and is always greedy."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        n = num_slots + 1
        self._floats = np.zeros((3, n), np.float32)
        self._longs = np.zeros((3, n), np.int64)
        self.temperature, self.top_p, self.min_p = self._floats
        self.top_k, self.seed, self.num_output = self._longs
        """`num_output`: output tokens when the slot was filled; from its first sample on the device counts them."""
        self.top_p[:] = 1.0
        self.top_k[:] = vocab_size
        self.rich = np.zeros(n, np.bool_)
        self.setups: dict[int, SlotSetup] = {}
        """Rich slots only."""

    def fill(self, setup: SlotSetup) -> None:
        slot, params = setup.slot, setup.sampling
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.top_k[slot] = self.vocab_size if params.top_k < 1 else min(params.top_k, self.vocab_size)
        self.seed[slot] = setup.rng_seed
        self.num_output[slot] = setup.num_output
        rich = is_rich(params, setup.logprobs, setup.hidden_states)
        self.rich[slot] = rich
        if rich:
            self.setups[slot] = setup
        else:
            self.setups.pop(slot, None)

    def gather(self, step: Step) -> Samples:
        """The samples of a step. Decode rows come first, and all of them sample."""
        rows = step.samples.nonzero()[0]
        slots = step.slots.take(rows)
        if len(step.drafts):
            return self._with_drafts(step, rows, slots)
        longs = self._longs.take(slots, axis=1)
        longs[2, : step.num_decodes] = 0
        return Samples(
            rows=rows,
            slots=slots,
            floats=self._floats.take(slots, axis=1),
            longs=longs,
            num_derived=step.num_decodes,
            rich=self._rich_of(slots),
        )

    def _with_drafts(self, step: Step, rows: I64, slots: I32) -> Samples:
        decodes = step.num_decodes
        count = np.ones(len(rows), np.int32)
        count[:decodes] += step.drafts
        starts = np.zeros(len(rows) + 1, np.int32)
        np.add.accumulate(count, out=starts[1:])
        derived = int(starts[decodes])
        slots = slots.repeat(count)
        longs = self._longs.take(slots, axis=1)
        longs[2, :derived] = np.arange(derived) - starts[:decodes].repeat(count[:decodes])
        return Samples(
            rows=rows,
            slots=slots,
            floats=self._floats.take(slots, axis=1),
            longs=longs,
            num_derived=derived,
            rich=self._rich_of(slots),
            starts=starts,
        )

    def _rich_of(self, slots: I32) -> I64:
        return self.rich.take(slots).nonzero()[0] if self.setups else _NONE


def is_rich(params: SamplingParams, logprobs: LogprobSpec | None, hidden_states: str) -> bool:
    return (
        params.penalised
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(params.bad_words)
        or params.min_new_tokens > 0
        or params.logit_processor is not None
        or logprobs is not None
        or bool(hidden_states)
    )
