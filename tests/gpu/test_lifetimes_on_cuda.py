"""The memory plan on the device, for each lifetime of what layers keep: what the allocator gives out is what was planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lifetimes import LIFETIMES, built

from bough.config.memory_plan import show_bytes

pytestmark = pytest.mark.xdist_group("large models")
_TABLES = 24 << 20
"""Bytes of rotary tables, page tables and step buffers, which the plan counts among the runtime's own."""


@pytest.mark.parametrize("name", LIFETIMES)
def test_what_is_allocated_is_what_was_planned(name: str, tmp_path: Path) -> None:
    """To 1 %, beside tables and buffers."""
    made = built(
        name, tmp_path, "cuda", allocated=torch.cuda.memory_allocated, max_total_tokens=1_048_576, cuda_graph=False,
        max_running_requests=128, first_layer_table="off",
    )  # fmt: skip
    plan, (weights, rest) = made.plan, made.allocated
    kept = plan.kv_bytes + plan.state_bytes
    print(
        f"{name:<20} weights {show_bytes(plan.weight_bytes):>10} {show_bytes(weights):>10}  "
        f"KV and states {show_bytes(kept):>10} {show_bytes(rest):>10}"
    )
    assert made.held.weight_bytes == pytest.approx(plan.weight_bytes, rel=0.01)
    assert abs(weights - plan.weight_bytes) <= 0.01 * plan.weight_bytes + _TABLES
    assert made.held.kv_bytes == pytest.approx(plan.kv_bytes, rel=0.01)
    assert made.held.state_bytes == pytest.approx(plan.state_bytes, rel=0.01)
    assert abs(rest - kept) <= 0.01 * kept + _TABLES
    assert kept > 10 * _TABLES, "what is planned is more than what is not"
