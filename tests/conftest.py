"""What every test may count on: nothing in it fails because the machine was slow for a moment."""

from __future__ import annotations

import httpx._config
import pytest
from hypothesis import HealthCheck, settings

_PATIENCE_S = 60.0

settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever asks a server without saying for how long, waits a minute: five seconds pass when a machine is busy."""
    default = httpx._config.DEFAULT_TIMEOUT_CONFIG
    default.connect = default.read = default.write = default.pool = _PATIENCE_S
