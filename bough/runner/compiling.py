"""Which kernels a runner will launch, found by rehearsing its steps: they are compiled in other processes meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from bough.core.step import Step
from bough.kernels import ahead
from bough.runner.graphs import Extents, Graphs, token_sizes
from bough.runner.model_runner import ModelRunner
from bough.runner.rehearsal import later_rehearsals, rehearsals

_log = logging.getLogger(__name__)

LATER_S = 2.0
"""Rehearsing steps that aren't needed at once takes at most this long. It costs nothing while the first kernels are being
compiled, for which the first steps wait."""

_Rehearsed = Callable[[], None]


def compile_ahead(runner: ModelRunner, steps: Iterable[Extents], most: int) -> None:
    """Has kernels compiled ahead of their launch, if compilers were started (`kernels.ahead`): first those of `steps`, which
    have graphs, and of `rehearsals`; then those of other steps with at most `most` rows, behind which the first request
    need not wait."""
    compilers = ahead.compilers()
    if compilers is None:
        return
    began = time.perf_counter()
    graphs, runner.graphs = runner.graphs, None  # for steps whose kernels are launched one by one
    assert graphs is not None, "a runner with graphs"
    try:
        with torch.inference_mode():
            with ahead.Rehearsal(urgent=True):
                _rehearse([partial(graphs.rehearse, size) for size in dict.fromkeys(steps)])
                _rehearse(partial(_launch, runner, step) for step in rehearsals(runner.limits))
            urgent = compilers.asked
            with ahead.Rehearsal(urgent=False):
                _rehearse(_later(runner, graphs, most), until=time.perf_counter() + LATER_S)
    finally:
        runner.graphs = graphs
    _log.info(
        "%d kernels are compiled for the first steps and %d for later ones (found in %.2f s)",
        urgent,
        compilers.asked - urgent,
        time.perf_counter() - began,
    )


def _later(runner: ModelRunner, graphs: Graphs, most: int) -> Iterator[_Rehearsed]:
    """What a request may bring that is not like the first: the most likely first."""
    sizes = [size for size in token_sizes(most) if size <= most]
    is_common = runner.forward.proposer is None and runner.states is None
    if not is_common:
        return
    shares = runner.limits.spans is not None
    if shares:
        yield from (partial(graphs.rehearse, Extents(n, n, n), shared=True) for n in sizes if n in (64, 256))
    for step in later_rehearsals(runner.limits, shares=shares):
        yield partial(_launch, runner, step)
    for size in (1, 64):
        if size <= most:
            yield partial(graphs.rehearse, Extents(size, size, size), "logits")
    for size in reversed(sizes):
        yield partial(graphs.rehearse, Extents(size, size, size))
    if shares:
        yield from (partial(graphs.rehearse, Extents(n, n, n), shared=True) for n in sizes if n >= 8)


def _launch(runner: ModelRunner, step: Step) -> None:
    runner.launch(step).wait()


def _rehearse(steps: Iterable[_Rehearsed], until: float = float("inf")) -> None:
    for step in steps:
        if time.perf_counter() > until:
            _log.info("not all steps were rehearsed: their kernels are compiled at their first launch")
            return
        try:
            step()
        except Exception as error:
            _log.info("a step was not rehearsed, its kernels are compiled at their first launch: %s", error)
