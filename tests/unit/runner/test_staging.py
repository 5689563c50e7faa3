"""Who gets which memory, on a device whose events are reached when the test says so."""

from __future__ import annotations

import numpy as np
import torch

from bough.runner.staging import ALIGN, Stage, Stages


class HeldEvent:
    def __init__(self) -> None:
        self.recorded = self.reached = False

    def record(self) -> None:
        self.recorded, self.reached = True, False

    def wait(self) -> None:
        self.reached = True

    def done(self) -> bool:
        assert self.recorded, "an event that was never recorded says nothing"
        return self.reached


class HeldDevice:
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[HeldEvent] = []
        self.asked: list[int] = []

    def event(self) -> HeldEvent:
        self.events.append(HeldEvent())
        return self.events[-1]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.asked.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)


def stages() -> tuple[HeldDevice, Stages]:
    device = HeldDevice()
    return device, Stages(device, 256)  # type: ignore[arg-type]


def memory_of(stage: Stage) -> int:
    return stage._memory.block.tensor.data_ptr()


def test_rooms_do_not_overlap_and_are_aligned():
    device, made = stages()
    stage = made.take()
    both = [stage.room(num_bytes) for num_bytes in (3, 0, 65, 8, 64)]
    rooms = [room.tensor for room in both]
    for value, room in enumerate(rooms):
        room.fill_(value + 1)
    assert [len(room) for room in rooms] == [3, 0, 65, 8, 64]
    assert all((room == value + 1).all() for value, room in enumerate(rooms))
    assert all(room.array.tolist() == room.tensor.tolist() for room in both)
    first = rooms[0].data_ptr()
    assert all((room.data_ptr() - first) % ALIGN == 0 for room in rooms if len(room))
    assert device.asked == [256, 512], "the last one had no place in the first block"


def test_arrays_are_brought_as_they_are():
    _, made = stages()
    stage = made.take()
    pages, at = np.arange(5, dtype=np.int32), np.arange(7, dtype=np.int64) << 40
    brought = stage.bring(pages, torch.int32), stage.bring(at, torch.int64)
    pages[:] = at[:] = 0
    assert brought[0].tolist() == list(range(5))
    assert brought[1].tolist() == [i << 40 for i in range(7)]


def test_a_room_larger_than_the_stage_leaves_what_was_handed_out_as_it_was_and_is_kept():
    device, made = stages()
    stage = made.take()
    small = stage.room(100).tensor.fill_(7)
    large = stage.room(3000).tensor.fill_(9)
    assert (small == 7).all()
    assert len(large) == 3000
    stage.seal()
    stage.wait()
    del stage
    made.take().room(3000)
    assert device.asked == [256, 3000]


def test_memory_is_used_again_once_its_step_is_forgotten_and_the_device_is_through_with_it():
    device, made = stages()
    first, second = made.take(), made.take()
    place = memory_of(first)
    assert place != memory_of(second)
    first.seal()
    second.seal()
    device.events[0].reached = True
    third = made.take()
    assert memory_of(third) not in (place, memory_of(second)), "the step may still be asked for its results"
    del first
    again = made.take()
    assert memory_of(again) == place
    assert again.room(8).tensor.data_ptr() == place, "all of it is free again"
    del second
    assert len(device.events) == 3
    last = made.take()  # the second's event is not reached
    assert len(device.events) == 4
    del last, third, again


def test_memory_of_a_step_that_broke_off_is_not_used_again():
    """Its copies may be under way, and the event is behind the step before it."""
    device, made = stages()
    stage = made.take()
    stage.seal()
    stage.wait()
    del stage
    broken = made.take()
    assert len(device.events) == 1
    broken.room(16)
    del broken
    made.take()
    assert len(device.events) == 2
