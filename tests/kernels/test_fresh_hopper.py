"""The door of Hopper's attention over fresh rows, without a device: how rows are cut, what is launched, who takes rows."""

import ctypes
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from bough.kernels import cuda_source
from bough.kernels.attention import fresh, fresh_hopper, triton_backend as backend
from bough.kernels.attention.fresh_hopper import PLACES, TILE, Place, attend, cut, section
from bough.kernels.attention.inputs import AttentionInputs, AttentionSpec, HostLengths
from bough.kernels.choices import Facts
from bough.kernels.cuda_source import CudaSourceError, StreamNumbers
from bough.kernels.rotary.reference import write_kv

SHARED_BYTES_OF_A_BLOCK = 227 * 1024
PARAMETER_BYTES = 4096
L2_BYTES = 50 * 2**20


def places_of(packed: bytes) -> list[tuple[int, int, int]]:
    many = (Place * (len(packed) // ctypes.sizeof(Place))).from_buffer_copy(packed)
    return [(place.first, place.number, place.tokens) for place in many]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 900)), min_size=1, max_size=8))
def test_every_token_is_in_one_tile_and_the_longest_come_first(gaps_and_lengths: list[tuple[int, int]]) -> None:
    rows, at = [], 0
    for gap, length in gaps_and_lengths:
        rows.append((at + gap, length))
        at += gap + length
    tiles = cut(tuple(rows))
    seen: list[int] = []
    work = []
    for first, number, tokens in places_of(b"".join(tiles.launches)):
        assert first in dict(rows)
        assert 1 <= tokens <= TILE
        seen += range(first + number * TILE, first + number * TILE + tokens)
        work.append(number)
    assert sorted(seen) == [first + i for first, length in rows for i in range(length)]
    assert work == sorted(work, reverse=True)
    assert tiles.tokens == at
    assert tiles.longest == max(length for _, length in rows)


def test_long_lists_take_several_launches() -> None:
    tiles = cut(((0, 64), (64, TILE * PLACES)))
    assert [len(places_of(each)) for each in tiles.launches] == [PLACES, 1]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_fits_a_multiprocessor(head_dim: int) -> None:
    assert fresh_hopper.shared_bytes(head_dim) <= SHARED_BYTES_OF_A_BLOCK


def test_the_source_is_given_what_it_expects() -> None:
    source = fresh_hopper.SOURCE.read_text()
    for name in fresh_hopper.defines(fresh_hopper.Form(torch.bfloat16, 128, pair=True)):
        assert re.search(rf"\b{name}\b", source)
    for name, structure in (("Args", fresh_hopper._Args), ("Place", Place)):
        found = re.search(rf"struct {name} {{(.*?)}};", source, re.S)
        assert found
        declarations = re.sub(r"//.*|\[\w+\]", "", found[1])
        names = [re.sub(r".*[ *]", "", each.strip()) for each in re.split("[,;]", declarations) if each.strip()]
        assert names == [each[0] for each in structure._fields_]
    tensor_maps = 3 * 128
    assert tensor_maps + ctypes.sizeof(fresh_hopper._Args) <= PARAMETER_BYTES


def test_heads_are_worked_off_in_sections_where_a_row_does_not_fit_the_cache() -> None:
    assert section(2048, 32, 8, 128, L2_BYTES) == 32
    assert section(8192, 32, 8, 128, L2_BYTES) == 8
    assert section(8192, 32, 8, 64, L2_BYTES) == 32
    assert section(8192, 28, 4, 128, L2_BYTES) == 28
    assert section(65536, 28, 4, 128, L2_BYTES) == 7


@given(st.integers(1, 2**17), st.integers(1, 16), st.integers(1, 9), st.sampled_from([64, 128]))
def test_sections_divide_the_heads_and_keep_groups_together(longest: int, kv: int, group: int, head_dim: int) -> None:
    heads = section(longest, kv * group, kv, head_dim, L2_BYTES)
    assert kv * group % heads == 0
    assert heads % group == 0


