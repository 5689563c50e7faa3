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
FULL = hopper.LaunchSpread(8 * 132, 132)
"""A launch whose blocks have many items."""


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
        ("float4", 128, "silu", torch.bfloat16, INNER, True),
        ("float4", 129, "silu", torch.bfloat16, INNER, False),
        ("float8", 8, "gelu_tanh", torch.bfloat16, INNER, False),
        ("float8", 8, "silu", torch.float16, INNER, False),
        ("float4", 8, "silu", torch.bfloat16, 336, True),  # an odd number of 16 rows
        ("float8", 8, "silu", torch.bfloat16, 264, False),
    ],
)
def test_whom_it_serves(
    kind: str, pairs: int, activation: str, dtype: torch.dtype, inner: int, taken: bool, kernel: Kernel
) -> None:
    x = torch.zeros(4, WIDTH, dtype=dtype)
    gate_up, down = stacked(kind, 2 * inner, WIDTH), stacked(kind, WIDTH, inner)
    assert hopper.suits(x, gate_up, down, EXPERTS, pairs, activation) is taken


def test_a_launch_has_all_items_and_room_for_all_columns(kernel: Kernel) -> None:
    """576 columns end within a box of 128: those beyond are padding."""
    weight = stacked("float4", 2 * INNER, 576)
    x, out = torch.zeros(2, 576, dtype=torch.bfloat16), torch.zeros(6, INNER, dtype=torch.bfloat16)
    bias = torch.zeros(EXPERTS, 2 * INNER, dtype=torch.bfloat16)
    order = Sorted(torch.zeros(48, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), 6, EXPERTS)
    hopper.product(
        x, weight, out, order, block_t=8, per_token=3, halves=2, bias=bias, clamp=ClampedGate(alpha=1.5, limit=7.0)
    )
    ((blocks, (codes, scales, coded, work)),) = kernel.launches
    spread = hopper.spread_of(6, EXPERTS, 8, 132, lone=False)
    cut = hopper.cuts_of(weight, 576, 2, 8, INNER, spread)[0]
    assert blocks == min(132, 6 * INNER // cut.item_rows)
    assert (codes[0] is weight.codes, codes[1:]) == (True, (cut.item_rows, 64))
    assert (scales[0] is weight.scales, scales[1:]) == (True, (4 * cut.shape.slices, cut.item_rows))
    assert (coded.width, coded.groups) == (EXPERTS * 2 * INNER, 576 // 32)
    assert (work.rows, work.depth, work.boxes, work.num_batches, work.experts) == (INNER, 576, 5, 6, EXPERTS)
    assert (work.num_pairs, work.per_token, work.bias) == (6, 3, bias.data_ptr())
    assert (work.alpha, work.limit) == (1.5, 7.0)


@pytest.mark.parametrize("spread", [FULL, hopper.LaunchSpread(4, 132, lone=True)])
def test_every_cut_fits_a_multiprocessor(spread: hopper.LaunchSpread) -> None:
    for kind in ("float8", "float4"):
        for width in (512, 2048, 2880, 4096):
            for block_t, halves in ((8, 1), (8, 2), (16, 1), (16, 2)):
                cuts = hopper.cuts_of(stacked(kind, 384, width), width, halves, block_t, 384 // halves, spread)
                assert cuts or width * block_t > 2048 * 16
                for cut in cuts:
                    assert cut.stages >= 3
                    assert cut.shared_bytes + 1024 <= 227 << 10
                    assert cut.shape.row_tiles * cut.shape.slices < 32, "warps of a block, and the one that feeds them"


def test_steps_have_little_room_for_slices_that_are_not_there() -> None:
    """384 columns are three slices: a stage of two would leave a quarter of the warps idle."""
    assert hopper.cuts_of(stacked("float8", 128, 384), 384, 1, 8, 128, FULL)[0].shape.slices == 3
    assert hopper.cuts_of(stacked("float8", 128, 1024), 1024, 1, 8, 128, FULL)[0].shape.slices == 2


@pytest.mark.parametrize(
    ("kind", "rows", "width", "halves", "pairs", "row_tiles"),
    [
        ("float4", 2880, 2880, 2, 4, 6),  # 120 items of 132 blocks, each of 96 rows
        ("float4", 2880, 2880, 1, 4, 6),
        ("float4", 768, 2048, 2, 8, 3),  # 128 items of 48 rows; of 96 rows there would be 64
        ("float8", 768, 2048, 2, 8, 3),
        ("float8", 2048, 768, 1, 8, 8),
    ],
)
def test_items_of_a_lone_token_are_spread_evenly(
    kind: str, rows: int, width: int, halves: int, pairs: int, row_tiles: int
) -> None:
    weight = stacked(kind, halves * rows, width)
    cut = hopper.cuts_of(weight, width, halves, 8, rows, hopper.LaunchSpread(pairs, 132, lone=True))[0]
    assert (cut.shape.row_tiles, cut.lone) == (row_tiles, True)


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "halves", "row_tiles"),
    [
        (64, 2048, 768, 1, 16),  # of some 127 batches: 7.7 items of 256 rows for each block
        (3, 2048, 768, 1, 8),  # of 22 batches: two such items for some blocks, or three of 128 rows
        (64, 768, 2048, 2, 3),
    ],
)
def test_items_of_several_tokens_are_spread_evenly(
    tokens: int, rows: int, width: int, halves: int, row_tiles: int
) -> None:
    """128 experts, of which a token chooses eight."""
    weight = stacked("float8", halves * rows, width)
    spread = hopper.spread_of(8 * tokens, 128, 8, 132, lone=False)
    cut = hopper.cuts_of(weight, width, halves, 8, rows, spread)[0]
    assert (cut.shape.row_tiles, cut.lone) == (row_tiles, False)


def test_a_lone_token_has_an_item_for_each_pair(kernel: Kernel) -> None:
    """Not sorted: pairs are batches of their own, and the choice itself is the list of experts."""
    weight = stacked("float4", 2 * INNER, 576)
    x, out = torch.zeros(1, 576, dtype=torch.bfloat16), torch.zeros(3, INNER, dtype=torch.bfloat16)
    ids = torch.zeros(3, dtype=torch.int32)
    hopper.product(x, weight, out, Sorted(ids, ids, 3, EXPERTS, is_sorted=False), block_t=8, per_token=3, halves=2)
    ((blocks, (codes, _, _, work)),) = kernel.launches
    cut = hopper.cuts_of(weight, 576, 2, 8, INNER, hopper.LaunchSpread(3, 132, lone=True))[0]
    assert blocks == 3 * INNER // cut.item_rows
    assert codes[1] == cut.item_rows
    assert (work.num_pairs, work.num_batches) == (3, 3)
