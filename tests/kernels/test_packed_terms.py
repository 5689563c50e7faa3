"""The door of the kernel that multiplies codes by terms of tokens, without a device: what it takes, and how it cuts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.codes_source import CODE_KINDS, CodeForm
from bough.kernels.packed_linear import PackedWeight, terms, triton as packed
from bough.kernels.packed_linear.codes import Codes, Inputs

ROOM = 227 << 10
"""Shared memory of a multiprocessor's blocks; each has 1 KiB of the system's besides."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Launches, as they come: what was compiled, the grid, and arguments."""
    launches: list[dict[str, Any]] = []

    class Kernel:
        def __init__(self, *how: object) -> None:
            self.how = how

        def launch(self, blocks: int, arguments: tuple[Any, ...], _: int) -> None:
            launches.append({"how": self.how, "blocks": blocks, "arguments": arguments})

    monkeypatch.setattr(terms, "is_ready", lambda _: True)
    monkeypatch.setattr(terms, "num_sms", lambda _: 132)
    monkeypatch.setattr(terms, "_kernel", Kernel)
    monkeypatch.setattr(terms, "tensor_map", lambda matrix, *box: (matrix, *box))
    monkeypatch.setattr(terms, "current_stream", lambda _: 0)
    return launches


def weight_of(kind: str, rows: int = 512, depth: int = 2048, inputs: Inputs | None = None) -> PackedWeight:
    """Codes of a form that `terms.CUTS` names."""
    if kind == "float8":
        values = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
        return packed.pack_codes(Codes("float8", values, torch.ones(rows, 1), depth, inputs=inputs))
    if kind == "float8 in blocks":
        values = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
        return packed.pack_codes(Codes("float8", values, torch.ones(rows // 128, depth // 128), 128, rows=128))
    scales = torch.ones(rows, depth // 128, dtype=torch.float16)
    zeros = torch.zeros(rows, depth // 128, dtype=torch.uint8) if kind == "int4 with zeros" else None
    return packed.pack_codes(Codes("int4", torch.zeros(rows, depth, dtype=torch.uint8), scales, 128, zero_OG=zeros))


def tokens_of(count: int, depth: int = 2048, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count, depth, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("float8", 1), ("float8", 9), ("float8", 24), ("float8 in blocks", 8), ("int4", 4), ("int4 with zeros", 9)],
)
def test_steps_cover_a_weight_once(kind: str, count: int, launched: list[dict[str, Any]]) -> None:
    weight = weight_of(kind)
    out = packed.packed_linear(tokens_of(count), weight)
    (launch,) = launched
    _, cut, block_t, form = launch["how"]
    x_map, weight_map, _, _, scales, _, to, *_, tokens, _, per_chunk, total, k_steps, _ = launch["arguments"]
    assert (x_map[1], weight_map[1:]) == (block_t, (cut.block_n, None if "float8" in kind else 64))
    assert block_t >= tokens == count
    assert (512 // cut.block_n * k_steps, k_steps * cut.block_k) == (total, 2048)
    assert (launch["blocks"] - 1) * per_chunk < total <= launch["blocks"] * per_chunk
    assert scales is None
    assert (cut.terms, form.group, form.has_zeros) == (2, 0 if kind == "float8" else 128, "zeros" in kind)
    assert to is out


@pytest.mark.parametrize(
    ("kind", "count"),
    [("float8", 25), ("float8 in blocks", 9), ("int4", 5), ("int4 with zeros", 8), ("int4 with zeros", 17)],
)
def test_more_tokens_than_are_split_in_time(kind: str, count: int, launched: list[dict[str, Any]]) -> None:
    out = torch.empty(count, 512, dtype=torch.bfloat16)
    assert terms.cut_for(tokens_of(count), weight_of(kind).handle, None, out) is None
    assert not launched


@pytest.mark.parametrize("count", [33, 64, 96])
def test_rounded_tokens_have_one_term(
    count: int, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = torch.ones(count)
    monkeypatch.setattr(packed, "_rounds", lambda *_: True)
    monkeypatch.setattr(packed, "round_rows", lambda x: (x.to(torch.float8_e4m3fn), scales))
    packed.packed_linear(tokens_of(count), weight_of("float8", inputs=Inputs("float8")))
    (launch,) = launched
    _, cut, block_t, _ = launch["how"]
    assert cut.terms == 1
    assert block_t >= count
    assert launch["arguments"][4] is scales


@pytest.mark.parametrize("why", ["type", "bias", "rows", "depth", "tokens", "strides"])
def test_others_are_left_to_other_kernels(why: str, launched: list[dict[str, Any]]) -> None:
    rows, depth = 512 + (32 if why == "rows" else 0), 2048 + (128 if why == "depth" else 0)
    dtype = torch.float16 if why == "type" else torch.bfloat16
    x = tokens_of(25 if why == "tokens" else 4, depth, dtype)
    if why == "strides":
        x = tokens_of(4, depth + 1)[:, :depth]
    bias = torch.zeros(rows) if why == "bias" else None
    out = torch.empty(len(x), rows, dtype=dtype)
    assert terms.cut_for(x, weight_of("float8", rows, depth).handle, bias, out) is None
    fine = torch.empty(4, 512, dtype=torch.bfloat16)
    assert terms.cut_for(tokens_of(4), weight_of("float8").handle, None, fine) is not None
    assert not launched


def test_every_cut_has_room() -> None:
    """For two stages, beside what else the blocks of a multiprocessor take."""
    split = [(kind, most, cut) for kind, by in terms.CUTS.items() for most, cuts in by.items() for cut in cuts]
    cuts = [(kind, max(8, 1 << (most - 1).bit_length()), cut) for kind, most, cut in split]
    cuts += [("float8", block_t, cut) for block_t in (64, 96) for cut in terms.ROUNDED_CUTS]
    for kind, block_t, cut in cuts:
        form = CodeForm(CODE_KINDS[kind.split()[0]], group=0 if kind == "float8" else 128)
        stages = cut.stages(block_t, form)
        facts = stages * (cut.block_k // 256 + cut.block_k // 128) * 4 * block_t + 4 * 8 * stages + 4
        taken = stages * cut.stage_bytes(block_t, form) + 1024 + facts + 1024
        assert stages >= 2, (kind, block_t, cut)
        assert taken * cut.programs_per_sm <= ROOM + 1024, (kind, block_t, cut)
        assert cut.block_n <= 256, "the copy engine's widest box"
        assert (cut.groups * 4 + cut.splitters + 1) * 32 <= 1024
