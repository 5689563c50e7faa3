"""Ranks other than 0: they receive the steps that rank 0 decided, and launch them.

All ranks run the same kernels on the same inputs and draw with the same seeds from the same gathered logits, so tokens
never have to travel between them.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from msgspec import Struct

from bough.core.step import I32, Launched, Mask, Outcome, Runner, Step
from bough.distributed.shared_memory import Patience
from bough.engine.loop import EngineBroken
from bough.engine.step_channels import StepChannel, StepSource
from bough.engine.step_frame import RunStep
from bough.layers.spread import TokenSpread


class Masks(Struct, tag="masks"):
    """Grammar masks for a step. Those before it that still lack theirs have failed on rank 0, and get none."""

    index: int
    masks: Mask


class Sampled(Struct, tag="sampled"):
    """What the last stage of a pipeline has sampled in a step, by row. A step before it that was not heard of has failed."""

    index: int
    tokens: I32


class Stop(Struct, tag="stop"):
    """The engine ends."""


ToWorker = RunStep | Masks | Sampled | Stop


class BroadcastRunner:
    """Rank 0's runner: every step goes to the other ranks before it is launched here.

    A step that fails here, and goes on there, breaks the engine: what one rank sends next, another would take for
    something else.
    """

    def __init__(self, runner: Runner, others: StepChannel, patience: Patience | None = None) -> None:
        """`patience`: that of the collectives, which follows the steps from now on."""
        self._runner = runner
        self._others = others
        self._patience = patience or Patience()

    def launch(self, step: Step) -> Launched:
        began_s = time.monotonic()
        try:
            self._others.send(RunStep(step))
            launched = self._runner.launch(step)
        except Exception as error:
            raise broken_by(error) from error
        self._patience.saw_step(time.monotonic() - began_s)
        return SharedLaunched(launched, self._others)

    def clear(self) -> None:
        self._runner.clear()

    def idle(self) -> None:
        """Nothing: ranks must capture the same graphs at the same step."""

    def stop(self) -> None:
        self._others.send(Stop())


class InStep:
    """A failure within breaks the engine: the other ranks are elsewhere by now, or gone."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            raise broken_by(error) from error


def broken_by(error: Exception) -> EngineBroken:
    return EngineBroken(what="a step failed on one of several ranks", why=f"{type(error).__name__}: {error}")


class Timed:
    """Tells how long what is within has taken."""

    __slots__ = ("_began_s", "_patience")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._patience.saw_step(time.monotonic() - self._began_s)


class SharedLaunched:
    """A step that other ranks run, too: they get its masks."""

    def __init__(self, launched: Launched, others: StepChannel) -> None:
        self._launched = launched
        self._others = others

    @property
    def step(self) -> Step:
        return self._launched.step

    @property
    def needs_masks(self) -> bool:
        return self._launched.needs_masks

    def sample(self, masks: Mask) -> None:
        with InStep():
            self._others.send(Masks(self.step.index, masks))
            self._launched.sample(masks)

    def wait(self) -> Outcome:
        return self._launched.wait()


def run_worker(
    source: StepSource, runner: Runner, patience: Patience | None = None, spread: TokenSpread | None = None
) -> None:
    """Launches what rank 0 sends until it says stop (or this process is ended with its parent). `patience`: as that of a
    `BroadcastRunner`; `spread`: hears what replicas of attention have agreed on, where there are several."""
    patience = patience or Patience()
    unmasked: deque[Launched] = deque()
    while not source.closed:
        for message in source.drain(block_s=1.0):
            match message:
                case RunStep(step=step, rows=rows, alike=alike):
                    if spread is not None:
                        spread.begin(rows, alike=alike)
                    with Timed(patience):
                        launched = runner.launch(step)
                    if launched.needs_masks:
                        unmasked.append(launched)
                case Masks(index=index, masks=masks):
                    while unmasked[0].step.index != index:
                        unmasked.popleft()
                    unmasked.popleft().sample(masks)
                case Sampled():
                    raise AssertionError("there are no stages")
                case Stop():
                    return
