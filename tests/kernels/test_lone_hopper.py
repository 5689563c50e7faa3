"""The door of the Hopper kernel for few tokens' experts, without a device: how work is cut, what is refused and launched."""

import ctypes
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bough.kernels import cuda_source
from bough.kernels.choices import Facts
from bough.kernels.moe import Routing, lone_hopper, reference
from bough.kernels.moe.lone_hopper import MOST_LOGITS, MOST_PAIRS, MOST_SLOTS, LoneTiling, suits, suits_routed
from bough.kernels.norm.inlined import NormedStruct
from bough.platform.processor import find_compiler

pytest.importorskip("triton")
SHARED_BYTES_OF_A_BLOCK = 227 * 1024
STATIC_BYTES = 2 * 8 * MOST_SLOTS + (2 + 3 * MOST_PAIRS + MOST_LOGITS + MOST_PAIRS * lone_hopper._WARPS) * 4
CUTS = [
    LoneTiling(2048, 768),
    LoneTiling(512, 256),
    LoneTiling(4096, 1536),
    LoneTiling(264, 24),
    LoneTiling(64, 512),
    LoneTiling(2048, 96, 16 << 10),
    LoneTiling(1000, 40),
    LoneTiling(2048, 768, routed=128),
    LoneTiling(264, 24, routed=300),
    LoneTiling(64, 512, routed=3),
]
ROUTER, GATED, DOWN = range(3)
Unit = tuple[int, int, int, int]
Walk = Callable[[LoneTiling, int, int, int], list[Unit]]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The units (kind, pair, first row, rows) of a block, by the source's own `Share`, compiled for the CPU."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    found = re.search(r"^struct Share \{.*?^\};", lone_hopper.SOURCE.read_text(), re.S | re.M)
    assert found
    parts = ["#include <algorithm>\nusing std::min;\n#define INLINE inline\n"]
    for number, cut in enumerate(CUTS):
        names = ("D", "F", "GATED_ROWS", "DOWN_ROWS", "EXPERTS")
        parts += [f"#define {name} {cut.defines()[name]}\n" for name in names]
        parts.append(f"namespace cut{number} {{ {found[0]} }}\n")
        parts.append(
            f'extern "C" int walk{number}(int block, int blocks, int pairs, int* out) {{\n'
            f"  const cut{number}::Share share(block, blocks, pairs);\n"
            "  for (int i = 0; i < share.units(); i++) {\n"
            "    const auto unit = share.unit(i);\n"
            "    const int all[] = {unit.kind, unit.pair, unit.row, unit.rows};\n"
            "    out = std::copy(all, all + 4, out);\n  }\n  return share.units();\n}\n"
        )
        parts += [f"#undef {name}\n" for name in names]
    folder: Path = tmp_path_factory.mktemp("share")
    (folder / "share.cpp").write_text("".join(parts))
    library = folder / "share.so"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, folder / "share.cpp"], check=True, timeout=60
    )
    loaded = ctypes.CDLL(str(library))

    def units(cut: LoneTiling, block: int, blocks: int, pairs: int) -> list[Unit]:
        room = (ctypes.c_int * (4 * (pairs * (cut.width + cut.inner) + cut.routed + 1)))()
        count = loaded[f"walk{CUTS.index(cut)}"](block, blocks, pairs, room)
        return [(room[i], room[i + 1], room[i + 2], room[i + 3]) for i in range(0, 4 * count, 4)]

    return units


def read_bytes(cut: LoneTiling, units: list[Unit]) -> int:
    a_row = {ROUTER: 2 * cut.width, GATED: 4 * cut.width, DOWN: 2 * cut.inner}
    return sum(rows * a_row[kind] for kind, _, _, rows in units)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(CUTS), st.integers(1, 140), st.integers(0, 9))
def test_units_cover_every_row_once_and_blocks_read_alike(walk: Walk, cut: LoneTiling, blocks: int, pairs: int) -> None:
    most_rows = {ROUTER: 1, GATED: cut.gated_rows, DOWN: cut.down_rows}
    seen: dict[int, Counter[tuple[int, int]]] = {kind: Counter() for kind in most_rows}
    num_bytes = []
    for block in range(blocks):
        units = walk(cut, block, blocks, pairs)
        assert [unit[0] for unit in units] == sorted(unit[0] for unit in units), "router, gate and up, down"
        for kind, pair, row, rows in units:
            assert 1 <= rows <= most_rows[kind]
            seen[kind].update((pair, row + i) for i in range(rows))
        num_bytes.append(read_bytes(cut, units))
    assert seen[ROUTER] == {(0, row): 1 for row in range(cut.routed)}
    assert seen[GATED] == {(pair, row): 1 for pair in range(pairs) for row in range(cut.inner)}
    assert seen[DOWN] == {(pair, row): 1 for pair in range(pairs) for row in range(cut.width)}
    one_more = max(4 * cut.width * cut.gated_rows, pairs * 2 * cut.inner)
    assert max(num_bytes) - min(num_bytes) <= 2 * one_more + 2 * cut.width * (cut.routed > 0)


