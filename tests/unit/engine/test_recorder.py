"""The flight record around a runner: whatever happens in a launch, the record already tells whose it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.bench.fake_runner import NullLaunched, NullRunner
from bough.core.errors import Quarantined
from bough.core.messages import Generate, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import Step
from bough.engine.recorder import Quarantine, RecordingRunner, fingerprint
from bough.observability.flight import FlightRecorder, RecordedStep, read_flight, suspects
from tests.sim.harness import Sim


def ask(prompt: list[int], seed: int | None = None) -> Generate:
    return Generate(id=1, rid="r", prompt=pack_ids(prompt), sampling=SamplingParams(seed=seed))


def test_equal_requests_have_equal_fingerprints() -> None:
    first, again = ask([1, 2, 3], seed=4), ask([1, 2, 3], seed=4)
    again.id, again.rid = 2, "another try"
    assert fingerprint(first) == fingerprint(again)
    others = [ask([1, 2, 4], seed=4), ask([1, 2], seed=4), ask([1, 2, 3], seed=5), ask([1, 2, 3])]
    assert len({fingerprint(each) for each in (first, *others)}) == 5
    assert all(0 <= fingerprint(each) < 2**64 for each in others)


def test_the_record_names_a_step_s_requests_before_its_launch(tmp_path: Path) -> None:
    sim = Sim(num_slots=2)
    found: list[list[RecordedStep]] = []

    class Looking(NullRunner):
        def launch(self, step: Step) -> NullLaunched:
            found.append(read_flight(tmp_path / "flight"))
            return super().launch(step)

    recorder = FlightRecorder(tmp_path / "flight", 2)
    sim.loop.runner = RecordingRunner(Looking(sim.runner_limits), sim.queues, recorder)
    asks = [sim.ask([5 + i, 6, 7], max_new=2).ask for i in range(2)]
    sim.run()
    for steps in found:
        last = steps[-1]
        assert last.requests == tuple(each.id for each in asks)
        assert last.prints == tuple(fingerprint(each) for each in asks)
        assert not last.settled
    assert [step.num_tokens for step in found[-1]] == [6, 2]
    assert suspects(read_flight(tmp_path / "flight")) == frozenset()
    guard = Quarantine(suspects(found[0]))
    with pytest.raises(Quarantined, match="not served any more"):
        guard.check(asks[1])
    guard.check(ask([5, 6, 7]))
