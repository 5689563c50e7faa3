"""Which kernels a step launches, by architecture: a committed list, so that a change of the model code that adds, drops or
reorders one is seen. `python tests/models/test_kernel_calls.py` writes the list anew."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_calls import CONFIGS, DECODE, PREFILL, calls_of, in_parts, in_place, tiny_model

LIST = Path(__file__).with_name("kernel_calls.json")
STEPS: dict[str, dict[str, Any]] = {
    "decode": {"queries": DECODE},
    "decode, products added in place": {"queries": DECODE, "onto": in_place},
    "prefill, last layer narrowed": {"queries": PREFILL, "narrows": True},
    "prefill, last layer narrowed, products added in place": {"queries": PREFILL, "narrows": True, "onto": in_place},
}
ONTO: dict[str, Callable[..., Any]] = {"in place": in_place, "in parts": in_parts}


def calls_by_step(architecture: str, folder: Path) -> dict[str, list[str]]:
    model = tiny_model(architecture, folder)
    return {name: calls_of(model, **step)[0] for name, step in STEPS.items()}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_step_launches_what_it_did(architecture: str, tmp_path: Path) -> None:
    assert calls_by_step(architecture, tmp_path) == json.loads(LIST.read_text())[architecture]


@pytest.mark.parametrize("onto", ONTO)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_how_products_are_added_changes_nothing(architecture: str, onto: str, tmp_path: Path) -> None:
    model = tiny_model(architecture, tmp_path)
    _, expected = calls_of(model, PREFILL)
    for narrows in (False, True):
        _, logits = calls_of(model, PREFILL, onto=ONTO[onto], narrows=narrows)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {name: calls_by_step(name, Path(folder)) for name in CONFIGS}
    LIST.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0)
