"""The door of the Hopper kernel for experts in codes, without a device: whom it serves, and what a launch is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bough.config.model_facts import ClampedGate
from bough.kernels.moe.triton import Sorted
from bough.kernels.packed_linear.codes import Codes
from bough.kernels.packed_linear.decode import DeviceCodes, lay_out
from bough.kernels.packed_moe import hopper

EXPERTS, WIDTH, INNER = 8, 512, 256


def stacked(kind: str, rows: int, cols: int) -> DeviceCodes:
    rows *= EXPERTS
    if kind == "float8":
        codes = Codes("float8", torch.zeros(rows, cols, dtype=torch.float8_e4m3fn), torch.ones(rows, 1), cols)
    else:
        scales = torch.ones(rows, cols // 32, dtype=torch.bfloat16)
        codes = Codes("float4", torch.zeros(rows, cols, dtype=torch.uint8), scales, 32)
    made = lay_out(codes)
    assert made is not None
    return made


class Kernel:
    def __init__(self) -> None:
        self.launches: list[tuple[int, Any]] = []

    def launch(self, blocks: int, arguments: Any, stream: int) -> None:
        self.launches.append((blocks, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(hopper, "_kernel", lambda *given: made)
    monkeypatch.setattr(hopper, "_is_ready", lambda *_: True)
    monkeypatch.setattr(hopper, "num_sms", lambda _: 132)
    monkeypatch.setattr(hopper, "tensor_map", lambda matrix, rows, columns: (matrix, rows, columns))
    monkeypatch.setattr(hopper, "current_stream", lambda _: 0)
    return made


@pytest.mark.parametrize(
    ("kind", "pairs", "activation", "dtype", "inner", "taken"),
    [
        ("float8", 8, "silu", torch.bfloat16, INNER, True),
        ("float8", 96, "silu", torch.bfloat16, INNER, True),
        ("float8", 97, "silu", torch.bfloat16, INNER, False),
        ("float4", 16, "silu", torch.bfloat16, INNER, True),
        ("float4", 17, "silu", torch.bfloat16, INNER, False),
        ("float8", 8, "gelu_tanh", torch.bfloat16, INNER, False),
        ("float8", 8, "silu", torch.float16, INNER, False),
        ("float8", 8, "silu", torch.bfloat16, 288, False),
    ],
)
def test_whom_it_serves(
    kind: str, pairs: int, activation: str, dtype: torch.dtype, inner: int, taken: bool, kernel: Kernel
) -> None:
    x = torch.zeros(4, WIDTH, dtype=dtype)
    gate_up, down = stacked(kind, 2 * inner, WIDTH), stacked(kind, WIDTH, inner)
    assert hopper.suits(x, gate_up, down, EXPERTS, pairs, activation) is taken


def test_a_launch_has_all_items_and_room_for_all_columns(kernel: Kernel) -> None:
    """576 columns end within a step of 256: those beyond are padding."""
    weight = stacked("float4", 2 * INNER, 576)
    x, out = torch.zeros(2, 576, dtype=torch.bfloat16), torch.zeros(6, INNER, dtype=torch.bfloat16)
    bias = torch.zeros(EXPERTS, 2 * INNER, dtype=torch.bfloat16)
    order = Sorted(torch.zeros(48, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), 6, EXPERTS)
    hopper.product(
        x, weight, out, order, block_t=8, per_token=3, halves=2, bias=bias, clamp=ClampedGate(alpha=1.5, limit=7.0)
    )
    ((blocks, (codes, coded, work)),) = kernel.launches
    assert blocks == 6 * INNER // 64
    assert (codes[0] is weight.codes, codes[1:]) == (True, (64, 64))
    assert (coded.width, coded.groups) == (EXPERTS * 2 * INNER, 576 // 32)
    assert (work.rows, work.depth, work.k_steps, work.num_batches, work.experts) == (INNER, 576, 3, 6, EXPERTS)
    assert (work.num_pairs, work.per_token, work.bias) == (6, 3, bias.data_ptr())
    assert (work.alpha, work.limit) == (1.5, 7.0)


def test_every_cut_fits_a_multiprocessor() -> None:
    for kind in ("float8", "float4"):
        for width in (512, 2048, 2880, 4096):
            for block_t in (8, 16):
                cut = hopper._cut_of(stacked(kind, 64, width), width, 2, block_t)
                if cut is not None:
                    stages = cut.stages(cut.programs)
                    room = cut.programs * (stages * cut.stage_bytes + cut.token_bytes + 2048)
                    assert stages >= 3
                    assert room <= 227 << 10
