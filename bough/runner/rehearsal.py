"""Steps that mean nothing, run before the first request: kernels of steps that have no graph are built or loaded by then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from bough.core.sampling import SamplingParams
from bough.core.step import FIRST_DRAFT, FROM_DEVICE, I32, NO_PROPOSER, RunnerLimits, SharedSpans, SlotSetup, Step

_MIXTURES = (
    # (query tokens, context) of each row
    ((1, 64), (90, 0), (1000, 64)),
    ((90, 0), (1000, 64)),
    ((90, 0), (500, 64)),
)
"""Decodes beside prompts and prompts alone, in steps of more tokens than graphs are for."""
_LATER = (
    ((2048, 0),),
    ((600, 0), (600, 0), (848, 0)),
    ((128, 2048), (128, 2048), (2000, 2048)),
    ((1, 2048), (1, 2048), (17, 512), (1200, 0)),
)
"""Steps of a multiple of 16 tokens, which some kernels have a form for, rows behind a long context, and mixtures."""
_SHARING = (
    # (rows that share a span, its tokens, prompts beside them)
    (64, 2048, ((128, 2048), (700, 0))),
    (64, 2048, ((1104, 0),)),
    (8, 512, ((1500, 0),)),
)
_NONE: I32 = np.empty(0, np.int32)


def rehearsals(limits: RunnerLimits) -> Iterator[Step]:
    """Steps within the limits, for a runner not in use yet. Their rows have no pages: what they write goes to page 0, which
    no request reads."""
    kinds = [_NONE] if not limits.num_adapters else [_NONE, np.ones(1, np.int32)]
    for mixture, adapter in product(_MIXTURES, kinds):
        step = _step(limits, mixture)
        if step is not None:
            step.adapters = adapter.repeat(step.num_rows)
            yield step


def later_rehearsals(limits: RunnerLimits, *, shares: bool) -> Iterator[Step]:
    """As `rehearsals`: steps of other kinds. `shares`: spans of KV may be shared."""
    for count, span, prompts in _SHARING if shares else ():
        step = _step(limits, (((1, span + 60),) * count) + prompts)
        page = limits.page_size
        if step is not None and step.num_decodes == count and span % page == 0:
            step.shared = SharedSpans(
                rows=np.arange(count, dtype=np.int32),
                start=np.array([0, count], np.int32),
                first=np.zeros(1, np.int32),
                last=np.array([span], np.int32),
                level=np.zeros(1, np.int32),
            )
            yield step
    for mixture in _LATER:
        step = _step(limits, mixture)
        if step is not None:
            yield step
    step = _step(limits, ((1, 64), (1, 64), (1500, 0)))
    if step is not None:
        sampling = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5)
        step.setups = [SlotSetup(slot=slot, sampling=sampling) for slot in range(step.num_rows)]
        yield step


def _step(limits: RunnerLimits, mixture: Sequence[tuple[int, int]]) -> Step | None:
    """Of rows without pages; None: no row is within the limits, or all together aren't."""
    rows = [row for row in mixture if sum(row) <= limits.context_length][: limits.num_slots]
    query = np.array([row[0] for row in rows], np.int32)
    if not rows or query.sum() > limits.max_step_tokens:
        return None
    return Step(
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
