"""The door of the kernel that multiplies codes by terms of tokens, without a device: what it takes, and how it cuts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.codes_source import CODE_KINDS, CodeForm
from bough.kernels.packed_linear import PackedWeight, terms, triton as packed
from bough.kernels.packed_linear.codes import Codes
from bough.kernels.packed_linear.hopper import form_of

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


def weight_of(kind: str, rows: int = 512, depth: int = 2048) -> PackedWeight:
    """Codes of a form that `terms.RULES` names."""
    if kind == "float8":
        values = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
        return packed.pack_codes(Codes("float8", values, torch.ones(rows, 1), depth))
    if kind == "float8 in blocks":
        values = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
        return packed.pack_codes(Codes("float8", values, torch.ones(-(-rows // 128), depth // 128), 128, rows=128))
    scales = torch.ones(rows, depth // 128, dtype=torch.float16)
    zeros = torch.zeros(rows, depth // 128, dtype=torch.uint8) if kind == "int4 with zeros" else None
    return packed.pack_codes(Codes("int4", torch.zeros(rows, depth, dtype=torch.uint8), scales, 128, zero_OG=zeros))


def tokens_of(count: int, depth: int = 2048, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count, depth, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("float8", 1), ("float8", 9), ("float8", 32), ("float8 in blocks", 8), ("int4", 4), ("int4", 24),
     ("int4 with zeros", 9)],
)  # fmt: skip
def test_steps_cover_a_weight_once(kind: str, count: int, launched: list[dict[str, Any]]) -> None:
    weight = weight_of(kind)
    out = packed.packed_linear(tokens_of(count), weight)
    (launch,) = launched
    _, cut, block_t, form = launch["how"]
    x_map, weight_map, scales_map, _, _, to, *_, tokens, _, per_chunk, total, k_steps, _ = launch["arguments"]
    assert (x_map[1], weight_map[1:]) == (block_t, (cut.block_n, None))
    if cut.fetched:
        assert scales_map[1:] == (cut.block_k // 128, cut.block_n)
    assert block_t >= tokens == count
    assert (512 // cut.block_n * k_steps, k_steps * cut.block_k) == (total, 2048)
    if cut.cluster > 1:
        assert (launch["blocks"], per_chunk) == (512 // cut.block_n * cut.cluster, k_steps)
        assert k_steps >= cut.cluster
    else:
        assert (launch["blocks"] - 1) * per_chunk < total <= launch["blocks"] * per_chunk
    assert (form.group, form.has_zeros) == (0 if kind == "float8" else 128, "zeros" in kind)
    assert to is out


@pytest.mark.parametrize(
    ("kind", "count"),
    [("float8", 33), ("float8 in blocks", 33), ("int4", 33), ("int4 with zeros", 17)],
)
def test_more_tokens_than_are_split_in_time(kind: str, count: int, launched: list[dict[str, Any]]) -> None:
    out = torch.empty(count, 512, dtype=torch.bfloat16)
    assert terms.cut_for(tokens_of(count), weight_of(kind).handle, None, out) is None
    assert not launched


@pytest.mark.parametrize(
    ("kind", "count", "rows", "depth", "expected"),
    [
        ("float8", 4, 6144, 512, terms.TermsCut(1, 256, 2, 7, cluster=2)),
        ("float8", 4, 3072, 1024, terms.TermsCut(1, 256, 2, 7, cluster=4)),
        ("float8", 4, 8192, 512, terms.TermsCut(2, 256, 1, 7)),
        ("float8", 24, 6144, 1024, terms.TermsCut(4, 256, 1, 7, cluster=4)),
        ("float8", 24, 2048, 2048, terms.TermsCut(4, 256, 1, 7, cluster=8)),
        ("float8", 24, 2048, 1024, terms.TermsCut(4, 256, 1, 7, cluster=4)),  # too few columns for eight blocks
        ("float8", 24, 1152, 2048, terms.TermsCut(2, 256, 1, 15)),  # no whole tiles of 256 rows
        ("float8", 32, 8192, 512, terms.TermsCut(2, 256, 1, 11)),
        ("int4", 1, 6144, 1024, terms.TermsCut(4, 256, 1, 7, cluster=4, fetched=True)),
        ("int4", 1, 8192, 512, terms.TermsCut(1, 512, 2, 3, fetched=True)),
        ("int4", 2, 8192, 512, terms.TermsCut(4, 256, 1, 7, fetched=True)),
        ("int4", 16, 8192, 512, terms.TermsCut(4, 512, 1, 11, at_once=3, fetched=True)),
        ("int4", 9, 6144, 1024, terms.TermsCut(4, 256, 1, 11, at_once=2, cluster=4, fetched=True)),
        ("int4", 16, 8192, 768, terms.TermsCut(2, 256, 1, 7, fetched=True)),  # half a step of 512 columns
        ("int4", 24, 8192, 512, terms.TermsCut(2, 256, 1, 7, fetched=True)),
    ],
)
def test_sizes_choose_the_cut(
    kind: str, count: int, rows: int, depth: int, expected: terms.TermsCut, launched: list[dict[str, Any]]
) -> None:
    out = torch.empty(count, rows, dtype=torch.bfloat16)
    assert terms.cut_for(tokens_of(count, depth), weight_of(kind, rows, depth).handle, None, out) == expected
    assert not launched


def test_large_weights_are_not_cut_as_small_ones(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above this number of values memory is busy enough without clusters."""
    out = torch.empty(24, 512, dtype=torch.bfloat16)
    weight = weight_of("float8").handle
    assert terms.cut_for(tokens_of(24), weight, None, out) == terms.TermsCut(4, 256, 1, 7, cluster=8)
    large = tuple(rule._replace(values=min(rule.values, 512 * 2048 - 1)) for rule in terms.RULES["float8"][4:6])
    monkeypatch.setitem(terms.RULES, "float8", large + terms.RULES["float8"][6:])
    assert terms.cut_for(tokens_of(24), weight, None, out) == terms.TermsCut(2, 256, 1, 15)
    assert not launched


