"""The door of the kernel that multiplies rounded tokens by clusters, without a device: what it takes, and how it cuts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.packed_linear import PackedWeight, rounded, triton as packed
from bough.kernels.packed_linear.codes import Codes, Inputs

ASKED = Inputs("float8", 128)
ROOM = 227 << 10
"""Shared memory of a block."""
CLUSTERS = {2: 66, 3: 40, 4: 30, 6: 18, 8: 14}
"""By their blocks, those that run at once."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Launches, as they come: what was compiled, the grid, and arguments."""
    launches: list[dict[str, Any]] = []

    class Kernel:
        def __init__(self, *how: object) -> None:
            self.how = how

        def launch(self, blocks: int, arguments: tuple[Any, ...], _: int) -> None:
            launches.append({"how": self.how, "blocks": blocks, "arguments": arguments})

    monkeypatch.setattr(rounded, "is_ready", lambda _: True)
    monkeypatch.setattr(rounded, "most_clusters", lambda _, cut, *__: CLUSTERS[cut.cluster])
    monkeypatch.setattr(rounded, "_kernel", Kernel)
    monkeypatch.setattr(rounded, "tensor_map", lambda matrix, *box: (matrix, *box))
    monkeypatch.setattr(rounded, "current_stream", lambda _: 0)
    monkeypatch.setattr(packed, "_rounds", lambda *_: True)
    return launches


def weight_of(rows: int, depth: int) -> PackedWeight:
    values = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
    return packed.pack_codes(Codes("float8", values, torch.ones(rows, 1), depth, inputs=Inputs("float8")))


