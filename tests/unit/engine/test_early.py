"""What happens beside the imports of an engine."""

from __future__ import annotations

import pytest

from bough.config.concerns import Config, DeviceConfig
from bough.core.errors import ConfigError
from bough.engine import early
from bough.engine.early import Early
from bough.platform import detect
from bough.platform.cuda_driver import query_gpu


def test_the_facts_are_those_of_the_device_asked_for() -> None:
    told = Early(Config(device=DeviceConfig(device="cpu")), 0).facts()
    expected = detect("cpu")
    assert (told.kind, told.arch, told.total_bytes) == (expected.kind, expected.arch, expected.total_bytes)


def test_a_device_that_is_not_there_is_told_when_it_is_asked_for() -> None:
    if query_gpu() is not None:
        pytest.skip("needs a machine without a GPU")
    looking = Early(Config(device=DeviceConfig(device="cuda")), 0)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no GPU is visible"):
            looking.facts()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_gpu_is_woken_once_its_free_memory_is_known(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    heard: list[object] = []
    facts = detect("cpu")
    object.__setattr__(facts, "kind", kind)
    monkeypatch.setattr(early, "detect", lambda device: heard.append(device) or facts)
    monkeypatch.setattr(early, "open_context", lambda rank: heard.append(rank))
    assert Early(Config(), 3).facts() is facts
    assert heard == (["auto", 3] if kind == "cuda" else ["auto"])
