"""The door of the Hopper kernel for weights in codes, without a device: what it takes, and how it cuts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.codes_source import CODE_GROUPS, CODE_KINDS, CodeForm
from bough.kernels.packed_linear import hopper, triton as packed
from bough.kernels.packed_linear.codes import Codes
from bough.kernels.packed_linear.decode import DeviceCodes, lay_out


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `launch_codes` was given, as it comes."""
    launches: list[dict[str, Any]] = []

    def launch(x: torch.Tensor, codes: torch.Tensor, coded: Any, form: CodeForm, *_: Any, **how: Any) -> None:
        launches.append({"x": x, "codes": codes, "coded": coded, "form": form, **how})

    monkeypatch.setattr(hopper, "launch_codes", launch)
    monkeypatch.setattr(hopper, "is_ready", lambda _: True)
    monkeypatch.setattr(hopper, "num_sms", lambda _: 132)
    return launches


def weight_of(kind: str, rows: int = 4096, depth: int = 4096, group: int = 128, *, zeros: bool = False) -> DeviceCodes:
    if kind == "float8":
        values = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
        made = lay_out(Codes("float8", values, torch.ones(rows, 1), depth))
    else:
        values = torch.zeros(rows, depth, dtype=torch.uint8)
        zero = torch.zeros(rows, depth // group, dtype=torch.uint8) if zeros else None
        made = lay_out(
            Codes("int4", values, torch.ones(rows, depth // group, dtype=torch.bfloat16), group, zero_OG=zero)
        )
    assert made is not None
    return made


@pytest.mark.parametrize("tokens", [1, 8, 9, 31, 64])
def test_every_step_is_some_blocks(tokens: int, launched: list[dict[str, Any]]) -> None:
    """Tiles and steps cover the weight once, and stages fit the shared memory of as many blocks as run side by side."""
    weight = weight_of("float8", 6144, 4096)
    x = torch.zeros(tokens, 4096, dtype=torch.bfloat16)
    packed.multiply(x, weight, None, torch.empty(tokens, 6144, dtype=torch.bfloat16))
    (launch,) = launched
    programs, per_chunk, total, k_steps = launch["cut"]
    block_t, block_n, block_k = launch["block"]
    assert block_t >= tokens
    assert (6144 // block_n * k_steps, k_steps * block_k) == (total, 4096)
    assert (programs - 1) * per_chunk < total <= programs * per_chunk
    assert launch["stages"] >= 2
    assert launch["form"] == CodeForm(kind=1, group=0, scale_rows=1, scale_type=0)


def test_groups_and_zero_points_are_passed_on(launched: list[dict[str, Any]]) -> None:
    weight = weight_of("int4", zeros=True)
    packed.multiply(
        torch.zeros(3, 4096, dtype=torch.bfloat16), weight, None, torch.empty(3, 4096, dtype=torch.bfloat16)
    )
    (launch,) = launched
    assert launch["codes"] is weight.codes
    assert launch["form"] == CodeForm(kind=2, tiles=2, group=128, scale_type=1, has_zeros=True)
    coded = launch["coded"]
    assert weight.zeros is not None
    assert (coded.scales, coded.zeros) == (weight.scales.data_ptr(), weight.zeros.data_ptr())
    assert (coded.width, coded.groups) == (4096, 32)
    assert coded.row_scales is None


@pytest.mark.parametrize("why", ["type", "bias", "group", "rows", "tokens", "kind"])
def test_others_are_left_to_other_kernels(why: str, launched: list[dict[str, Any]]) -> None:
    dtype = torch.float16 if why == "type" else torch.bfloat16
    tokens = 33 if why == "tokens" else 4
    rows = 4096 + (8 if why == "rows" else 0)
    weight = weight_of("int4", rows, group=64 if why == "group" else 128)
    if why == "kind":
        made = lay_out(Codes("int8", torch.zeros(rows, 4096, dtype=torch.uint8), torch.ones(rows, 32), 128))
        assert made is not None
        weight = made
    bias = torch.zeros(rows) if why == "bias" else None
    x, out = torch.zeros(tokens, 4096, dtype=dtype), torch.empty(tokens, rows, dtype=dtype)
    assert hopper.cut_for(x, weight, bias, out) is None
    usual = torch.zeros(4, 4096, dtype=torch.bfloat16)
    assert hopper.cut_for(usual, weight_of("int4"), None, torch.empty_like(usual)) is not None


@pytest.mark.parametrize("kind", hopper._CUTS)
def test_every_cut_has_room_for_stages(kind: str) -> None:
    for block_t, cuts in hopper._CUTS[kind].items():
        for cut in cuts:
            form = CodeForm(CODE_KINDS[kind], cut.tiles, CODE_GROUPS[kind][1])
            assert cut.stages(block_t, form) >= 2, (block_t, cut)
            assert cut.block_n <= 256, "the copy engine's widest box"
