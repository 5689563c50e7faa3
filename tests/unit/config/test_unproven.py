"""What was not run on hardware is said, and the page says the same."""

from __future__ import annotations

from pathlib import Path

from bough.config.server_args import build_config
from bough.config.unproven import UNPROVEN, unproven

PAGE = Path(__file__).parents[3] / "docs" / "parallel.md"


def test_the_page_has_the_same_table() -> None:
    text = PAGE.read_text()
    table = text[text.index("## Unproven on hardware") :]
    rows = [
        tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table.splitlines() if line.startswith("| ")
    ]
    assert rows[1:] == [(each.what, each.tried) for each in UNPROVEN]


def test_said_by_those_that_use_it() -> None:
    assert unproven(build_config().parallel, "cuda") == []
    assert unproven(build_config(tp_size=2, dp_size=2).parallel, "cpu") == []
    assert [line.partition(":")[0] for line in unproven(build_config(tp_size=2, attn_cp_size=2).parallel, "cuda")] == [
        "NCCL between several GPUs",
        "shared contexts (--attn-cp-size) on GPUs",
    ]
    far = build_config(tp_size=2, nnodes=2, dist_init_addr="10.0.0.1:20000", dist_secret="a long secret").parallel
    assert len(unproven(far, "cpu")) == 1
