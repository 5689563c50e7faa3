"""A server run by this process: what it leaves to whoever runs it when it fails to start."""

from __future__ import annotations

from functools import partial

import pytest

from bough.cli import serving
from bough.cli.serving import LocalServer, run_in_loop
from bough.config.server_args import build_config
from bough.core.errors import ConfigError
from bough.launch import start
from tests.unit.intake.conftest import FAKE


def test_a_server_that_failed_to_start_can_still_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `bough run` does at its end: the user is to see why it failed, and nothing else."""
    monkeypatch.setenv("FAKE_ENGINE", "fail")
    monkeypatch.setattr(serving, "start", partial(start, programs=FAKE))
    server = LocalServer(build_config(port=0, log_level="warning"), quiet=True)
    with pytest.raises(ConfigError, match="made of cheese"):
        run_in_loop(server.run(lambda _: None))
    server.stop_now()
    server.stop()
