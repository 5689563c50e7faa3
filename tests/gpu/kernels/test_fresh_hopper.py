"""Hopper's attention over fresh rows against float32, on ragged batches between tokens that belong to nobody."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_cases.bed import pairwise

from bough.kernels.attention import fresh
from bough.kernels.attention.fresh_hopper import PLACES, SOURCE, Form, Rows, attend, can_rotate, defines, suits
from bough.kernels.attention.inputs import AttentionInputs
from bough.kernels.attention.plan import list_fresh
from bough.kernels.cuda_source import cached_cubin
from bough.kernels.rotary import reference as rotary_reference

pytestmark = pytest.mark.usefixtures("hopper")
NAN = float("nan")
BEFORE, AFTER = 3, 5
BATCHES = [[1], [128], [2048], [127, 128, 129], [300, 5, 1777], [64, 65, 63, 513, 1, 2, 1000]]


def rows_of(lengths: Sequence[int], at: int = BEFORE) -> Rows:
    starts = np.cumsum([at, *lengths])
    return tuple((int(start), length) for start, length in zip(starts, lengths, strict=False))


def made(
    tokens: int, dtype: torch.dtype = torch.bfloat16, heads: int = 8, kv: int = 2, dim: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    spread = 1.0 + 5.0 * float(torch.rand(()))
    qkv = (torch.randn(tokens, (heads + 2 * kv) * dim, device="cuda") * spread**0.5).to(dtype)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([heads * dim, kv * dim, kv * dim], 1))
    return q, k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    out = torch.full(q.shape, NAN, device=q.device)
    group = q.shape[1] // k.shape[1]
    for first, length in rows:
        at = slice(first, first + length)
        q_NQH = q[at].float().transpose(0, 1)
        k_NQH, v_NQH = (x[at].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        unseen = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        if window is not None:
            unseen |= torch.ones_like(unseen).tril(-window)
        scores = (q_NQH @ k_NQH.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(unseen, float("-inf"))
        if sinks is not None:  # a logit more, without a value
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), 2)
        out[at] = (scores.softmax(2)[..., :length] @ v_NQH).transpose(0, 1)
    return out


def assert_close(got: Tensor, want: Tensor) -> None:
    assert (got.float() - want).norm() / want.norm() < 6e-3
    assert (got.float() - want).abs().max() < 0.03 * want.abs().max()


def check(
    lengths: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 8,
    kv: int = 2,
    dim: int = 128,
    rotated: bool = True,
    window: int | None = None,
    has_sinks: bool = False,
) -> None:
    rows, total = rows_of(lengths), BEFORE + sum(lengths) + AFTER
    q, k, v = made(total, dtype, heads, kv, dim)
    for x in (k, v):
        x[:BEFORE], x[-AFTER:] = NAN, NAN
    out = torch.full(q.shape, NAN, device="cuda", dtype=dtype)
    sinks = torch.randn(heads, device="cuda") * 2 if has_sinks else None
    assert suits(q, k, v, window=window, sinks=sinks)
    table = None
    turned = q
    if not rotated:  # no row is longer than the table, which ends where the memory may
        angles = torch.randn(max(lengths), dim // 2, device="cuda") * 3
        table = torch.cat((angles.cos(), angles.sin()), 1)
        positions = torch.zeros(total, dtype=torch.int64, device="cuda")
        for first, length in rows:
            positions[first : first + length] = torch.arange(length, device="cuda")
        turned, _ = rotary_reference.apply_rope(q, k, positions, table)
        assert can_rotate(table, dim)
    attend(q, k, v, rows, dim**-0.5, out, table, window=window, sinks=sinks)
    mine = slice(BEFORE, total - AFTER)
    assert out[:BEFORE].isnan().all()
    assert out[-AFTER:].isnan().all()
    assert_close(out[mine], expected(turned, k, v, rows, window, sinks)[mine])


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_ragged_batches(lengths: list[int], rotated: bool) -> None:
    check(lengths, rotated=rotated)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(32, 8, 128), (4, 4, 64), (6, 1, 128), (14, 2, 64), (28, 4, 128)])
def test_heads_and_types(dtype: torch.dtype, heads: int, kv: int, dim: int, rotated: bool) -> None:
    check([300, 5, 777], dtype, heads, kv, dim, rotated)


FORMS = {
    "gpt-oss": ((64, 8, 64), Form(torch.bfloat16, 64, pair=True, sinks=True)),
    "gpt-oss, window": ((64, 8, 64), Form(torch.bfloat16, 64, pair=True, sinks=True, windowed=True)),
    "odd groups": ((9, 3, 64), Form(torch.bfloat16, 64, pair=False, sinks=True, windowed=True)),
    "fp16": ((8, 2, 128), Form(torch.float16, 128, pair=True, windowed=True)),
}


@pytest.fixture(scope="module")
def _compiled() -> None:
    """All at once: one after the other takes seconds each."""
    with ThreadPoolExecutor(len(FORMS)) as pool:
        list(pool.map(lambda each: cached_cubin(SOURCE, "sm_90a", defines(each[1])), FORMS.values()))


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    ("lengths", "name", "window", "rotated"),
    pairwise(BATCHES[1:], list(FORMS), [1, 100, 128, 129, 300], [True, False]),
)
def test_windows_and_sinks(lengths: list[int], name: str, window: int, rotated: bool) -> None:
    heads, form = FORMS[name]
    check(lengths, form.dtype, *heads, rotated, window if form.windowed else None, form.sinks)


def test_rows_longer_than_the_cache_holds_of_all_heads() -> None:
    check([8192, 70], heads=16, kv=8)


def test_more_tiles_than_one_launch_takes() -> None:
    check([int(n) for n in np.random.default_rng(3).integers(1, 90, PLACES + 20)], heads=4, kv=2)


def test_random_batches_one_after_the_other_on_one_counter() -> None:
    numbers = np.random.default_rng()
    for _ in range(8):
        lengths = [int(n) for n in numbers.integers(1, 900, numbers.integers(1, 12))]
        check(lengths, rotated=bool(numbers.integers(2)))


def test_whole_and_ragged_steps_agree_with_float32() -> None:
    q, k, v = made(3 * 500)
    rows = rows_of([500] * 3, at=0)
    whole = fresh.attend_whole(q, k, v, 500, 128**-0.5)
    ragged = torch.empty_like(whole)
    fresh.attend_fresh(q, k, v, list(rows), 128**-0.5, ragged)
    assert torch.equal(whole, ragged)
    assert_close(whole, expected(q, k, v, rows))


def test_a_row_gets_the_same_answer_in_any_company() -> None:
    q, k, v = made(2000)
    alone, among = (
        torch.empty(q.shape, device="cuda", dtype=q.dtype),
        torch.empty(q.shape, device="cuda", dtype=q.dtype),
    )
    attend(q, k, v, ((700, 333),), 128**-0.5, alone)
    attend(q, k, v, rows_of([700, 333, 64, 903], at=0), 128**-0.5, among)
    assert torch.equal(alone[700:1033], among[700:1033])


def test_it_waits_for_the_kernels_before_it_and_they_for_it() -> None:
    q, k, v = made(1024)
    rows, out = rows_of([100, 924], at=0), torch.empty(q.shape, device="cuda", dtype=q.dtype)
    want = expected(q, k, v, rows)
    bases = [x.clone() for x in (q, k, v)]
    torch.cuda.synchronize()
    for _ in range(50):  # in a chain: queries come from results, and results must not be overwritten too early
        moved = [(x * 2).mul_(0.5) for x in bases]
        attend(moved[0], moved[1], moved[2], rows, 128**-0.5, out)
        copy = out.clone()
        out.fill_(NAN)
        for x in moved:
            x.fill_(NAN)
    assert_close(copy, want)


def test_graphs_and_launches_alternate_on_one_stream() -> None:
    q, k, v = made(1500)
    long, short = rows_of([1500], at=0), rows_of([64, 300, 1000], at=0)
    want_long, want_short = expected(q, k, v, long), expected(q, k, v, short)
    outs = [torch.empty(q.shape, device="cuda", dtype=q.dtype) for _ in range(2)]
    attend(q, k, v, long, 128**-0.5, outs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(q, k, v, long, 128**-0.5, outs[0])
        attend(q, k, v, long, 128**-0.5, outs[0])
    for _ in range(3):
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        attend(q, k, v, short, 128**-0.5, outs[1])
        graph.replay()
        assert_close(outs[0], want_long)
        assert_close(outs[1][:1364], want_short[:1364])


@pytest.mark.parametrize(("heads", "kv", "dim"), [(8, 2, 128), (64, 8, 64), (3, 3, 64)])
def test_a_graph_serves_whatever_rows_the_device_lists(heads: int, kv: int, dim: int) -> None:
    """Also none, and rows with a context between them, which stay as they are."""
    tokens, most_rows = 1280, 64
    q, k, v = made(tokens, heads=heads, kv=kv, dim=dim)
    sinks = torch.randn(heads, device="cuda")
    start, kv_len = (torch.zeros(most_rows + more, dtype=torch.int32, device="cuda") for more in (1, 0))
    inputs = AttentionInputs(
        query_start_R1=start, kv_len_R=kv_len, slots_R=kv_len, page_table=kv_len[None], page_size=64,
        loc_T=torch.zeros(tokens, dtype=torch.int64, device="cuda"), max_query=tokens, max_kv=4096, k_caches=[], v_caches=[],
    )  # fmt: skip
    out = torch.empty(q.shape, device="cuda", dtype=q.dtype)

    def run() -> None:
        attend(q, k, v, list_fresh(inputs, 64), dim**-0.5, out, window=100, sinks=sinks)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    for lengths, contexts in (
        ([1000], [0]), ([], []), ([64, 300, 500], [0, 0, 0]), ([1, 128, 70, 1000], [9, 0, 5, 0]), ([20] * 64, [0] * 64),
        ([1280], [0]), ([1280], [3]),
    ):  # fmt: skip
        starts = np.cumsum([0, *lengths])
        start.copy_(torch.from_numpy(np.pad(starts, (0, most_rows + 1 - len(starts)), constant_values=starts[-1])))
        kv_len.zero_()
        kv_len[: len(lengths)] = torch.tensor(lengths, device="cuda") + torch.tensor(contexts, device="cuda")
        out.fill_(7.0)
        graph.replay()
        rows = [(int(s), n) for s, n, c in zip(starts, lengths, contexts, strict=False) if n >= 64 and c == 0]
        want = expected(q, k, v, tuple(rows), 100, sinks)
        mine = ~want[:, 0, 0].isnan()
        assert (out[~mine] == 7.0).all()
        if rows:
            assert_close(out[mine], want[mine])


def test_streams_do_not_take_each_others_tiles() -> None:
    q, k, v = made(4000)
    rows = rows_of([2500, 700, 800], at=0)
    want = expected(q, k, v, rows)
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = [torch.full(q.shape, NAN, device="cuda", dtype=q.dtype) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                attend(q, k, v, rows, 128**-0.5, out)
    torch.cuda.synchronize()
    for out in outs:
        assert_close(out, want)