class Recorded:
    """A kernel that remembers its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, list[tuple[int, int, int]], dict[str, int]]] = []
        self.tables: list[int | None] = []
        self.others: list[tuple[int, int | None]] = []
        """Windows and sinks."""
        self.listed: list[tuple[int | None, int | None]] = []
        """Where the device has listed places."""

    def launch(self, blocks: int, arguments: list[object], stream: int) -> None:
        args = arguments[-1]
        assert isinstance(args, fresh_hopper._Args)
        places = [(each.first, each.number, each.tokens) for each in args.places[: args.num_places]]
        numbers = {name: getattr(args, name) for name in ("stream", "heads", "heads_per_kv", "section", "out_token")}
        self.launches.append((blocks, places, numbers))
        self.tables.append(args.table)
        self.others.append((args.window, args.sinks))
        self.listed.append((args.listed, args.num_listed))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    kernel = Recorded()
    loaded = fresh_hopper._Loaded(kernel, 132, L2_BYTES)  # type: ignore[arg-type]
    monkeypatch.setattr(fresh_hopper, "_loaded", lambda *_: loaded)
    monkeypatch.setattr(fresh_hopper, "tensor_map", lambda matrix, rows: (matrix.data_ptr(), rows))
    fresh_hopper._is_ready.cache_clear()
    yield kernel
    fresh_hopper._is_ready.cache_clear()


def tensors(tokens: int, heads: int = 4, kv: int = 2, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    qkv = torch.randn(tokens, (heads + 2 * kv) * 64).to(dtype)
    q, k, v = (x.unflatten(1, (-1, 64)) for x in qkv.split([heads * 64, kv * 64, kv * 64], 1))
    return q, k, v, torch.empty(q.shape, dtype=dtype)


def test_ragged_rows_are_one_launch(recorded: Recorded, stream: SimpleNamespace) -> None:
    q, k, v, out = tensors(300)
    attend(q, k, v, ((0, 100), (100, 200)), 0.1, out)
    [(blocks, places, numbers)] = recorded.launches
    assert places == [(100, 1, 72), (0, 0, 100), (100, 0, 128)]
    assert blocks == 3 * 4
    assert numbers == {"stream": 0, "heads": 4, "heads_per_kv": 2, "section": 4, "out_token": 4 * 64}


def test_the_kernel_is_given_a_table_where_queries_are_not_rotated(recorded: Recorded, stream: SimpleNamespace) -> None:
    q, k, v, out = tensors(300)
    table = torch.zeros(200, 64)
    attend(q, k, v, ((0, 100), (100, 200)), 0.1, out, table)
    attend(q, k, v, ((0, 100), (100, 200)), 0.1, out)
    assert recorded.tables == [table.data_ptr(), None]
    with pytest.raises(ValueError, match="a row of 201 tokens can't be rotated to 200 positions"):
        attend(q, k, v, ((0, 201),), 0.1, out, table)
    assert fresh_hopper.can_rotate(table, 64)
    assert not fresh_hopper.can_rotate(table[:, :32], 64)  # a part of each head
    assert not fresh_hopper.can_rotate(table[:, :32], 32)  # with gaps
    assert not fresh_hopper.can_rotate(table.bfloat16(), 64)


def test_every_stream_has_its_counter(recorded: Recorded, stream: SimpleNamespace) -> None:
    q, k, v, out = tensors(64)
    for handle in (7, 9, 7, 0, 9):
        stream.cuda_stream = handle
        attend(q, k, v, ((0, 64),), 0.1, out)
    assert [numbers["stream"] for _, _, numbers in recorded.launches] == [0, 1, 0, 2, 1]
    for handle in range(100, 100 + StreamNumbers.MOST - 3):
        stream.cuda_stream = handle
        attend(q, k, v, ((0, 64),), 0.1, out)
    stream.cuda_stream = 1000
    with pytest.raises(RuntimeError, match="more than 256 streams"):
        attend(q, k, v, ((0, 64),), 0.1, out)


@pytest.mark.usefixtures("stream")
def test_a_launch_has_room_for_all_that_the_device_may_list(recorded: Recorded) -> None:
    q, k, v, out = tensors(640)
    few = fresh_hopper.Listed(torch.zeros(6, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 640)
    many = replace(few, places=torch.zeros(600, 2, dtype=torch.int32))
    for listed, blocks in ((few, 24), (many, 132)):
        attend(q, k, v, listed, 0.1, out, window=9)
        assert recorded.launches[-1][:2] == (blocks, [])
        assert recorded.listed[-1] == (listed.places.data_ptr(), listed.count.data_ptr())
    attend(q, k, v, ((0, 640),), 0.1, out)
    assert recorded.listed[-1] == (None, None)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, out = tensors(8)
    with pytest.raises(ValueError, match="rows up to token 9"):
        attend(q, k, v, ((0, 9),), 1.0, out)
    with pytest.raises(ValueError, match="strides"):
        attend(q, k, v, ((0, 8),), 1.0, torch.zeros(8, 64, 4).transpose(1, 2))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "facts_of", lambda *_: Facts("cuda", (9, 0)))


@pytest.mark.usefixtures("hopper", "stream")
def test_rows_go_to_the_kernel_where_it_suits(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def vendor(q: Tensor, *_: object, rows: int = 1) -> Tensor:
        return torch.full_like(q, 5.0)

    monkeypatch.setattr(fresh, "_sdpa", vendor)
    q, k, v, out = tensors(300)
    assert fresh.shortest(LAYER, q, v) == fresh.FRESH_FROM
    fresh.attend_fresh(q, k, v, [(0, 100), (100, 200)], 0.1, out)
    assert fresh.attend_whole(q, k, v, 100, 0.1).shape == q.shape
    assert [sorted({first for first, _, _ in places}) for _, places, _ in recorded.launches] == [
        [0, 100],
        [0, 100, 200],
    ]

    apart = k.transpose(0, 1).contiguous().transpose(0, 1)
    assert not fresh_hopper.suits(q, apart, v)
    assert not fresh_hopper.suits(q.float(), k.float(), v.float())
    assert not fresh_hopper.suits(q[:, :, :32], k[:, :, :32], v[:, :, :32])
    fresh.attend_fresh(q, apart, v, [(10, 256)], 0.1, out.zero_())
    assert torch.equal(out.float().mean((1, 2)).nonzero().flatten(), torch.arange(10, 266))
    assert len(recorded.launches) == 2


@pytest.mark.usefixtures("hopper")
def test_without_a_compiler_cudnn_takes_long_rows_and_that_is_said_once(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise CudaSourceError("libnvrtc.so.13 was not found")

    monkeypatch.setattr(fresh_hopper, "_loaded", missing)
    q, k, v, _ = tensors(64)
    with caplog.at_level(logging.WARNING, "bough.kernels"):
        assert not fresh_hopper.suits(q, k, v)
        assert not fresh_hopper.suits(q, k, v)
        assert fresh.shortest(LAYER, q, v) == fresh.CUDNN_FROM
    assert [record.message.count("libnvrtc") for record in caplog.records] == [1]


def test_other_devices_are_left_alone(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = tensors(64)
    assert not fresh_hopper.suits(q, k, v)
    fresh_hopper._is_ready.cache_clear()
    monkeypatch.setattr(cuda_source, "facts_of", lambda *_: Facts("cuda", (10, 0)))
    assert not fresh_hopper.suits(q, k, v)
    assert fresh.shortest(LAYER, q, v) == fresh.CUDNN_FROM


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fresh_keys_are_those_that_a_cache_gives_back(dtype: torch.dtype, scale: float) -> None:
    pytest.importorskip("triton")
    from bough.kernels.attention.triton_backend import _as_read

    x = torch.tensor([0.0, 0.3, -17.5, 100.0, 440.0, 1000.0, -3000.0, 1e5], dtype=torch.bfloat16)[None, None]
    cache = torch.zeros((1, 1, 1, 8), dtype=dtype)
    write_kv(x, x, cache, cache.clone(), torch.tensor([0]), k_scale=scale)
    assert torch.equal(_as_read(x, dtype, scale)[0, 0], (cache[0, 0, 0].float() * scale).bfloat16())


LAYER = AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)


@pytest.mark.usefixtures("hopper", "stream")
def test_windows_and_sinks_are_left_to_the_kernel_alone(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "facts_of", lambda *_: Facts("cuda", (9, 0)))
    monkeypatch.setattr(fresh, "MASKED_FROM", 300)
    sinks = torch.zeros(4)
    q, k, v, out = tensors(300)
    apart = k.transpose(0, 1).contiguous().transpose(0, 1)  # the copy engine takes no such keys
    for layer in (replace(LAYER, window=100), replace(LAYER, sinks=sinks), replace(LAYER, window=7, sinks=sinks)):
        assert fresh.suits(layer, q, v)
        assert not fresh.suits(layer, q, v, hopper=False)
        assert fresh.lists(layer, q, v)
        assert not fresh.lists(layer, q, v, hopper=False)
        assert not fresh.lists(replace(layer, chunk=8), q, v)
        assert not fresh.suits(layer, q[:299], v[:299])  # the paged kernel is faster in small steps
        assert not fresh.suits(replace(layer, softcap=3.0), q, v)
        assert fresh.shortest(layer, q, v) == fresh.FRESH_FROM
        fresh.attend_fresh(q, apart, v, [(0, 300)], 0.1, out, window=layer.window, sinks=layer.sinks)
        fresh.attend_whole(q, k, v, 100, 0.1, window=layer.window, sinks=layer.sinks)
        want = (layer.window or 0, None if layer.sinks is None else sinks.data_ptr())
        assert recorded.others[-2:] == [want, want]


@pytest.mark.parametrize(
    ("rows", "rotated_before", "others"),
    [
        ([(100, 0), (64, 0)], 0, []),
        ([(1, 30), (1, 7), (100, 0), (64, 0)], 2, []),
        ([(1, 30), (100, 0), (5, 0), (70, 0)], 106, [(1, 100)]),  # a row that is too short for the kernel lies between
        ([(100, 0), (1, 5)], 101, [(0, 100)]),
    ],
)
def test_the_fresh_rows_of_a_steps_end_are_rotated_by_attention(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int]], rotated_before: int, others: list[tuple[int, int]]
) -> None:
    tokens = sum(num for num, _ in rows)
    q, k, v, _ = tensors(tokens)
    table = torch.zeros(200, 64)
    cache = torch.zeros(40, 16, 2, 64, dtype=torch.bfloat16)
    calls: list[tuple[str, object]] = []

    def rope(q: Tensor, k: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        calls.append(("rope", len(q)))
        return q.clone(), k

    def attend_fresh(q: object, k: Tensor, v: Tensor, rows: list[tuple[int, int]], *_: object, **__: object) -> None:
        calls.append(("raw" if isinstance(q, fresh.Unrotated) else "rotated", rows))

    for module, name, fake in (
        (backend, "rope_and_write", rope),
        (fresh, "attend_fresh", attend_fresh),
        (fresh, "suits", lambda *_, **__: True),
        (fresh, "shortest", lambda *_, **__: 64),
        (fresh, "rotates", lambda *_, **__: True),
        (backend.plan, "plan_rows", lambda *_, **__: None),
        (backend.TritonAttention, "_launch", lambda *_: None),
    ):
        monkeypatch.setattr(module, name, fake)
    lengths = [sum(row) for row in rows]
    inputs = AttentionInputs(
        query_start_R1=torch.zeros(len(rows) + 1),
        kv_len_R=torch.tensor(lengths),
        slots_R=torch.arange(len(rows)),
        page_table=torch.zeros(len(rows), 20),
        loc_T=torch.zeros(tokens),
        page_size=16,
        max_query=100,
        max_kv=max(lengths),
        k_caches=[cache],
        v_caches=[cache],
        host=HostLengths(np.array([n for n, _ in rows], np.int32), np.array([c for _, c in rows], np.int32)),
    )
    monkeypatch.setattr(backend, "_decode_shape", lambda *_: backend.DECODE)
    runner = backend.TritonAttention(torch.device("cpu"))
    runner.prepare(inputs)
    runner.forward_rope(LAYER, q, k, v, torch.zeros(tokens), table)
    starts = np.cumsum([0, *(n for n, _ in rows)])
    mine = [(int(s), n) for s, (n, c) in zip(starts, rows, strict=False) if s >= rotated_before and c == 0 and n >= 64]
    want: list[tuple[str, object]] = [("rope", rotated_before)]
    want += [("raw", mine)] if mine else []
    want += [("rotated", others)] if others else []
    assert calls == want
    calls.clear()
    runner.forward_rope(LAYER, q, k, v, torch.zeros(tokens), table, q_norm=torch.ones(64), k_norm=torch.ones(64))
    assert calls[0] == ("rope", tokens)
    assert [name for name, _ in calls[1:]] == ["rotated"]


@pytest.mark.parametrize(
    ("change", "is_listed"),
    [
        ({}, True),
        ({"lists_fresh": False}, False),  # what the rows of other passes are is not known
        ({"host": HostLengths(np.array([200, 100], np.int32), np.array([7, 0], np.int32))}, False),
        ({"max_query": 63}, False),
    ],
)
def test_a_graph_attends_to_fresh_rows_that_the_device_lists(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], is_listed: bool
) -> None:
    """The paged kernel has all other rows; layers of all kinds share the list."""
    q, k, v, _ = tensors(384)
    cache = torch.zeros(40, 16, 2, 64, dtype=torch.bfloat16)
    inputs = AttentionInputs(
        query_start_R1=torch.tensor([0, 200, 300]), kv_len_R=torch.tensor([207, 100]), slots_R=torch.arange(2),
        page_table=torch.zeros(2, 20), loc_T=torch.zeros(384), page_size=16, max_query=384, max_kv=400,
        k_caches=[cache], v_caches=[cache], lists_fresh=True,
    )  # fmt: skip
    planned: list[int] = []
    attended: list[fresh_hopper.Listed] = []
    lists: list[int] = []

    def list_fresh(_: AttentionInputs, fresh_from: int) -> fresh_hopper.Listed:
        lists.append(fresh_from)
        return fresh_hopper.Listed(torch.zeros(5, 2), torch.zeros(1), 384)

    for module, name, fake in (
        (fresh, "suits", lambda *_, **__: True),
        (fresh_hopper, "is_ready", lambda *_, **__: True),
        (fresh, "attend_listed", lambda *args: attended.append(args[3])),
        (fresh, "attend_fresh", lambda *_, **__: None),
        (backend.plan, "plan_rows", lambda *_, fresh_from=2**30, **__: planned.append(fresh_from)),
        (backend.plan, "list_fresh", list_fresh),
        (backend.TritonAttention, "_launch", lambda *_: None),
        (backend, "_decode_shape", lambda *_: backend.DECODE),
        (backend, "write_kv", lambda *_, **__: None),
    ):
        monkeypatch.setattr(module, name, fake)
    runner = backend.TritonAttention(torch.device("cpu"))
    runner.prepare(replace(inputs, **change))
    runner.forward(LAYER, q, k, v)
    runner.forward(replace(LAYER, window=50), q, k, v)
    assert lists == [fresh.FRESH_FROM] * is_listed
    assert len(attended) == 2 * is_listed
    assert all(each is attended[0] for each in attended)
    if is_listed:
        assert planned[1::2] == [fresh.FRESH_FROM] * 2
