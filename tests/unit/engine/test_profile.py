"""A profile of a CPU's steps names the compiled kernels, and leaves them as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bough.core.messages import Profile
from bough.engine.profile import Profiler
from bough.kernels.cpu_build import library
from bough.kernels.norm import cpu as norm


def test_compiled_kernels_are_in_the_profile(tmp_path: Path) -> None:
    loaded = library()
    if loaded is None:
        pytest.skip("this machine has no compiled kernels")
    plain = loaded.bough_rms_norm
    profiler = Profiler(tmp_path, cuda=False)
    profiler.handle(Profile(call=1, start=True, num_steps=2))
    for step in (1, 2):
        norm.rms_norm(torch.ones(4, 64), torch.ones(64), 1e-6)
        profiler.look(step)
    found = profiler.handle(Profile(call=2, start=False))
    rows = {row["name"]: row for row in found["top"]}
    assert rows["bough_rms_norm"]["calls"] == 2
    names = {event.get("name") for event in json.loads(Path(found["file"]).read_text())["traceEvents"]}
    assert "bough_rms_norm" in names
    assert loaded.bough_rms_norm is plain
