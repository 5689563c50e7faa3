"""Memory of steps in flight on a device that lags behind: nobody writes to it before the device has read it."""

from __future__ import annotations

import numpy as np
import torch

from bough.platform import Device
from bough.runner.staging import Stage, Stages

LAG = 50_000_000
"""Cycles: tens of milliseconds."""
WORDS = 4096


def bring(stage: Stage, value: int) -> torch.Tensor:
    return stage.bring(np.full(WORDS, value), torch.int64)


def test_what_steps_bring_arrives_whether_they_end_or_break_off():
    stages = Stages(Device("cuda"), 10 * WORDS)
    arrived = []
    for value in range(24):
        if value % 6 == 0:
            torch.cuda._sleep(LAG)
        stage = stages.take()
        arrived.append(bring(stage, value))
        arrived.append(bring(stage, value))  # more than the stage has room for
        if value % 4:
            stage.seal()
        del stage
    torch.cuda.synchronize()
    for place, tensor in enumerate(arrived):
        assert (tensor == place // 2).all(), place


def test_what_comes_back_stays_while_the_step_is_known():
    stages = Stages(Device("cuda"), 10 * WORDS)
    known = []
    for value in range(4):
        torch.cuda._sleep(LAG // 4)
        stage = stages.take()
        room = stage.room(8 * WORDS)
        room.tensor.view(torch.int64).copy_(torch.full((WORDS,), value, device="cuda"), non_blocking=True)
        stage.seal()
        known.append((stage, room.array.view(np.int64)))
    for value, (stage, array) in enumerate(known):
        stage.wait()
        assert (array == value).all()
    for other in range(8):
        stages.take().seal()
        bring(stages.take(), 100 + other)
    torch.cuda.synchronize()
    assert all((array == value).all() for value, (_, array) in enumerate(known))


def test_one_step_after_the_other_uses_the_same_memory():
    stages = Stages(Device("cuda"), 10 * WORDS)
    places = set()
    for value in range(5):
        stage = stages.take()
        places.add(stage.room(8).tensor.data_ptr())
        bring(stage, value)
        stage.seal()
        stage.wait()
        del stage
    assert len(places) == 1
