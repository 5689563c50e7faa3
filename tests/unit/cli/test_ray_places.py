"""What `--use-ray` says without Ray, and the command line that other machines get."""

from __future__ import annotations

import sys

import pytest

from bough.cli.config_flags import without_flags
from bough.cli.main import main
from bough.config.server_args import build_config
from bough.core.errors import ConfigError
from bough.launch import start


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--tp-size", "2", "--nnodes", "2", "--use-ray"]) == 2
    assert "pip install 'bough[ray]'" in capsys.readouterr().err


def test_there_is_something_to_place() -> None:
    with pytest.raises(ConfigError, match="there is one machine"):
        build_config(use_ray=True)
    with pytest.raises(ConfigError, match="Ray was not asked"):
        start(build_config(use_ray=True, nnodes=2, tp_size=2))


def test_flags_with_values_are_dropped() -> None:
    given = ["model", "--port", "8000", "--tp-size=2", "--node_rank=1", "--metrics"]
    assert without_flags(given, "--port", "--node-rank") == ["model", "--tp-size=2", "--metrics"]
