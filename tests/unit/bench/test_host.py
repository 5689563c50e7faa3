"""The host beside a device that takes its time: what the device draws, and what the clock says."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest

from bough.bench import host
from bough.bench.paced_runner import PacedRunner
from bough.config.default_model import default_model_path
from bough.core.step import RunnerLimits, Step

LIMITS = RunnerLimits(
    num_slots=4, num_pages=16, page_size=4, pages_per_slot=4, context_length=16, max_step_tokens=16, vocab_size=100
)


def step(constrained: list[int]) -> Step:
    rows = 3
    return Step(
        index=0,
        num_decodes=rows,
        slots=np.arange(rows, dtype=np.int32),
        num_query=np.ones(rows, np.int32),
        context=np.zeros(rows, np.int32),
        samples=np.ones(rows, np.bool_),
        tokens=np.zeros(rows, np.int32),
        table_at=np.empty(0, np.int64),
        table_pages=np.empty(0, np.int32),
        constrained=np.array(constrained, np.int32),
    )


def test_tokens_are_drawn_among_those_allowed() -> None:
    runner = PacedRunner(LIMITS, forward_s=0.0)
    masks = np.zeros((2, 4), np.int32)
    masks[0, 2] = 1 << 5  # token 69
    masks[1] = -1
    masks[1, 0] = 0
    for _ in range(50):
        launched = runner.launch(step([0, 2]))
        assert launched.needs_masks
        launched.sample(masks)
        tokens = launched.wait().tokens[:, 0]
        assert tokens[0] == 69
        assert 0 <= tokens[1] < 100
        assert 32 <= tokens[2] < 100


def test_steps_queue_one_behind_the_other() -> None:
    for forward_s in (0.02, 0.2, 2.0, 5.0):
        runner = PacedRunner(LIMITS, forward_s=forward_s)
        first, second = runner.launch(step([])), runner.launch(step([]))
        if time.perf_counter() < first.ready_s:  # otherwise the machine stalled between the two
            break
    assert second.ready_s == pytest.approx(first.ready_s + forward_s)
    first.wait()
    assert runner.arrived_s >= first.ready_s
    second.wait()
    assert runner.arrived_s >= second.ready_s
    assert runner.idle_s == 0.0


def test_rows_under_a_schema_beside_free_ones(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--rows",
        "4",
        "--steps",
        "12",
        "--model",
        str(default_model_path()),
        "--device-ms",
        "2",
        "--queueing-us",
        "0",
    ]
    monkeypatch.setattr(sys, "argv", ["bough bench host", *words])
    host.main()
    free, strings, records = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert [each["schema"] for each in (free, strings, records)] == ["none", "strings", "records"]
    assert free["token_us"] > 1800
    assert free["mask_us"] == free["chain_us"] == 0.0
    assert strings["token_us"] > 1800
    for each in (strings, records):
        assert each["mask_us"] > 0
        assert each["chain_us"] > 0
