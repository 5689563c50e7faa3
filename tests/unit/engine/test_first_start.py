"""Compilers are started where an engine like this one has not had its kernels compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bough.config.concerns import Config, DeviceConfig, ModelConfig
from bough.engine import first_start
from bough.kernels import ahead


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(ahead, "start", found.append)
    monkeypatch.setattr(ahead, "cores", lambda: 16)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return found


GPU: Any = SimpleNamespace(kind="cuda", name="GPU")


def test_until_all_is_compiled(started: list[int], tmp_path: Path) -> None:
    config = Config()
    for engines in (1, 4, 100):
        first_start.start_compilers(config, GPU, engines)
    assert started == [16, 4, 1]
    first_start.note_compiled(config, "GPU")
    first_start.start_compilers(config, GPU, 1)
    assert len(started) == 3
    for other in (replace(config, model=ModelConfig(seed=5)), replace(config, device=DeviceConfig(cuda_graph=False))):
        first_start.start_compilers(other, GPU, 1)
    first_start.start_compilers(config, SimpleNamespace(kind="cuda", name="another"), 1)  # type: ignore[arg-type]
    assert len(started) == 6


@pytest.mark.parametrize("cache", ["cache/bough/kernels", "triton"])
def test_again_where_a_cache_is_gone(started: list[int], tmp_path: Path, cache: str) -> None:
    first_start.note_compiled(Config(), "GPU")
    (marker,) = (tmp_path / cache).glob("started_*")
    marker.unlink()
    first_start.start_compilers(Config(), GPU, 1)
    assert started == [16]


def test_not_where_kernels_are_not_ours(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first_start.start_compilers(Config(), SimpleNamespace(kind="cpu", name="CPU"), 1)  # type: ignore[arg-type]
    first_start.start_compilers(Config(device=DeviceConfig(custom_kernels=False)), GPU, 1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    first_start.start_compilers(Config(), GPU, 1)
    assert started == []


def test_not_where_there_is_no_home(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a user that the machine doesn't know, whose engine starts all the same."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    first_start.start_compilers(Config(), GPU, 1)
    first_start.note_compiled(Config(), "GPU")
    assert started == []
