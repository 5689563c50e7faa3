"""Steps that mean nothing, run before the first request: kernels of steps that have no graph are built or loaded by then."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bough.core.sampling import SamplingParams
from bough.core.step import RunnerLimits, SlotSetup, Step

_MIXTURES = (
    # (query tokens, context) of each row
    ((1, 64), (90, 0), (1000, 64)),
    ((90, 0), (1000, 64)),
    ((90, 0), (500, 64)),
)
"""Decodes beside prompts and prompts alone, in steps of more tokens than graphs are for."""


def rehearsals(limits: RunnerLimits) -> Iterator[Step]:
    """Steps within the limits, for a runner not in use yet. Their rows have no pages: what they write goes to page 0, which
    no request reads."""
    for mixture in _MIXTURES:
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
            setups=[SlotSetup(slot=slot, sampling=SamplingParams(temperature=0.0)) for slot in range(len(rows))],
        )
