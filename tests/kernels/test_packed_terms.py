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
    if kind == "float8":
        values = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
        return packed.pack_codes(Codes("float8", values, torch.ones(rows, 1), depth, inputs=inputs))
    scales = torch.ones(rows, depth // 128, dtype=torch.float16)
    return packed.pack_codes(Codes("int4", torch.zeros(rows, depth, dtype=torch.uint8), scales, 128))


def tokens_of(count: int, depth: int = 2048, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count, depth, dtype=dtype)


@pytest.mark.parametrize("kind", ["float8", "int4"])
@pytest.mark.parametrize("count", [1, 9, 17, 64])
def test_steps_cover_a_weight_once(kind: str, count: int, launched: list[dict[str, Any]]) -> None:
    weight = weight_of(kind)
    out = packed.packed_linear(tokens_of(count), weight)
    (launch,) = launched
    _, cut, block_t, form = launch["how"]
    x_map, weight_map, scales, _, to, *_, tokens, _, per_chunk, total, k_steps, _ = launch["arguments"]
    assert (x_map[1], weight_map[1:]) == (block_t, (cut.block_n, None if kind == "float8" else 64))
    assert block_t >= tokens == count
    assert (512 // cut.block_n * k_steps, k_steps * cut.block_k) == (total, 2048)
    assert (launch["blocks"] - 1) * per_chunk < total <= launch["blocks"] * per_chunk
    assert scales is None
    assert (cut.terms, form.group) == (2, 0 if kind == "float8" else 128)
    assert to is out


def test_more_tokens_are_multiplied_in_halves(launched: list[dict[str, Any]]) -> None:
    out = packed.packed_linear(tokens_of(100), weight_of("int4"))
    assert out.shape == (100, 512)
    counts = [launch["arguments"][7] for launch in launched]
    assert counts == [64, 36]
    first, second = (launch["arguments"][4] for launch in launched)
    assert (first.data_ptr(), second.data_ptr()) == (out.data_ptr(), out[64].data_ptr())


@pytest.mark.parametrize("count", [33, 100, 128])
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
    assert launch["arguments"][2] is scales


@pytest.mark.parametrize("why", ["type", "bias", "rows", "depth", "tokens", "strides"])
def test_others_are_left_to_other_kernels(why: str, launched: list[dict[str, Any]]) -> None:
    rows, depth = 512 + (32 if why == "rows" else 0), 2048 + (128 if why == "depth" else 0)
    dtype = torch.float16 if why == "type" else torch.bfloat16
    x = tokens_of(65 if why == "tokens" else 4, depth, dtype)
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
    cuts = [(kind, block_t, cut) for kind, by in terms.CUTS.items() for block_t, cuts in by.items() for cut in cuts]
    cuts += [("float8", block_t, cut) for block_t in (64, 96, 128) for cut in terms.ROUNDED_CUTS]
    for kind, block_t, cut in cuts:
        form = CodeForm(CODE_KINDS[kind], group=0 if kind == "float8" else 128)
        stages = cut.stages(block_t, form)
        facts = stages * (cut.block_k // 256 + cut.block_k // 128) * 4 * block_t + 3 * 8 * stages + 4
        taken = stages * cut.stage_bytes(block_t, form) + 1024 + facts + 1024
        assert stages >= 2, (kind, block_t, cut)
        assert taken * cut.programs_per_sm <= ROOM + 1024, (kind, block_t, cut)
        assert cut.block_n <= 256, "the copy engine's widest box"
        assert (cut.groups * 4 + cut.splitters + 1) * 32 <= 1024
