"""What the deciding half hands to the computing half: one step of the model over many rows, as plain arrays.

Rows are requests. A row brings `num_query[row]` tokens into the step on top of `context[row]` tokens whose KV is already
in its pages, and yields a token if `samples[row]`. Decode rows come first. What a row needs on the device lives by *slot*:
the page table's line, the last sampled token, the sampling parameters. A slot is set up once (`SlotSetup`) and then only
advanced, so that a decode step of a thousand rows carries arrays and no objects.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Mask = npt.NDArray[np.int32]
"""Vocabulary bit masks, [rows, ceil(vocab / 32)]; a set bit allows the token."""

FROM_DEVICE = -1
"""In `Step.tokens`: the token that the slot's row sampled last, which the host may not have seen yet."""


def _no_rows() -> I32:
    return np.empty(0, np.int32)


class SlotSetup(Struct, kw_only=True):
    """Fills a slot before the step's forward pass."""

    slot: int
    sampling: SamplingParams
    eos_ids: tuple[int, ...] = ()
    """Masked until `min_new_tokens` are out."""
    prompt: I32 | None = None
    """Prompt ids, only if a repetition penalty needs them."""
    output: I32 | None = None
    """Output ids so far, only if penalties or bad words need them (a request re-entering after retraction)."""
    num_output: int = 0
    """How many output tokens the request had already: a seeded row continues its own stream of draws."""
    rng_seed: int = 0
    """The seed to draw with: the request's own or one made for it."""
    logprobs: LogprobSpec | None = None
    hidden_states: str = ""
    second_at: int = 0
    """Pooling models: where a pair's second text begins; 0: there is one text."""


class SharedSpans(Struct, kw_only=True):
    """Decode rows that read the same KV: disjoint sets of rows, one leading span of tokens each.

    `rows[start[g]:start[g + 1]]` are the rows of group g; the first `num_tokens[g]` KV tokens (a multiple of the page size)
    of each of them lie in the same pages, those of the group's first row's table.
    """

    rows: I32
    start: I32
    num_tokens: I32


class KVMoves(Struct, kw_only=True):
    """KV of single tokens, copied to other places and turned to other positions, in every layer.

    Places are `page * page_size + offset`. All sources are read before the first target is written.
    """

    source: I64
    target: I64
    turn: I32
    """How many positions further each token stands at its target; its key is rotated by as many."""


class Step(Struct, kw_only=True):
    """One launch. Arrays are owned by the step: nobody changes them after `commit`."""

    index: int
    num_decodes: int
    slots: I32
    num_query: I32
    context: I32
    samples: Bool
    tokens: I32
    """Input ids of all rows, concatenated; `FROM_DEVICE` where the slot's last sample is the input."""
    table_at: I64
    """Page-table writes, made before the forward pass: flat positions `slot * pages_per_slot + i`..."""
    table_pages: I32
    """...and the pages that go there."""
    moves: list[KVMoves] = []
    """Token-wise KV copies, one after the other, made before everything else."""
    copy_from: I32 = _no_rows()
    copy_to: I32 = _no_rows()
    """Page-to-page KV copies, made before the forward pass."""
    setups: list[SlotSetup] = []
    constrained: I32 = _no_rows()
    """Rows whose sample needs a grammar mask, given to `Launched.sample`."""
    prompt_logprobs: I32 = _no_rows()
    """Rows of prefill chunks whose input tokens are scored (from the slot's `LogprobSpec.start` on)."""
    following: I32 = _no_rows()
    """For each row of `prompt_logprobs`: the prompt token after its chunk, which its last position scores; -1: none."""
    shared: SharedSpans | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class LogprobArrays(Struct, kw_only=True):
    """Scores of `len(row)` positions. Widths are the largest asked for in the step; unused places hold id -1."""

    row: I32
    token_ids: I32
    logprobs: F32
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    chosen_logprobs: npt.NDArray[np.float32]
    """[positions, widest LogprobSpec.token_ids]"""


class Outcome(Struct, kw_only=True):
    """What a step produced, on the host. Row i yielded `tokens[i, :counts[i]]`."""

    tokens: I32
    """[rows, most tokens a row yielded]"""
    counts: I32
    output_logprobs: LogprobArrays | None = None
    prompt_logprobs: LogprobArrays | None = None
    """Position p of a row's chunk scores token p + 1 of its prompt; the last position of the last chunk is an output's."""
    hidden_states: dict[int, npt.NDArray[np.float32]] = {}
    """Row -> [tokens, width], for rows that asked."""
    embeddings: dict[int, npt.NDArray[np.float32]] = {}
    """Row -> pooled result, for pooling models."""
    failed: dict[int, str] = {}
    """Row -> why its result can't be used (say, logits that are not finite)."""
    barred: tuple[int, ...] = ()
    """Rows whose request forbids every token that its `allowed_token_ids` allow: what was drawn for them means nothing."""


class Launched(Protocol):
    """A step whose device work is queued."""

    @property
    def step(self) -> Step: ...

    @property
    def needs_masks(self) -> bool:
        """True until `sample` was called, if the step has constrained rows."""
        ...

    def sample(self, masks: Mask) -> None:
        """Queues sampling with `masks[i]` applied to row `step.constrained[i]`. Waits for nothing."""
        ...

    def wait(self) -> Outcome:
        """Waits for the device and returns what the step produced. The only call that waits."""
        ...


class Runner(Protocol):
    """Runs steps in order."""

    def launch(self, step: Step) -> Launched:
        """Queues the step's device work and returns at once."""
        ...

    def clear(self) -> None:
        """Waits for everything queued; called when the engine idles or ends."""
        ...


class RunnerLimits(Struct, frozen=True, kw_only=True):
    """What the computing half can hold; the deciding half plans within it."""

    num_slots: int
    """Rows that can be live at once (running requests)."""
    num_pages: int
    """KV pages, all of them free at the start. Page 0 is kept by the runner for padded rows and is never handed out."""
    page_size: int
    pages_per_slot: int
    """Width of the page table: `ceil(context_length / page_size)`."""
    context_length: int
    max_step_tokens: int
    """Largest `Step.num_tokens`."""
    vocab_size: int
