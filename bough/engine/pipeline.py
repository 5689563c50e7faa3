"""Stages: rank 0 plans and computes the first layers, and the last stage samples. What it samples comes back to rank 0,
which tells all others, so that each of them knows where its rows stand.

Several steps are in the pipeline at once. They have no row in common: a row is planned again when its sample has come back.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

from msgspec import Struct

from bough.config.concerns import ParallelConfig
from bough.config.layout import Layout
from bough.core.errors import Unavailable
from bough.core.step import I32, Launched, Mask, Outcome, Step
from bough.distributed.shared_memory import Patience
from bough.engine.step_channels import LinkSource, LinkWay, StepChannel, StepSource, Ways
from bough.engine.step_frame import RunStep
from bough.engine.worker import InStep, Masks, Sampled, Stop, Timed
from bough.ipc import Endpoints, Inbox, Outbox
from bough.ipc.ring import RingReader, RingWriter
from bough.ipc.store import AnyStore
from bough.platform.futex import STORES_STAY_IN_ORDER
from bough.runner.model_runner import LaunchedStep, ModelRunner

_BACK: Final = "ring-back"
_LOOK_S = 0.2
"""Rank 0 looks for a sample this long before it sees to signals."""


class StepOutcome(Struct, tag="outcome"):
    """From the last stage to rank 0."""

    index: int
    outcome: Outcome


class OutcomeSink(Protocol):
    def send(self, message: StepOutcome) -> None: ...


def sampling_rank(parallel: ParallelConfig) -> int:
    """The rank that sends rank 0 what was sampled: the first of the last stage."""
    layout = Layout.of(parallel)
    return layout.size - layout.tp


def open_sink(store: AnyStore, endpoints: Endpoints, source: StepSource) -> OutcomeSink:
    """The sampling rank's way back; `source`: where its steps come from."""
    if isinstance(source, LinkSource):
        return Ways([LinkWay(source.link)])
    if not STORES_STAY_IN_ORDER:
        return Ways([Outbox(endpoints.rank(0))])
    ring = RingWriter(1)
    store.set(_BACK, ring.path.encode())
    return ring


def open_outcomes(store: AnyStore, endpoints: Endpoints, parallel: ParallelConfig, others: Ways) -> StepSource:
    """Rank 0's end of it; `others`: its way to all ranks."""
    link = others.links.get(sampling_rank(parallel))
    if link is not None:
        return LinkSource(link, StepOutcome)
    if not STORES_STAY_IN_ORDER:
        return Inbox(endpoints.rank(0), StepOutcome)
    return RingReader(store.get(_BACK, parallel.dist_timeout_s).decode(), 0, 1, StepOutcome)


class PipelineRunner:
    """Rank 0's runner: its own stage, and the way to and from the others."""

    def __init__(
        self, local: ModelRunner, others: StepChannel, outcomes: StepSource, patience: Patience | None = None
    ) -> None:
        self._local = local
        self._others = others
        self._outcomes = outcomes
        self._patience = patience or Patience()
        self._arrived: deque[StepOutcome] = deque()

    def launch(self, step: Step) -> Launched:
        with InStep(), Timed(self._patience):
            self._others.send(RunStep(step))
            launched = self._local.launch(step)
        assert isinstance(launched, LaunchedStep)
        return _InPipeline(launched, self)

    def clear(self) -> None:
        self._local.clear()

    def idle(self) -> None:
        """Nothing: ranks must capture the same graphs at the same step."""

    def stop(self) -> None:
        self._others.send(Stop())

    def send_masks(self, index: int, masks: Mask) -> None:
        with InStep():
            self._others.send(Masks(index, masks))

    def outcome_of(self, launched: LaunchedStep) -> Outcome:
        """What a step has produced; it is the oldest that was not asked for. Tells all stages."""
        with InStep():
            while not self._arrived:
                if self._outcomes.closed:
                    raise Unavailable(what="the last stage is gone")
                self._arrived.extend(self._outcomes.drain(_LOOK_S))
            came = self._arrived.popleft()
            assert came.index == launched.step.index, "steps come out in the order they went in"
            tokens: I32 = came.outcome.tokens[:, 0].copy()
            self._others.send(Sampled(came.index, tokens))
            launched.learn(tokens)
        return came.outcome


class _InPipeline:
    """A step in the pipeline."""

    def __init__(self, launched: LaunchedStep, runner: PipelineRunner) -> None:
        self._launched = launched
        self._runner = runner
        self._wants_masks = bool(len(launched.step.constrained))

    @property
    def step(self) -> Step:
        return self._launched.step

    @property
    def needs_masks(self) -> bool:
        return self._wants_masks

    def sample(self, masks: Mask) -> None:
        self._wants_masks = False
        self._runner.send_masks(self.step.index, masks)

    def wait(self) -> Outcome:
        return self._runner.outcome_of(self._launched)


def run_stage(source: StepSource, runner: ModelRunner, patience: Patience, sink: OutcomeSink | None) -> None:
    """Another rank of a pipeline, until rank 0 says stop. `sink`: where samples are sent, on the one rank that does so."""
    unmasked: deque[Any] = deque()
    unheard: deque[LaunchedStep] = deque()

    def ended(launched: Launched) -> None:
        if sink is not None:
            sink.send(StepOutcome(launched.step.index, launched.wait()))

    while not source.closed:
        for message in source.drain(block_s=1.0):
            match message:
                case RunStep(step=step):
                    with Timed(patience):
                        launched = runner.launch(step)
                    assert isinstance(launched, LaunchedStep)
                    if not runner.samples:
                        unheard.append(launched)
                    elif launched.needs_masks:
                        unmasked.append(launched)
                    else:
                        ended(launched)
                case Masks(index=index, masks=masks):
                    if runner.samples:
                        while unmasked[0].step.index != index:
                            unmasked.popleft()
                        masked = unmasked.popleft()
                        masked.sample(masks)
                        ended(masked)
                case Sampled(index=index, tokens=tokens):
                    if not runner.samples:
                        while unheard[0].step.index != index:
                            unheard.popleft()
                        unheard.popleft().learn(tokens)
                case Stop():
                    return
