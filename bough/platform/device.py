"""The device: streams, events and pinned buffers on CUDA, and objects with the same interface that do nothing on a
CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Marks the current end of the current stream's queue."""
        ...

    def wait(self) -> None:
        """Blocks the host until the mark is reached."""
        ...

    def done(self) -> bool:
        """Whether the mark is reached. Never blocks."""
        ...


class DeviceStream(Protocol):
    """A queue of device work."""

    def current(self) -> AbstractContextManager[Any]:
        """A context in which work is queued to this stream."""
        ...

    def wait(self) -> None:
        """Blocks the host until all queued work is done."""
        ...


class Device:
    """One device. Built once per process; other code does not ask which device there is."""

    def __init__(self, kind: Literal["cpu", "cuda"], index: int = 0, *, threads: int | None = None) -> None:
        """`threads`: CPU threads of torch (None: unchanged)."""
        import torch

        self.kind = kind
        self.index = index
        self.torch_device: torch.device = torch.device(kind, index) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(index)
            # Convolutions of float32 (encoders of sound, patches of images) would keep 10 bits of each factor by default.
            torch.backends.cudnn.allow_tf32 = False
        if threads is not None:
            torch.set_num_threads(threads)

    @property
    def is_async(self) -> bool:
        """Whether the device works asynchronously to the host."""
        return self.kind == "cuda"

    def stream(self) -> DeviceStream:
        return _CudaStream(self.torch_device) if self.is_async else _NoStream()

    def event(self) -> Event:
        return _CudaEvent() if self.is_async else _NoEvent()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer on the host that copies to and from the device without waiting (pinned, on CUDA)."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_async)

    def reserve(self, num_bytes: int) -> None:
        """Reserves device memory for later tensors. Without it, a step that needs new memory waits until the device is
        idle, once for each tensor of a new size."""
        if self.is_async:
            import torch

            torch.empty(
                num_bytes, dtype=torch.uint8, device=self.torch_device
            )  # freed at once, but torch's allocator keeps the memory

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) memory of the device in bytes."""
        if self.is_async:
            import torch

            free, total = torch.cuda.mem_get_info(self.torch_device)
            return free, total
        from bough.platform.processor import memory_bytes

        total, free = memory_bytes()
        return free, total

    def utilization(self) -> Callable[[], float] | None:
        """A function to call about once per second that returns the share of time in which the device was busy; None if
        that is not known."""
        from bough.platform.utilization import cpu_utilization, gpu_utilization

        return gpu_utilization(self.index) if self.is_async else cpu_utilization()

    def synchronize(self) -> None:
        """Blocks the host until everything queued is done."""
        if self.is_async:
            import torch

            torch.cuda.synchronize(self.torch_device)


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        import torch

        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def current(self) -> AbstractContextManager[Any]:
        import torch

        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def wait(self) -> None:
        self._stream.synchronize()


class _CudaEvent:
    def __init__(self) -> None:
        import torch

        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class _NoStream:
    """The stream of a CPU: work is done when the call returns."""

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self) -> None:
        return


class _NoEvent:
    def record(self) -> None:
        return

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True
