"""Recording what the device is asked to do, to ask for it again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def _error_mode() -> str:
    """NCCL's watchdog asks the device about events from a thread of its own, which a capture must not fail of."""
    return "thread_local" if dist.is_available() and dist.is_initialized() else "global"


def capture(run: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Runs `run` twice, on a stream of its own: for what kernels prepare at their first use, then to record it.

    Returns the graph and what `run` returned while it was recorded: tensors that each replay overwrites. `pool`: where its
    memory comes from; None: from a pool of its own.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_error_mode()):
            result = run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result
