"""Which kernels a runner will launch, found by rehearsing its steps: they are compiled in other processes meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from bough.core.step import Step
from bough.kernels import ahead
from bough.layers.decoder import Decoder, one_by_one
from bough.runner.graphs import Extents, Graphs, token_sizes
from bough.runner.layer_kinds import unlike_layers
from bough.runner.model_runner import ModelRunner
from bough.runner.rehearsal import later_rehearsals, rehearsals

_log = logging.getLogger(__name__)

LATER_S = 1.0
"""Rehearsing steps that aren't needed at once takes at most this long where the first kernels are compiled already. It costs
nothing before, because the first steps wait for them."""
_SOON = (2, 4, 16, 32, 128)
"""Rows of decode steps whose graphs are captured in the first idle moments."""


class _Rehearsed(NamedTuple):
    """A step, in words and to be run."""

    name: str
    run: Callable[[], object]


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
    unlike = None
    if isinstance(runner.forward.model, Decoder) and runner.forward.model.run_blocks is one_by_one:
        unlike = unlike_layers(list(runner.forward.model.layers))
    try:
        with torch.inference_mode():
            with ahead.Rehearsal(urgent=True):
                # The widest decode step and the first prompts have most kernels, and those that take longest.
                sizes = sorted(dict.fromkeys(steps), key=_decode_rows, reverse=True)
                _rehearse(runner, unlike, [_graph_step(graphs, size) for size in sizes[:1]])
                _rehearse(runner, unlike, (_eager_step(runner, step) for step in rehearsals(runner.limits)))
                _rehearse(runner, unlike, [_graph_step(graphs, size) for size in sizes[1:]])
            urgent, found_s = compilers.asked, time.perf_counter() - began
            with ahead.Rehearsal(urgent=False):
                give_up = time.perf_counter() + LATER_S
                _rehearse(
                    runner,
                    unlike,
                    _later(runner, graphs, most),
                    lambda: time.perf_counter() > give_up and not compilers.is_pending(urgent),
                )
                _rehearse(runner, unlike, _rare(runner, graphs, most), lambda: not compilers.is_pending(urgent))
    finally:
        runner.graphs = graphs
    _log.info(
        "%d kernels are compiled for the first steps (found in %.2f s) and %d for later ones (in %.2f s), %s",
        urgent,
        found_s,
        compilers.asked - urgent,
        time.perf_counter() - began - found_s,
        "all layers rehearsed" if unlike is None else f"layers {', '.join(map(str, sorted(unlike)))} rehearsed",
    )


def _decode_rows(size: Extents) -> int:
    return size.rows if size.rows == size.tokens else 0


def _later(runner: ModelRunner, graphs: Graphs, most: int) -> Iterator[_Rehearsed]:
    """What a request may bring that is not like the first: the most likely first."""
    if not _is_common(runner):
        return
    shares = runner.limits.spans is not None
    if shares:
        yield from (_graph_step(graphs, Extents(n, n, n), shared=True) for n in (64, 256) if n <= most)
    for step in later_rehearsals(runner.limits, shares=shares):
        yield _eager_step(runner, step)
    for size in (1, 64):
        if size <= most:
            step_name = f"logits of {size} rows"
            yield _Rehearsed(step_name, partial(graphs.rehearse, Extents(size, size, size), "logits"))
    yield from (_graph_step(graphs, Extents(n, n, n)) for n in _SOON if n <= most)


def _rare(runner: ModelRunner, graphs: Graphs, most: int) -> Iterator[_Rehearsed]:
    """Steps of other sizes, which have few kernels of their own."""
    if not _is_common(runner):
        return
    sizes = [size for size in token_sizes(most) if size <= most]
    yield from (_graph_step(graphs, Extents(n, n, n)) for n in reversed(sizes) if n not in _SOON)
    if runner.limits.spans is not None:
        yield from (_graph_step(graphs, Extents(n, n, n), shared=True) for n in sizes if n >= 8)


def _is_common(runner: ModelRunner) -> bool:
    return runner.forward.proposer is None and runner.states is None


def _graph_step(graphs: Graphs, size: Extents, *, shared: bool = False) -> _Rehearsed:
    name = f"{size.tokens} tokens in {size.rows} rows{', which share a prefix' if shared else ''}"
    return _Rehearsed(name, partial(graphs.rehearse, size, shared=shared))


def _eager_step(runner: ModelRunner, step: Step) -> _Rehearsed:
    name = f"{step.num_tokens} tokens in {step.num_rows} rows, without a graph"
    return _Rehearsed(name, lambda: runner.launch(step).wait())


def _rehearse(
    runner: ModelRunner,
    unlike: frozenset[int] | None,
    steps: Iterable[_Rehearsed],
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Runs steps until it is too late for the next one. `unlike`: layers that have all the kernels; None: it isn't known."""
    for step in steps:
        if is_late():
            _log.info("steps from that of %s on were not rehearsed: the first kernels are compiled", step.name)
            return
        try:
            if unlike is None:
                step.run()
            else:
                _run_some(runner, unlike, step)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.info("a step of %s was not rehearsed, its kernels are compiled when launched: %s", step.name, reason)


def _run_some(runner: ModelRunner, unlike: frozenset[int], step: _Rehearsed) -> None:
    """Runs a step's unlike layers, or all if one can't be run without the others."""
    try:
        with _only(runner, unlike):
            step.run()
    except Exception:
        step.run()


@contextmanager
def _only(runner: ModelRunner, layers: frozenset[int]) -> Iterator[None]:
    model = runner.forward.model
    assert isinstance(model, Decoder), "others run all layers"
    model.run_blocks = partial(one_by_one, only=layers)
    try:
        yield
    finally:
        model.run_blocks = one_by_one
