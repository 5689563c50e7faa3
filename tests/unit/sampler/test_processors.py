"""Logit processors: loaded by name, applied to the rows that name them, contained when they fail."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bough.core.errors import ConfigError
from bough.core.sampling import SamplingParams
from bough.core.step import SlotSetup
from bough.sampler import processors
from bough.sampler.processors import load_processors
from bough.sampler.shaping import RichSamples, Shaper

VOCAB = 8


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("made_processors")
    made.only = lambda logits, params: torch.where(  # type: ignore[attr-defined]
        torch.arange(VOCAB) == torch.tensor([int(each["token"]) for each in params])[:, None], logits, -torch.inf
    )
    made.broken = lambda logits, params: 1 / 0  # type: ignore[attr-defined]
    made.narrow = lambda logits, params: logits[:, :3]  # type: ignore[attr-defined]
    made.box = types.SimpleNamespace(inner=made.only)  # type: ignore[attr-defined]
    made.number = 5  # type: ignore[attr-defined]
    sys.modules["made_processors"] = made
    yield made
    del sys.modules["made_processors"]


def test_loading(module: types.ModuleType) -> None:
    found = load_processors(["a=made_processors:only", "b=made_processors:box.inner"])
    assert found == {"a": module.only, "b": module.only}


@pytest.mark.parametrize(
    "spec",
    ["", "a", "a=", "a=made_processors", "=made_processors:only", "a=made_processors:none", "a=nowhere:x",
     "a=made_processors:number"],
)  # fmt: skip
def test_what_can_not_be_loaded_says_why(module: types.ModuleType, spec: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_processors([spec])
    assert refused.value.param == "logit_processors"
    assert refused.value.why


def test_installed_packages_bring_theirs(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("theirs", "made_processors:only", processors.GROUP)
    monkeypatch.setattr(processors, "entry_points", lambda group: [point] if group == processors.GROUP else [])
    assert load_processors([]) == {"theirs": module.only}
    assert load_processors(["theirs=made_processors:broken"])["theirs"] is module.broken


def setup(slot: int, name: str | None, **params: Any) -> SlotSetup:
    sampling = SamplingParams(logit_processor=name, custom_params=params or None)
    return SlotSetup(slot=slot, sampling=sampling, rng_seed=0)


def test_rows_get_their_own(module: types.ModuleType) -> None:
    loaded = load_processors(
        ["only=made_processors:only", "broken=made_processors:broken", "narrow=made_processors:narrow"]
    )
    shaper = Shaper(VOCAB, torch.device("cpu"), loaded)
    assert shaper.names == ["broken", "narrow", "only"]
    logits = torch.arange(5 * VOCAB, dtype=torch.float32).reshape(5, VOCAB)
    setups = [
        setup(0, "only", token=2),
        setup(1, "broken"),
        setup(2, None),
        setup(3, "narrow"),
        setup(4, "only", token=6),
    ]
    at, none = np.arange(5), np.zeros(5, np.int64)
    shaped = shaper.shape(logits, RichSamples(at, setups, torch.zeros(5), at, none, None))
    assert shaped[0].argmax() == 2
    assert shaped[4].argmax() == 6
    assert torch.isinf(shaped[0]).sum() == VOCAB - 1
    for row in (1, 2, 3):
        assert torch.equal(shaped[row], logits[row])
    failed = shaper.take_failed()
    assert set(failed) == {1, 3}
    assert "ZeroDivisionError" in failed[1]
    assert shaper.take_failed() == {}