def weight_in_blocks(rows: int, depth: int, inputs: Inputs | None = ASKED) -> PackedWeight:
    values, scales = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn), torch.ones(-(-rows // 128), depth // 128)
    return packed.pack_codes(Codes("float8", values, scales, 128, rows=128, inputs=inputs))


@pytest.mark.parametrize("count", [33, 64, 128])
@pytest.mark.parametrize(
    ("rows", "depth", "split"), [(2048, 4096, 3), (3072, 1024, 2), (5120, 2048, 2), (8192, 512, 2)]
)
def test_blocks_have_scales_of_columns(
    rows: int, depth: int, split: int, count: int, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[torch.Tensor] = []

    def rounds(x: torch.Tensor, room: int, *, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        assert not powers
        scales.append(torch.ones(x.shape[1] // 128, room))
        return x.to(torch.float8_e4m3fn), scales[0]

    monkeypatch.setattr(packed, "rounded_tokens", rounds)
    packed.packed_linear(torch.zeros(count, depth, dtype=torch.bfloat16), weight_in_blocks(rows, depth))
    (launch,) = launched
    _, cut, block_t, form = launch["how"]
    assert (cut.split, cut.grouped, form.group, form.scale_rows) == (split, True, 128, 128)
    assert launch["arguments"][2] is scales[0]
    assert scales[0].shape == (depth // 128, block_t)
    assert launch["blocks"] * cut.block_n == rows * cut.split


@pytest.mark.parametrize("inputs", [None, Inputs("float8"), Inputs("float8", 64), Inputs("float8", 128, scale=0.5)])
def test_blocks_are_rounded_as_the_checkpoint_asks(inputs: Inputs | None, launched: list[dict[str, Any]]) -> None:
    x = torch.zeros(64, 1024, dtype=torch.bfloat16)
    assert packed._multiply_grouped(x, weight_in_blocks(512, 1024, inputs), None, None) is None
    assert packed._multiply_grouped(x[:32], weight_in_blocks(512, 1024), None, None) is None, "two terms are faster"
    assert not launched


@pytest.mark.parametrize("count", [40, 100, 128])
@pytest.mark.parametrize(("rows", "depth"), [(4096, 2048), (1536, 1024), (3328, 512)])
def test_blocks_cover_a_weight_once(
    rows: int, depth: int, count: int, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = torch.ones(count)
    monkeypatch.setattr(packed, "round_rows", lambda x: (x.to(torch.float8_e4m3fn), scales))
    out = packed.packed_linear(torch.zeros(count, depth, dtype=torch.bfloat16), weight_of(rows, depth))
    (launch,) = launched
    _, cut, block_t, _ = launch["how"]
    x_map, weight_map, given, bias, to, tokens, stride, k_steps, _ = launch["arguments"]
    assert (x_map[1] * cut.pair, weight_map[1]) == (block_t, cut.block_n)
    assert block_t >= tokens == count
    assert k_steps * 128 == depth
    assert k_steps >= cut.split
    assert launch["blocks"] * cut.block_n == rows * cut.split
    assert launch["blocks"] % cut.cluster == 0
    assert given is scales
    assert bias is None
    assert (to is out, stride) == (True, rows)


def test_other_weights_are_left_to_other_kernels(launched: list[dict[str, Any]]) -> None:
    fine, out = weight_of(512, 2048).handle, torch.empty(100, 512, dtype=torch.bfloat16)
    assert rounded.cut_for(100, fine, None, out) is not None
    assert rounded.cut_for(129, fine, None, out) is None
    assert rounded.cut_for(100, fine, torch.zeros(512), out) is None
    assert rounded.cut_for(100, fine, None, out.float()) is None
    assert rounded.cut_for(100, weight_of(528, 2048).handle, None, out) is None
    assert rounded.cut_for(100, weight_of(512, 2176 - 64).handle, None, out) is None
    in_small_blocks = Codes(
        "float8", torch.zeros(512, 2048, dtype=torch.float8_e4m3fn), torch.ones(16, 16), 128, rows=32
    )
    assert rounded.cut_for(100, packed.pack_codes(in_small_blocks).handle, None, out) is None, "64 rows have one scale"
    assert not launched


def test_tiles_do_not_outnumber_clusters(launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second wave would take as long as the first."""
    weight = weight_of(4096, 1024).handle
    out = torch.empty(100, 4096, dtype=torch.bfloat16)
    cut = rounded.cut_for(100, weight, None, out)
    assert cut is not None
    assert 4096 // cut.block_n // cut.pair <= CLUSTERS[cut.cluster]
    monkeypatch.setattr(rounded, "most_clusters", lambda *_: 31)
    assert rounded.cut_for(100, weight, None, out) is None
    assert not launched


@pytest.mark.parametrize(
    ("tokens", "rows", "depth", "expected"),
    [
        (64, 6144, 512, rounded.RoundedCut(2, 2, 2)),
        (65, 6144, 512, None),
        (64, 4096, 512, rounded.RoundedCut(2, 3, 2)),
        (100, 4096, 512, rounded.RoundedCut(2, 3)),
        (128, 4096, 512, rounded.RoundedCut(2, 3, 2)),
        (129, 4096, 512, None),
        (160, 4096, 6144, rounded.RoundedCut(2, 3, 2)),
        (200, 4096, 6144, rounded.RoundedCut(1, 2)),
        (100, 3072, 512, rounded.RoundedCut(2, 4, 2)),
        (200, 3072, 6144, rounded.RoundedCut(2, 4, 2)),
        (209, 3072, 6144, None),
        (48, 8192, 512, None),
    ],
)
def test_sizes_choose_the_cut(
    tokens: int, rows: int, depth: int, expected: rounded.RoundedCut | None, launched: list[dict[str, Any]]
) -> None:
    out = torch.empty(tokens, rows, dtype=torch.bfloat16)
    assert rounded.cut_for(tokens, weight_of(rows, depth).handle, None, out) == expected
    assert not launched


def test_every_cut_has_room() -> None:
    """For its stages, and in them for the sums that blocks send each other."""
    for rule in (*rounded.RULES, *rounded.BLOCK_RULES):
        cut = rule.cut
        for block_t in range(48, rounded.block_of(rule.tokens) + 1, 16):
            stages = cut.stages(block_t) * cut.stage_bytes(block_t)
            assert cut.stages(block_t) >= 3
            assert stages + 1024 + 2 * 8 * cut.stages(block_t) <= ROOM, cut
            assert cut.sums_bytes(block_t) <= stages, cut
            assert cut.groups * block_t <= 4 * 128, "registers"
            assert cut.cluster <= 8
            assert block_t // cut.pair % 8 == 0, "rows of which the copy engine turns eight alike"
