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
from bough.core.step import I32, SlotSetup, Step


@dataclass(slots=True)
class PlainRows:
    """Parameters of the sampling rows of a step, in row order. `greedy`: every row takes the best token."""

    rows: I32
    """Indices into the step's rows."""
    slots: I32
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top_k: I32
    seed: npt.NDArray[np.int64]
    counter: npt.NDArray[np.int64]
    greedy: bool
    rich: I32
    """Positions within `rows` whose slots are rich."""


class SlotParams:
    """Host arrays by slot; one extra slot at the end serves padded rows and is always greedy."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        n = num_slots + 1
        self.temperature = np.zeros(n, np.float32)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.top_k = np.full(n, vocab_size, np.int32)
        self.seed = np.zeros(n, np.int64)
        self.counter = np.zeros(n, np.int64)
        """Output tokens drawn so far: the position in the row's own stream of random numbers."""
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
        rows = np.flatnonzero(step.samples).astype(np.int32)
        slots = step.slots[rows]
        temperature = self.temperature[slots]
        counter = self.counter[slots]
        self.counter[slots] = counter + 1
        return PlainRows(
            rows=rows,
            slots=slots,
            temperature=temperature,
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            top_k=self.top_k[slots],
            seed=self.seed[slots],
            counter=counter,
            greedy=not temperature.any(),
            rich=np.flatnonzero(self.rich[slots]).astype(np.int32),
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
