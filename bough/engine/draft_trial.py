"""Times a few steps with drafts before the first request, where steps are computed by the engine's own thread.

On a CPU a draft may take as long as half a plain step. What that costs would otherwise be found out while requests wait: a
handful of steps of three or four times the usual length, the first of them with everything cold.
"""

from __future__ import annotations

import logging
import time

from bough.core.step import NO_PROPOSER
from bough.runner.model_runner import ModelRunner
from bough.runner.rehearsal import drafting_row, drafting_step
from bough.speculative.device import DeviceDrafter

_log = logging.getLogger(__name__)

_CONTEXT = 128
"""KV tokens of the row."""
_COLD, _TIMED = 2, 4
"""Steps of each kind whose times do not count, and those that do."""
_MOST_S = 3.0
"""What the trial may take; where steps take too long for it, drafts are tried while serving."""
_COSTLY = 4.0
"""Plain steps that one with drafts is assumed to take, before any was timed."""


def try_drafts(runner: ModelRunner, drafter: DeviceDrafter) -> None:
    """Tells `drafter` what steps of one row take. The runner has not served anything yet, and computes in this thread."""
    limits, kinds = runner.limits, sorted({NO_PROPOSER, *drafter.fewest_and_most})
    steps = _COLD + _TIMED
    if limits.num_snapshots is not None or runner.measures_scales or not drafter.adaptive:
        return  # states follow real rows, and scales come from real prompts
    if _CONTEXT + sum(steps * (1 + max(kind, 0)) for kind in kinds) + 2 * drafter.most > limits.context_length:
        return
    if limits.max_step_tokens < _CONTEXT:
        return
    runner.launch(drafting_row(_CONTEXT)).wait()
    context, times = _CONTEXT, dict[int, list[float]]()
    for kind in kinds:
        taken = []
        for _ in range(steps):
            began_s = time.thread_time()
            runner.launch(drafting_step(kind, context)).wait()
            taken.append(1e3 * (time.thread_time() - began_s))
            context += 1 + max(kind, 0)
        times[kind] = taken[_COLD:]
        if kind == NO_PROPOSER and _COSTLY * min(times[kind]) * steps * (len(kinds) - 1) > 1e3 * _MOST_S:
            return
    drafter.expect(times)
    found = ", ".join(f"{min(times[kind]):.1f} with {kind}" for kind in kinds[1:])
    outcome = "none are made for now, since they would not pay" if drafter.is_resting else "they may pay"
    _log.info("drafts: a step takes %.1f ms without, %s: %s", min(times[NO_PROPOSER]), found, outcome)