@pytest.mark.parametrize("group", [128, 2048])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_scales_that_are_not_fetched(with_zeros: bool, group: int, launched: list[dict[str, Any]]) -> None:
    """Scales of rows, and float32 ones, have cuts of their own."""
    values, scales = torch.zeros(512, 2048, dtype=torch.uint8), torch.ones(512, 2048 // group)
    zeros = torch.zeros_like(scales, dtype=torch.uint8) if with_zeros else None
    weight = packed.pack_codes(Codes("int4", values, scales, group, zero_OG=zeros)).handle
    for tokens, is_taken in ((4, True), (16, True), (32, not with_zeros), (33, False)):
        out = torch.empty(tokens, 512, dtype=torch.bfloat16)
        cut = terms.cut_for(tokens_of(tokens), weight, None, out)
        assert (cut is not None) == is_taken, tokens
        assert cut is None or not cut.fetched
    assert not launched


def test_every_rule_can_be_reached(launched: list[dict[str, Any]]) -> None:
    """No cut is hidden by one before it, for all weights and tokens."""
    sizes = [
        (8192, 512),
        (8192, 768),
        (4224, 512),
        (1152, 1024),
        (1152, 768),
        (6144, 1024),
        (3072, 2048),
        (704, 768),
        (704, 512),
    ]
    for kind, rules in terms.RULES.items():
        found = set()
        for rows, depth in sizes:
            weight = weight_of(kind, rows, depth).handle
            form = form_of(weight)
            assert form is not None
            found |= {next(terms.cuts_of(tokens, weight, form), None) for tokens in range(1, 33)}
        if kind.startswith("int4"):
            for rows, depth in ((512, 512), (512, 768), (704, 512), (704, 768)):
                values, zeros = (torch.zeros(rows, width, dtype=torch.uint8) for width in (depth, 1))
                codes = Codes("int4", values, torch.ones(rows, 1), depth, zero_OG=zeros if "zeros" in kind else None)
                weight = packed.pack_codes(codes).handle
                form = form_of(weight)
                assert form is not None
                found |= {next(terms.cuts_of(tokens, weight, form), None) for tokens in range(1, 33)}
        assert {rule.cut for rule in rules} <= found, kind
    assert not launched


@pytest.mark.parametrize("why", ["type", "bias", "rows", "depth", "tokens", "strides"])
def test_others_are_left_to_other_kernels(why: str, launched: list[dict[str, Any]]) -> None:
    rows, depth = 512 + (32 if why == "rows" else 0), 2048 + (128 if why == "depth" else 0)
    dtype = torch.float16 if why == "type" else torch.bfloat16
    x = tokens_of(33 if why == "tokens" else 4, depth, dtype)
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
    cuts = [
        (kind, block_t, rule.cut)
        for kind, rules in terms.RULES.items()
        for rule in rules
        for block_t in range(8, terms.block_of(rule.tokens) + 1, 8)
    ]
    for kind, block_t, cut in cuts:
        form = CodeForm(CODE_KINDS[kind.split()[0]], group=0 if kind == "float8" else 128, has_zeros="zeros" in kind)
        stages = cut.stages(block_t, form)
        facts = stages * (cut.block_k // 256 + cut.block_k // 128) * 4 * block_t + 4 * 8 * stages + 4
        each = cut.stage_bytes(block_t, form) + cut.besides_bytes(form)
        taken = stages * each + 1024 + facts + 1024
        eights = -(-block_t // 8 // cut.cluster)
        sums = cut.cluster * eights * 128 * cut.groups * 16 if cut.cluster > 1 else 0
        assert sums <= stages * cut.stage_bytes(block_t, form), (kind, block_t, cut)
        assert stages >= 2, (kind, block_t, cut)
        assert taken * cut.programs_per_sm <= ROOM + 1024, (kind, block_t, cut)
        assert cut.block_n <= 256, "the copy engine's widest box"
        assert (cut.groups * 4 + cut.splitters + 1) * 32 <= 1024
