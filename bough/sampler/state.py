"""Sampling parameters by slot, on the host, and the packed rows a step samples with.

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
class PlainRows:
    """Parameters of the sampling rows of a step, in row order."""

    rows: I64
    """Indices into the step's rows."""
    slots: I32
    floats: npt.NDArray[np.float32]
    """[3, rows]: temperature, top_p, min_p"""
    longs: I64
    """[3, rows]: top_k, seed, counter"""
    rich: I64
    """Positions within `rows` whose slots are rich."""

    @property
    def counter(self) -> I64:
        """Tokens that each row has drawn before this step."""
        counter: I64 = self.longs[2]
        return counter


_NONE: I64 = np.empty(0, np.int64)


class SlotParams:
    """Host arrays by slot; one extra slot at the end serves padded rows and is always greedy."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        n = num_slots + 1
        self._floats = np.zeros((3, n), np.float32)
        self._longs = np.zeros((3, n), np.int64)
        self.temperature, self.top_p, self.min_p = self._floats
        self.top_k, self.seed, self.counter = self._longs
        """`counter`: output tokens drawn so far, which is the position in the row's own stream of random numbers."""
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
        self.counter[slot] = setup.num_output
        rich = is_rich(params, setup.logprobs, setup.hidden_states)
        self.rich[slot] = rich
        if rich:
            self.setups[slot] = setup
        else:
            self.setups.pop(slot, None)

    def gather(self, step: Step) -> PlainRows:
        """The sampling rows of a step, and advances their streams by one draw."""
        rows = step.samples.nonzero()[0]
        slots = step.slots.take(rows)
        longs = self._longs.take(slots, axis=1)
        self.counter[slots] = longs[2] + 1
        return PlainRows(
            rows=rows,
            slots=slots,
            floats=self._floats.take(slots, axis=1),
            longs=longs,
            rich=self.rich.take(slots).nonzero()[0] if self.setups else _NONE,
        )


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
