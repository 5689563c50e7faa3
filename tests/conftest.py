"""What every test may count on: none fails because the machine was slow for a moment, or drew other numbers today.

Machines that run some of the tests only may lack what the others need.

This file is read before any other of the tests, and so before torch is imported: the limit of its instruction set holds
whichever test runs alone. Some machines that advertise AMX end a process at its first product in bfloat16
(`bough/platform/environment.py`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import ssl
import sys
import zlib
from typing import Any

import pytest

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

_PATIENCE_S = 60.0


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ImportError):
        _properties_have_no_deadline()
    with contextlib.suppress(ImportError):
        _requests_have_a_minute()
        _certificates_are_read_once()


def _properties_have_no_deadline() -> None:
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile(
        "patient", deadline=None, suppress_health_check=slow, print_blob=True, derandomize=True, database=None
    )
    settings.load_profile("patient")


def _requests_have_a_minute() -> None:
    """Those that don't say how long they wait: five seconds pass when a machine is busy."""
    from httpx._config import DEFAULT_TIMEOUT_CONFIG as default

    default.connect = default.read = default.write = default.pool = _PATIENCE_S


def _certificates_are_read_once() -> None:
    """Each client of httpx, and so each `httpx.get`, reads all the authorities there are: 56 ms, and thousands are made."""
    from httpx._transports import default

    read = default.create_ssl_context

    @functools.cache
    def usual(file: str | None, directory: str | None) -> ssl.SSLContext:
        return read()

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None or not trust_env:
            return read(verify, cert, trust_env)
        return usual(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    default.create_ssl_context = create


def pytest_collection_finish() -> None:
    """What collecting has made, some million objects, stays: later collections of garbage do not look at it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries complain of what is left when the interpreter ends


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers whenever it runs, whatever ran before it; another test draws others.

    Torch computes with one thread: an engine built in the process sets as many as the machine has cores, and all later
    tests of the process would wait for threads whose shares are smaller than the cost of handing them over.
    """
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Without a device, `torch.manual_seed` keeps a seed for it with a trace of the stack, each time: a millisecond.
        (torch if _has_cuda() else torch.default_generator).manual_seed(seed)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)


@functools.cache
def _has_cuda() -> bool:
    return bool(sys.modules["torch"].cuda.is_available())
