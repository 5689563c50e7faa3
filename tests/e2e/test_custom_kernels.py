"""Kernels that are compiled on first use, and the two flags that do without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bough

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("flags", "compiles"),
    [
        ({}, True),
        pytest.param({"custom_kernels": False}, False, marks=pytest.mark.long),
        ({"custom_kernels": True, "safe_mode": True}, False),
    ],
)
def test_nothing_is_compiled_where_it_is_forbidden(
    tiny_settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    compiles: bool,
) -> None:
    called, compiler = tmp_path / "called", tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\necho once more >> {called}\necho 'error: out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with bough.Engine(**{**tiny_settings, "custom_kernels": True, **flags}) as engine:
        answer = engine.generate(input_ids=[5, 6, 7], sampling_params={"temperature": 0, "max_new_tokens": 4})
    assert isinstance(answer, dict)
    assert answer["meta_info"]["completion_tokens"] == 4, "torch computes, with or without a word from the compiler"
    assert called.exists() == compiles
