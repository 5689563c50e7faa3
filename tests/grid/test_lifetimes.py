"""The memory plan, for each lifetime of what layers keep: bytes of weights, of KV and of states are those that are held."""

from __future__ import annotations

from pathlib import Path

import pytest
from lifetimes import LIFETIMES, built


@pytest.mark.parametrize("name", LIFETIMES)
def test_what_is_held_is_what_was_planned(name: str, tmp_path: Path) -> None:
    """To 1 %. Weights in bfloat16: the few numbers that are kept in float32 are not counted apart."""
    made = built(
        name, tmp_path, "cpu", allocated=lambda: 0, dtype="bfloat16", max_total_tokens=8192, max_running_requests=4,
        first_layer_table="off",
    )  # fmt: skip
    plan, held = made.plan, made.held
    assert held.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.01)
    assert held.kv_bytes == pytest.approx(plan.kv_bytes, rel=0.01)
    assert held.state_bytes == pytest.approx(plan.state_bytes, rel=0.01)
    assert bool(plan.state_bytes) == name.startswith("states")
    assert len(plan.groups) == (2 if name in ("windows", "chunks", "KV of other layers", "several streams") else 1)
