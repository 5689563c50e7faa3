"""Steps that mean nothing, run before the first request: kernels of steps that have no graph are built or loaded by then."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from bough.core.sampling import SamplingParams
from bough.core.step import FIRST_DRAFT, FROM_DEVICE, I32, NO_PROPOSER, RunnerLimits, SlotSetup, Step

_MIXTURES = (
    # (query tokens, context) of each row
    ((1, 64), (90, 0), (1000, 64)),
    ((90, 0), (1000, 64)),
    ((90, 0), (500, 64)),
)
"""Decodes beside prompts and prompts alone, in steps of more tokens than graphs are for."""
_NONE: I32 = np.empty(0, np.int32)


def rehearsals(limits: RunnerLimits) -> Iterator[Step]:
    """Steps within the limits, for a runner not in use yet. Their rows have no pages: what they write goes to page 0, which
    no request reads."""
    kinds = [_NONE] if not limits.num_adapters else [_NONE, np.ones(1, np.int32)]
    for mixture, adapter in product(_MIXTURES, kinds):
        rows = [row for row in mixture if sum(row) <= limits.context_length][: limits.num_slots]
        query = np.array([row[0] for row in rows], np.int32)
        if not rows or query.sum() > limits.max_step_tokens:
            continue
        yield Step(
            index=-1,
            num_decodes=int(np.count_nonzero(query == 1)),
            slots=np.arange(len(rows), dtype=np.int32),
            num_query=query,
            context=np.array([row[1] for row in rows], np.int32),
            samples=np.ones(len(rows), np.bool_),
            tokens=np.zeros(query.sum(), np.int32),
            table_at=np.empty(0, np.int64),
            table_pages=np.empty(0, np.int32),
            copy_from=np.zeros(1, np.int32),
            copy_to=np.ones(1, np.int32) * (limits.num_pages - 1),
            adapters=adapter.repeat(len(rows)),
            setups=[SlotSetup(slot=slot, sampling=SamplingParams(temperature=0.0)) for slot in range(len(rows))],
        )


def drafting_row(length: int) -> Step:
    """A prompt in the first slot, for `drafting_step`s behind it. As in `rehearsals`, it has no pages."""
    return Step(
        index=-1,
        num_decodes=0,
        slots=np.zeros(1, np.int32),
        num_query=np.array([length], np.int32),
        context=np.zeros(1, np.int32),
        samples=np.ones(1, np.bool_),
        tokens=np.zeros(length, np.int32),
        table_at=np.empty(0, np.int64),
        table_pages=np.empty(0, np.int32),
        setups=[SlotSetup(slot=0, sampling=SamplingParams(temperature=0.0))],
    )


def drafting_step(proposals: int, context: int) -> Step:
    """The row of `drafting_row` decodes: `proposals` drafts are verified and as many left; `NO_PROPOSER`: a plain step.
    `context`: KV tokens before it, at most."""
    drafts = max(proposals, 0)
    step = Step(
        index=-1,
        num_decodes=1,
        slots=np.zeros(1, np.int32),
        num_query=np.array([1 + drafts], np.int32),
        context=np.array([context], np.int32),
        samples=np.ones(1, np.bool_),
        tokens=np.array([FROM_DEVICE, *(FIRST_DRAFT - place for place in range(drafts))], np.int32),
        table_at=np.empty(0, np.int64),
        table_pages=np.empty(0, np.int32),
    )
    if drafts:
        step.drafts = np.array([drafts], np.int32)
    if proposals != NO_PROPOSER:
        step.proposals = proposals
        step.room = np.array([context + 1 + 2 * drafts], np.int32)
        step.following_ids = np.zeros(1, np.int32)
    return step