@pytest.mark.parametrize("routed", [0, 128])
def test_multiprocessors_of_an_h200_read_nearly_alike(walk: Walk, routed: int) -> None:
    cut, blocks, pairs = LoneTiling(2048, 768, routed=routed), 132, 8
    num_bytes = [read_bytes(cut, walk(cut, block, blocks, pairs)) for block in range(blocks)]
    assert max(num_bytes) < 1.02 * sum(num_bytes) / blocks
    assert sorted(num_bytes)[blocks * 9 // 10] < 1.005 * sum(num_bytes) / blocks


@given(st.integers(1, 1024).map(lambda n: 8 * n), st.integers(1, 512).map(lambda n: 8 * n), st.integers(1, 2**16))
def test_units_fit_their_slots(width: int, inner: int, unit_bytes: int) -> None:
    cut = LoneTiling(width, inner, unit_bytes)
    assert inner % cut.gated_rows == 0
    assert max(4 * width * cut.gated_rows, 2 * inner * cut.down_rows) <= cut.slot_bytes
    assert cut.down_rows >= 1
    assert cut.slot_bytes % 128 == 0


@given(st.sampled_from(CUTS), st.integers(1, MOST_PAIRS), st.integers(1, 132))
def test_a_block_fits_a_multiprocessor(cut: LoneTiling, pairs: int, blocks: int) -> None:
    slots = cut.num_slots(1, pairs, blocks)
    assert slots <= MOST_SLOTS
    sums = 4 * pairs * -(-cut.width // blocks)
    assert slots * cut.slot_bytes + cut.vector_bytes(1, pairs) + sums <= lone_hopper.SHARED_BYTES
    assert lone_hopper.SHARED_BYTES + STATIC_BYTES <= SHARED_BYTES_OF_A_BLOCK


def test_the_source_is_given_what_it_expects() -> None:
    source = lone_hopper.SOURCE.read_text()
    for name in LoneTiling(2048, 768).defines():
        assert re.search(rf"\b{name}\b", source)
    assert f"MOST_PAIRS = {MOST_PAIRS}, MOST_SLOTS = {MOST_SLOTS};" in source
    assert f"MOST_LOGITS = {MOST_LOGITS};" in source
    assert declared(source, "Inputs") == [each[0] for each in lone_hopper._Inputs._fields_]
    common = cuda_source._COMMON[0].read_text()
    assert declared(common, "Normed") == [each[0] for each in NormedStruct._fields_]


def declared(source: str, structure: str) -> list[str]:
    """The names of its fields."""
    found = re.search(rf"struct {structure} {{(.*?)}};", source, re.S)
    assert found
    declarations = re.sub(r"//.*", "", found[1])
    return [re.sub(r".*[ *]", "", each.strip()) for each in re.split("[,;]", declarations) if each.strip()]


Fields = dict[str, int | float | None]


def fields(structure: ctypes.Structure) -> Iterator[tuple[str, type, int | float | None]]:
    """Names, kinds and values; those of a structure inside it are named after it."""
    for name, kind, *_ in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield from ((f"{name}.{inner}", *rest) for inner, *rest in fields(value))  # type: ignore[misc]
        else:
            yield name, kind, value


class Recorded:
    """A kernel that remembers its launches: the numbers of its inputs."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, Fields]] = []
        self.pointers: Fields = {}
        """Of the last launch."""

    def launch(self, blocks: int, arguments: tuple[ctypes.Structure], stream: int) -> None:
        found = list(fields(arguments[0]))
        self.pointers = {name: value for name, kind, value in found if kind is ctypes.c_void_p}
        self.launches.append((blocks, {name: value for name, kind, value in found if kind is not ctypes.c_void_p}))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    kernel = Recorded()
    loaded = lone_hopper._Loaded(kernel, 132)  # type: ignore[arg-type]
    monkeypatch.setattr(lone_hopper, "_loaded", lambda *_: loaded)
    monkeypatch.setattr(lone_hopper, "num_sms", lambda _: 132)
    monkeypatch.setattr(cuda_source, "facts_of", lambda *_: Facts("cuda", (9, 0)))
    lone_hopper._is_ready.cache_clear()
    yield kernel
    lone_hopper._is_ready.cache_clear()


def stacks(num_experts: int, width: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Of no memory that is touched."""
    return (
        torch.empty(num_experts, 2 * inner, width, dtype=dtype),
        torch.empty(num_experts, width, inner, dtype=dtype),
    )


def ids(tokens: int, per_token: int) -> Tensor:
    return torch.zeros(tokens, per_token, dtype=torch.int32)


def matrix(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(tokens, width, dtype=dtype)


@pytest.mark.usefixtures("recorded")
def test_only_what_the_kernel_knows_is_served() -> None:
    gate_up, down = stacks(128, 512, 64)
    one = matrix(1, 512)
    assert suits(one, gate_up, down, ids(1, 8), "silu")
    assert suits(matrix(1, 576)[:, :512], gate_up, down, ids(1, 8), "silu")
    assert suits(matrix(4, 576)[:, :512], gate_up, down, ids(4, 8), "silu")
    assert not suits(one, gate_up, down, ids(1, 8), "gelu_tanh")
    assert not suits(matrix(5, 512), gate_up, down, ids(5, 8), "silu"), "more than 32 pairs"
    assert not suits(matrix(0, 512), gate_up, down, ids(0, 8), "silu")
    assert not suits(matrix(1, 512, torch.float16), gate_up, down, ids(1, 8), "silu")
    assert not suits(one, *stacks(128, 512, 64, torch.float16), ids(1, 8), "silu")
    assert not suits(matrix(1, 1024)[:, 1:513], gate_up, down, ids(1, 8), "silu"), "rows must start at 16 bytes"
    assert not suits(matrix(4, 516)[:, :512], gate_up, down, ids(4, 8), "silu"), "all of them"
    assert not suits(matrix(1, 1024)[:, ::2], gate_up, down, ids(1, 8), "silu")
    assert not suits(one, gate_up[:, ::2], down, ids(1, 8), "silu"), "not contiguous"
    assert not suits(one, gate_up, down.transpose(1, 2).contiguous().transpose(1, 2), ids(1, 8), "silu")
    assert not suits(one, *stacks(16, 512, 68), ids(1, 8), "silu"), "rows of down must start at 16 bytes"
    assert not suits(matrix(1, 516), *stacks(16, 516, 64), ids(1, 8), "silu")


@pytest.mark.usefixtures("recorded")
def test_several_tokens_are_served_where_they_seldom_share_experts() -> None:
    x = matrix(2, 512)
    assert suits(x, *stacks(64, 512, 64), ids(2, 8), "silu")
    assert not suits(x, *stacks(63, 512, 64), ids(2, 8), "silu")
    assert suits(x[:1], *stacks(8, 512, 64), ids(1, 8), "silu")


@pytest.mark.usefixtures("recorded")
def test_a_ring_must_fit() -> None:
    wide = stacks(2, 4096, 4096), stacks(2, 4096, 14336)
    assert suits(matrix(1, 4096), *wide[0], ids(1, 2), "silu")
    assert not suits(matrix(1, 4096), *wide[1], ids(1, 2), "silu")


NOT_NORMED = {"normed.x_stride": 0, "normed.residual_stride": 0, "normed.eps": 0.0, "normed.offset": 0.0}


def test_few_tokens_take_one_launch(recorded: Recorded, stream: SimpleNamespace) -> None:
    from bough.kernels.moe import triton as moe

    gate_up, down = stacks(128, 2048, 768)
    out = moe.fused_experts(matrix(1, 2048), gate_up, down, torch.zeros(1, 8), ids(1, 8))
    assert out.shape == (1, 2048)
    x, bf16 = matrix(3, 2112)[:, :2048], torch.zeros(3, 8, dtype=torch.bfloat16)
    stream.cuda_stream = 9
    moe.fused_experts(x, gate_up, down, bf16, ids(3, 8).long())
    shared = {"per_token": 8, "experts": 128, "renormalise": 0, **NOT_NORMED}
    assert recorded.launches == [
        (132, {"tokens": 1, "slots": 24, "vector_bytes": 12288, "x_stride": 2048, "stream": 0, **shared}),
        (132, {"tokens": 3, "slots": 21, "vector_bytes": 36864, "x_stride": 2112, "stream": 1, **shared}),
    ]
    assert {name for name, pointer in recorded.pointers.items() if not pointer} == {
        "normed.x", "normed.residual", "normed.norm", "normed.total", "router",
    }  # fmt: skip


def routing(num_experts: int, width: int, per_token: int, dtype: torch.dtype = torch.bfloat16) -> Routing:
    return Routing(
        torch.ones(width, dtype=dtype), 0.25, 1.0, torch.zeros(num_experts, width, dtype=dtype), per_token, True
    )


@pytest.mark.usefixtures("recorded")
def test_only_what_the_kernel_knows_is_routed() -> None:
    gate_up, down = stacks(128, 512, 64)
    one, four, usual = matrix(1, 512), matrix(4, 512), routing(128, 512, 8)
    assert suits_routed(one, one, usual, gate_up, down, "silu")
    assert suits_routed(four, four, usual, gate_up, down, "silu")
    assert suits_routed(matrix(4, 576)[:, :512], matrix(4, 640)[:, :512], usual, gate_up, down, "silu")
    assert not suits_routed(torch.stack([four, four]), four, usual, gate_up, down, "silu"), "several addends"
    assert not suits_routed(one, one, usual, gate_up, down, "gelu_tanh")
    assert not suits_routed(one, matrix(1, 512, torch.float32), usual, gate_up, down, "silu")
    assert not suits_routed(four, matrix(4, 516)[:, :512], usual, gate_up, down, "silu"), "rows start at 16 bytes"
    assert not suits_routed(one, one, routing(128, 512, 8, torch.float32), gate_up, down, "silu")
    assert not suits_routed(one, one, routing(129, 512, 8), gate_up, down, "silu"), "of other experts"
    assert not suits_routed(one, one, routing(128, 512, 33), gate_up, down, "silu"), "more than 32 pairs"
    assert not suits_routed(one[:0], one[:0], usual, gate_up, down, "silu")
    few = stacks(4, 512, 64)
    assert suits_routed(one, one, routing(4, 512, 4), *few, "silu")
    assert not suits_routed(one, one, routing(4, 512, 5), *few, "silu"), "more choices than experts"
    assert suits_routed(one, one, routing(MOST_LOGITS, 512, 8), *stacks(MOST_LOGITS, 512, 64), "silu")
    assert not suits_routed(one, one, routing(MOST_LOGITS + 1, 512, 8), *stacks(MOST_LOGITS + 1, 512, 64), "silu")
    assert not suits_routed(matrix(5, 512), matrix(5, 512), routing(128, 512, 6), gate_up, down, "silu"), (
        "too many logits"
    )


@pytest.mark.usefixtures("recorded")
def test_a_block_s_rows_of_the_router_must_fit_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    x, given = matrix(1, 2048), (routing(256, 2048, 8), *stacks(256, 2048, 64), "silu")
    for blocks, fits in ((132, True), (11, True), (10, False)):
        monkeypatch.setattr(lone_hopper, "num_sms", lambda _, blocks=blocks: blocks)
        assert suits_routed(x, x, *given) == fits, LoneTiling(2048, 64).num_slots(1, 8, blocks)


def test_a_lone_token_is_normed_routed_and_served_in_one_launch(recorded: Recorded, stream: SimpleNamespace) -> None:
    from bough.kernels.moe import triton as moe

    gate_up, down = stacks(128, 2048, 768)
    x, residual, how = matrix(1, 2048), matrix(3, 2112)[:, :2048], routing(128, 2048, 8)
    out, total = moe.routed_experts(x, residual[:1], how, gate_up, down)
    assert recorded.pointers.items() >= {
        ("normed.x", x.data_ptr()), ("normed.residual", residual.data_ptr()), ("normed.norm", how.norm_D.data_ptr()),
        ("normed.total", total.data_ptr()), ("router", how.router_ED.data_ptr()), ("out", out.data_ptr()),
        ("weights", None), ("ids", None),
    }  # fmt: skip
    stream.cuda_stream = 9
    results = moe.routed_experts(matrix(3, 2048), residual, how, gate_up, down)
    assert [each.shape for each in results] == [(3, 2048)] * 2
    shared = {
        "per_token": 8, "experts": 128, "renormalise": 1, "x_stride": 2048, "normed.x_stride": 2048,
        "normed.residual_stride": 2112, "normed.eps": 0.25, "normed.offset": 1.0,
    }  # fmt: skip
    assert recorded.launches == [
        (132, {"tokens": 1, "slots": 24, "vector_bytes": 12288, "stream": 0, **shared}),
        (132, {"tokens": 3, "slots": 21, "vector_bytes": 36864, "stream": 1, **shared}),
    ]


def test_what_is_not_routed_in_one_launch_is_routed_in_several(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bough.kernels.moe import triton as moe

    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(reference, "routed_experts", lambda *given: asked.append(given))
    given = (matrix(5, 512), matrix(5, 512), routing(128, 512, 8), *stacks(128, 512, 64), "silu")
    moe.routed_experts(*given)
    assert asked == [given]
    assert not recorded.launches


def test_other_devices_are_left_alone(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = stacks(16, 512, 64)
    for facts in (Facts("cpu", (0, 0)), Facts("cuda", (10, 0)), Facts("cuda", (8, 0))):
        lone_hopper._is_ready.cache_clear()
        monkeypatch.setattr(cuda_source, "facts_of", lambda *_, facts=facts: facts)
        assert not suits(matrix(1, 512), gate_up, down, ids(1, 8), "silu")
        assert not suits_routed(matrix(1, 512), matrix(1, 512), routing(16, 512, 8), gate_up, down, "silu")
