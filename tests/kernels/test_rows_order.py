"""Rows are taken once all that came before is complete: attention behind them reads pages that it may have written."""

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("kernels are interpreted, none is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from bough.kernels.draft_chain.triton import _ahead_kernel, _side_kernel  # noqa: E402
from bough.kernels.rows.triton import _take_kernel  # noqa: E402

WAITS, TRIGGERS = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def ptx(kernel: Any, signature: dict[str, str], constants: dict[str, object]) -> str:
    given = {name: signature.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, given, places)
    options = {"num_warps": 4, "launch_pdl": True}
    made: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return made


def test_rows() -> None:
    pointers = {"at": "*i64", **dict.fromkeys(("first", "second", "to_first", "to_second"), "*bf16")}
    text = ptx(_take_kernel, pointers, {"FIRST": 2048, "SECOND": 512, "BLOCK": 1024, "PDL": True})
    assert text.index(WAITS) < text.index(TRIGGERS)
    assert text.index(WAITS) < text.index("ld.global")


def test_vectors_side_by_side() -> None:
    pointers = {
        **dict.fromkeys(("left", "right", "left_weight", "right_weight", "out"), "*bf16"),
        **dict.fromkeys(("left_at", "right_at"), "*i64"),
        **dict.fromkeys(("left_eps", "left_offset", "right_eps", "right_offset"), "fp32"),
    }
    sides = {"LEFT_GATHERED": True, "RIGHT_GATHERED": False, "LEFT_NORMED": True, "RIGHT_NORMED": False}
    text = ptx(_side_kernel, pointers, {"LEFT": 64, "RIGHT": 64, **sides, "BLOCK": 64, "PDL": True})
    waits, triggers = ([at for at in range(len(text)) if text.startswith(each, at)] for each in (WAITS, TRIGGERS))
    assert len(waits) == len(triggers) == 2
    assert waits[0] < triggers[0] < waits[1] < triggers[1]


def test_places_ahead_let_nothing_start() -> None:
    pointers = dict.fromkeys(("slots", "kv_len", "counter", "room", "positions", "counters", "loc"), "*i64")
    pointers |= dict.fromkeys(("table", "seen", "starts", "small_slots"), "*i32")
    text = ptx(_ahead_kernel, pointers, {"ROWS": 128, "PDL": True})
    assert WAITS in text
    assert TRIGGERS not in text
