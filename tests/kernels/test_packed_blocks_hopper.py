"""The door of the Hopper kernel for experts in blocks of FP8, without a device: whom it serves, what a launch is given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.moe.grouping import Grouping
from bough.kernels.packed_linear.codes import Codes, Inputs
from bough.kernels.packed_linear.decode import DeviceCodes, lay_out
from bough.kernels.packed_moe import blocks_hopper, triton as experts

EXPERTS, WIDTH, INNER = 4, 640, 384
ASKED = Inputs("float8", 128)


def stacked(rows: int, cols: int, *, block: int = 128, group: int = 128) -> DeviceCodes:
    rows *= EXPERTS
    values = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
    made = lay_out(Codes("float8", values, torch.ones(-(-rows // block), cols // group), group, rows=block))
    assert made is not None
    return made


def both(**given: int) -> tuple[DeviceCodes, DeviceCodes]:
    return stacked(2 * INNER, WIDTH, **given), stacked(WIDTH, INNER, **given)


@pytest.mark.parametrize(
    ("inputs", "taken"),
    [
        (ASKED, True),
        (Inputs("float8", 128, power_of_two=True), True),
        (None, False),
        (Inputs("float8"), False),
        (Inputs("float8", 64), False),
        (Inputs("int8", 128), False),
        (Inputs("float8", 128, scale=0.5), False),
    ],
)
def test_tokens_are_rounded_as_the_checkpoint_asks(inputs: Inputs | None, taken: bool) -> None:
    assert blocks_hopper.takes(*both(), EXPERTS, WIDTH, inputs) is taken


def test_weights_that_it_takes() -> None:
    assert blocks_hopper.takes(*both(block=64), EXPERTS, WIDTH, ASKED)
    assert not blocks_hopper.takes(*both(block=32), EXPERTS, WIDTH, ASKED), "a tile has one scale"
    assert not blocks_hopper.takes(*both(group=64), EXPERTS, WIDTH, ASKED), "a step has one scale"
    assert not blocks_hopper.takes(stacked(2 * 416, WIDTH), stacked(WIDTH, 384), EXPERTS, WIDTH, ASKED), "half a tile"


@pytest.mark.parametrize(
    ("of_each", "activation", "taken"), [(60, "silu", True), (59, "silu", False), (60, "gelu_tanh", False)]
)
def test_many_tokens_take_it(of_each: int, activation: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_hopper, "is_ready", lambda *_: True)
    x = torch.zeros(3, WIDTH, dtype=torch.bfloat16)
    assert blocks_hopper.suits(x, *both(), EXPERTS, of_each * EXPERTS, activation, ASKED) is taken
    assert not blocks_hopper.suits(x.float(), *both(), EXPERTS, of_each * EXPERTS, activation, ASKED)


@pytest.mark.parametrize("gated", [False, True])
def test_a_launch_covers_all_columns_and_has_scales_of_both_sides(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, Any]] = []

    class Kernel:
        def launch(self, blocks: int, arguments: Any, stream: int) -> None:
            launches.append((blocks, arguments))

    monkeypatch.setattr(blocks_hopper, "_loaded", lambda *_: blocks_hopper._Loaded(Kernel(), 66))  # type: ignore[arg-type]
    monkeypatch.setattr(blocks_hopper, "tensor_map", lambda matrix, rows: (matrix, rows))
    monkeypatch.setattr(blocks_hopper, "current_stream", lambda _: 0)
    weight, depth, columns = (both()[0], WIDTH, INNER) if gated else (both()[1], INNER, WIDTH)
    groups = depth // 128
    pitch = -(-(depth + 4 * groups) // 16) * 16
    rows = blocks_hopper.RoundedRows(torch.zeros(192, pitch, dtype=torch.uint8), depth)
    out = torch.zeros(192, columns, dtype=torch.bfloat16)
    some = torch.zeros(1, dtype=torch.int32)
    grouping = Grouping(some, some, some, 192)
    blocks_hopper.product(rows, weight, out, grouping, EXPERTS, gated=gated)
    ((blocks, (x_map, weight_map, out_map, _, _, scales, f_tiles, steps, weight_rows, apart, width)),) = launches
    assert blocks == 132
    assert (x_map[0].shape, x_map[0].stride(), x_map[1]) == ((192, depth), (pitch, 1), 64)
    assert (weight_map[0] is weight.codes, weight_map[1], out_map[1]) == (True, 64, 64)
    assert (scales.tokens, scales.pitch) == (rows.memory.data_ptr() + depth, pitch // 4)
    assert (scales.width, scales.weight_rows) == (weight.scales.shape[1], 128)
    assert scales.width * scales.weight_rows == weight.num_rows
    of_pair = 2 * (64 if gated else 128)
    assert (f_tiles - 1) * of_pair < columns <= f_tiles * of_pair
    assert (steps, weight_rows, width) == (groups, weight.num_rows // EXPERTS, columns)
    assert apart == (columns if gated else 64), "gate and up are apart, neighbours are not"


def _as_the_kernel(arguments: Any, rows: blocks_hopper.RoundedRows, weight: DeviceCodes, *, gated: bool) -> None:
    """What `blocks_hopper.cu` does with its arguments: where it reads, which scales it takes, where it writes."""
    (x, x_box), (codes, codes_box), (out, _), tiles, num_tiles, scales, *sizes = arguments
    f_tiles, steps, weight_rows, apart, columns = sizes
    assert (x_box, codes_box) == (64, 64)
    of_tokens = rows.memory.view(torch.float32).flatten()[rows.width // 4 :]
    of_weights, of_tile = weight.scales.flatten(), 64 if gated else 128
    weights = torch.nn.functional.pad(codes.view(torch.float8_e4m3fn).float(), (0, 0, 0, 512))  # zero outside
    for item in range(int(num_tiles) * f_tiles):
        row, end, expert, _ = tiles[item // f_tiles].tolist()
        for rank, own in itertools.product((0, 1), (0, 64)):
            column = (2 * (item % f_tiles) + rank) * of_tile
            if row + own >= end:
                continue
            first = expert * weight_rows + column
            sums = torch.zeros(64, 128)
            for step in range(steps):
                of_step = slice(128 * step, 128 * step + 128)
                token = of_tokens[(row + own + torch.arange(64)) * scales.pitch + step]
                for half, begin in enumerate((first, first + apart)):
                    by = of_weights[step * scales.width + min(begin // scales.weight_rows, scales.width - 1)]
                    part = x[row + own : row + own + 64, of_step].float() @ weights[begin : begin + 64, of_step].t()
                    sums[:, 64 * half : 64 * half + 64] += part * token[:, None] * by
            made = (
                torch.nn.functional.silu(sums[:, :64].bfloat16().float()) * sums[:, 64:].bfloat16() if gated else sums
            )
            for begin in range(column, min(column + of_tile, columns), 64):
                some = made[:, begin - column : begin - column + 64]
                out[row + own : row + own + 64, begin : begin + 64] = some[:, : columns - begin]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_tiles_and_scales_are_those_of_the_product(gated: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of 1, 64, none and 190 tokens; columns that are no multiple of a pair's."""
    torch.manual_seed(3)
    launches: list[Any] = []

    class Kernel:
        def launch(self, blocks: int, arguments: Any, stream: int) -> None:
            launches.append(arguments)

    monkeypatch.setattr(blocks_hopper, "_loaded", lambda *_: blocks_hopper._Loaded(Kernel(), 66))  # type: ignore[arg-type]
    monkeypatch.setattr(blocks_hopper, "tensor_map", lambda matrix, rows: (matrix, rows))
    monkeypatch.setattr(blocks_hopper, "current_stream", lambda _: 0)
    depth, columns = 256, 320
    weight_rows = (2 if gated else 1) * columns
    values = torch.randn(EXPERTS * weight_rows, depth).to(torch.float8_e4m3fn)
    weight_scales = torch.rand(-(-len(values) // block), depth // 128) + 0.1
    weight = lay_out(Codes("float8", values, weight_scales, 128, rows=block))
    assert weight is not None
    stretches = [(0, 1, 0), (64, 64, 1), (128, 190, 3)]  # first row, tokens, expert
    tiles = [(first + at, first + -(-count // 64) * 64, expert, 0)
             for first, count, expert in stretches for at in range(0, count, blocks_hopper.HEIGHT)]  # fmt: skip
    pitch = -(-(depth + 4 * (depth // 128)) // 16) * 16
    rows = blocks_hopper.RoundedRows(torch.zeros(384, pitch, dtype=torch.uint8), depth)
    rows.codes.copy_(torch.randn(384, depth))
    rows.scales.copy_(torch.rand(384, depth // 128) + 0.1)
    out = torch.full((384, columns), 7.0, dtype=torch.bfloat16)
    grouping = Grouping(torch.zeros(0), torch.tensor(tiles, dtype=torch.int32), torch.tensor([len(tiles)]), 384)
    blocks_hopper.product(rows, weight, out, grouping, EXPERTS, gated=gated)
    (arguments,) = launches
    _as_the_kernel(arguments, rows, weight, gated=gated)
    tokens = rows.codes.double() * rows.scales.double().repeat_interleave(128, 1)
    dense = values.double() * weight_scales.double().repeat_interleave(block, 0)[: len(values)].repeat_interleave(
        128, 1
    )
    for first, count, expert in stretches:
        made = tokens[first : first + count] @ dense[expert * weight_rows : (expert + 1) * weight_rows].t()
        if gated:
            made = torch.nn.functional.silu(made[:, :columns]) * made[:, columns:]
        torch.testing.assert_close(out[first : first + count].double(), made, rtol=3e-2, atol=3e-2)
    assert bool((out[320:] == 7).all()), "rows of no tile"


def test_few_steps_are_not_staggered() -> None:
    """A warpgroup that is behind by a whole tile would miss the other's signal."""
    assert blocks_hopper._defines(4, gated=False)["LAG"] == 0
    assert blocks_hopper._defines(5, gated=False)["LAG"] == 1


def test_experts_that_ask_for_the_same_are_rounded() -> None:
    def codes(rows: int, cols: int, inputs: Inputs | None) -> Codes:
        values = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
        return Codes("float8", values, torch.ones(-(-rows // 128), cols // 128), 128, rows=128, inputs=inputs)

    for second, expected in ((ASKED, ASKED), (None, None)):
        packed = experts.pack_experts(
            [codes(512, 256, ASKED) for _ in range(2)], [codes(256, 256, each) for each in (ASKED, second)]
        )
        assert packed is not None
        assert packed.handle.inputs == expected
