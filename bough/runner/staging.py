"""Host memory for what steps bring to the device and take back: pinned once and used again, step after step.

Memory that is asked for anew takes the host longer than filling it, and a device without other work waits meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.platform.device import Device, Event

ALIGN = 64
"""Rooms, and arrays in them, begin at multiples of this many bytes: kernels are built for pointers that do."""


class PinnedBuffer(NamedTuple):
    """Bytes that copy to and from the device without waiting, as torch and as numpy see them."""

    tensor: Tensor
    array: npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Memory:
    block: PinnedBuffer
    done: Event
    """Behind the work that last used it."""


class Stage:
    """One step's share of the host's memory. The step keeps it as long as its results may be read."""

    def __init__(self, stages: Stages, memory: _Memory) -> None:
        self._stages = stages
        self._memory = memory
        self._used = 0
        self._sealed = False

    def room(self, num_bytes: int) -> PinnedBuffer:
        """A buffer of `num_bytes` bytes with arbitrary content, which has no other user while the stage exists."""
        block, start = self._memory.block, self._used
        if start + num_bytes > len(block.array):
            # What was handed out of the block before keeps it; torch gives it to others when the device is through with it.
            block = self._memory.block = self._stages.block(max(num_bytes, 2 * len(block.array)))
            start = 0
        end = start + num_bytes
        self._used = end + -end % ALIGN
        return PinnedBuffer(block.tensor[start:end], block.array[start:end])

    def send(self, room: Tensor) -> Tensor:
        """Queues the copy of what is in (a view of) a room to the device. On a CPU it is the room itself."""
        return room.to(self._stages.device, non_blocking=True)

    def bring(self, array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        """Queues the copy of a flat array of this type to the device."""
        room = self.room(array.nbytes)
        room.array.view(array.dtype)[:] = array
        return self.send(room.tensor.view(dtype))

    def seal(self) -> None:
        """Call behind everything that the step queues."""
        self._memory.done.record()
        self._sealed = True

    def wait(self) -> None:
        """Blocks until the device has come to where the stage was sealed."""
        self._memory.done.wait()

    def __del__(self) -> None:
        if self._sealed:  # otherwise a step broke off, and it is unknown when its copies end
            self._stages.take_back(self._memory)


class Stages:
    """As many stages as there are steps in flight."""

    def __init__(self, machine: Device, num_bytes: int) -> None:
        """`num_bytes`: enough for most steps. One that needs more gets more."""
        self.device = machine.torch_device
        self._machine = machine
        self._num_bytes = num_bytes
        self._left: deque[_Memory] = deque()
        """Memory of steps that are no longer referenced, the oldest first. The device may still be at work on them."""

    def take(self) -> Stage:
        if self._left and self._left[0].done.done():
            return Stage(self, self._left.popleft())
        return Stage(self, _Memory(self.block(self._num_bytes), self._machine.event()))

    def take_back(self, memory: _Memory) -> None:
        self._left.append(memory)

    def block(self, num_bytes: int) -> PinnedBuffer:
        buffer = self._machine.host_buffer(num_bytes)
        return PinnedBuffer(buffer, buffer.numpy())
