"""Estimates how much memory rows will need: for their prompts exactly, for their answers by the lengths of earlier
ones. Pure."""

from __future__ import annotations

import numpy as np

from bough.core.step import I32, I64
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Job, Prefilling, Queues, Running

_MIN_EXPECTED = 16
"""Output tokens still expected of a row that has outlived the estimate. In a full pool 0, 64 and 256 are 3 to 5 % slower
(`benchmarks/scheduler_constants.py`)."""
_UNBOUNDED = 1 << 30
"""Number of columns if columns take no pages."""


def columns_in(num_pages: int, limits: Limits) -> int:
    """Columns that `num_pages` pages make."""
    height = limits.layout.column_pages
    return num_pages // height if height else _UNBOUNDED


def expected_output(job: Job, limits: Limits, ratio: float) -> int:
    """KV tokens of output that a request without a slot is expected to add; all it may, once memory is reserved for it."""
    rest = job.limit - len(job.output) - 1
    if job.dry_retractions >= limits.max_retractions:
        return max(rest, 0)
    expected = ratio * min(job.limit, limits.estimate_clip_tokens) - len(job.output)
    return max(0, min(rest, int(max(expected, _MIN_EXPECTED))))


def running_need(queues: Queues, limits: Limits, rows: I64, ratio: float) -> I32:
    """Per running row, the pages that it will need beyond those it has."""
    slots, layout = queues.slots, limits.layout
    done = slots.out_high[rows]
    rest = slots.out_limit[rows] - done
    expected = ratio * np.minimum(slots.out_limit[rows], limits.estimate_clip_tokens) - done
    expected = np.minimum(np.maximum(expected, _MIN_EXPECTED), rest)
    expected = np.where(slots.pinned[rows], rest, expected)
    columns = np.ceil((slots.kv_high[rows] + expected) / limits.page_size)
    held = slots.num_columns[rows]
    pages = np.maximum(columns - held, 0) * layout.growing_pages
    for window, gone in zip(layout.windows, slots.gone[:, rows], strict=True):
        seen = np.minimum(columns - gone, window.most_columns)
        pages = pages + np.maximum(seen - (held - gone), 0) * window.num_pages
    return pages.astype(np.int32)


def prefill_need(queues: Queues, limits: Limits, phase: Prefilling, ratio: float) -> int:
    """Pages that a prefill in progress will need beyond those it has."""
    slots, layout = queues.slots, limits.layout
    columns = limits.columns_for(len(phase.key) + expected_output(phase.job, limits, ratio))
    held = int(slots.num_columns[phase.slot])
    pages = max(0, columns - held) * layout.growing_pages
    for window, gone in zip(layout.windows, slots.gone[:, phase.slot].tolist(), strict=True):
        pages += max(0, min(columns - gone, window.most_columns) - (held - gone)) * window.num_pages
    return pages


def new_need(limits: Limits, num_tokens: int, cached_columns: int) -> int:
    """Pages that a request of `num_tokens` needs beyond the `cached_columns` that it finds in the prefix cache."""
    layout = limits.layout
    columns = limits.columns_for(num_tokens) - cached_columns
    pages = columns * layout.growing_pages
    for window in layout.windows:
        pages += min(columns, window.most_columns) * window.num_pages
    return pages


def row_need(queues: Queues, limits: Limits, phase: Prefilling | Running, ratio: float) -> int:
    """Pages that a row will need beyond those it has."""
    if isinstance(phase, Prefilling):
        return prefill_need(queues, limits, phase, ratio)
    return int(running_need(queues, limits, np.array([phase.slot]), ratio)[0])
