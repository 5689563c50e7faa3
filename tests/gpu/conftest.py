"""Everything here needs a CUDA device, and is skipped as a whole without one.

    make test-gpu

Workers share the device's memory. Files with large models are a group (`xdist_group`), which one worker runs, so that no
model is there twice; what tests leave in an allocator's cache goes back after each. Workers share the processor too: each
computes references there with one thread, since threads of several workers that wait for each other take many times as long.
"""

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The parts of the table of kernels come first, since they take the longest; tests that nothing may run beside come
    last, when what they compile is there and no test is left to wait for them."""
    here = [item for item in items if "tests/gpu" in str(item.path)]
    if len(here) == len(items):
        items.sort(key=_turn)
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names failures as they come: time on a device is short, and what is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(
            f"\n{report.when} of {report.nodeid} failed: {str(report.longrepr)[-400:]}", file=sys.__stdout__, flush=True
        )


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("alone"):
        return 2
    return 0 if item.path.name == "test_triton_kernels.py" else 1


@contextmanager
def locked(name: str, how: int) -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / f"bough-{os.getuid()}-{name}.lock").open("w") as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def device_shared() -> Iterator[None]:
    """While others may use the device too. Whoever wants it alone is waiting at the gate, and goes first."""
    with ExitStack() as held:
        with locked("gate", fcntl.LOCK_EX):
            held.enter_context(locked("device", fcntl.LOCK_SH))
        yield


@contextmanager
def device_alone() -> Iterator[None]:
    with locked("gate", fcntl.LOCK_EX), locked("device", fcntl.LOCK_EX):
        yield


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of several workers run side by side, except for those that fill the device or measure it."""
    with device_alone() if request.node.get_closest_marker("alone") else device_shared():
        yield
        gc.collect()
        torch.cuda.empty_cache()
