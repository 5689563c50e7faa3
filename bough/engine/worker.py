"""Ranks other than 0: they receive the steps that rank 0 decided, and launch them.

All ranks run the same kernels on the same inputs and draw with the same seeds from the same gathered logits, so tokens
never have to travel between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from bough.core.step import Launched, Mask, Outcome, Runner, Step
from bough.engine.loop import EngineBroken
from bough.ipc import Inbox, Outbox


class RunStep(Struct, tag="step"):
    step: Step


class Masks(Struct, tag="masks"):
    """Grammar masks for a step. Those before it that still lack theirs have failed on rank 0, and get none."""

    index: int
    masks: Mask


class Stop(Struct, tag="stop"):
    """The engine ends."""


ToWorker = RunStep | Masks | Stop


class BroadcastRunner:
    """Rank 0's runner: every step goes to the other ranks before it is launched here.

    A step that fails here, and goes on there, breaks the engine: what one rank sends next, another would take for
    something else.
    """

    def __init__(self, runner: Runner, workers: Sequence[Outbox]) -> None:
        self._runner = runner
        self._workers = workers

    def launch(self, step: Step) -> Launched:
        self._send(RunStep(step))
        with _in_step():
            return _BroadcastLaunched(self._runner.launch(step), self)

    def clear(self) -> None:
        self._runner.clear()

    def idle(self) -> None:
        """Nothing: ranks must capture the same graphs at the same step."""

    def stop(self) -> None:
        self._send(Stop())

    def _send(self, message: ToWorker) -> None:
        for worker in self._workers:
            worker.send(message)

    def send_masks(self, index: int, masks: Mask) -> None:
        self._send(Masks(index, masks))


@contextmanager
def _in_step() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EngineBroken(
            what="a step failed on one of several ranks", why=f"{type(error).__name__}: {error}"
        ) from error


class _BroadcastLaunched:
    def __init__(self, launched: Launched, runner: BroadcastRunner) -> None:
        self._launched = launched
        self._runner = runner

    @property
    def step(self) -> Step:
        return self._launched.step

    @property
    def needs_masks(self) -> bool:
        return self._launched.needs_masks

    def sample(self, masks: Mask) -> None:
        self._runner.send_masks(self.step.index, masks)
        with _in_step():
            self._launched.sample(masks)

    def wait(self) -> Outcome:
        return self._launched.wait()


def run_worker(inbox: Inbox[ToWorker], runner: Runner) -> None:
    """Launches what rank 0 sends until it says stop (or this process is ended with its parent)."""
    unmasked: deque[Launched] = deque()
    while not inbox.closed:
        for message in inbox.drain(block_s=1.0):
            match message:
                case RunStep(step=step):
                    launched = runner.launch(step)
                    if launched.needs_masks:
                        unmasked.append(launched)
                case Masks(index=index, masks=masks):
                    while unmasked[0].step.index != index:
                        unmasked.popleft()
                    unmasked.popleft().sample(masks)
                case Stop():
                    return
