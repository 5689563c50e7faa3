"""What the CPU kernels compute for a token is the same bits in any company: whatever else the step holds, however its prompt
was cut, whichever row it has, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bough.kernels import packed_linear as packed
from bough.kernels.attention import AttentionInputs, SpanTensors
from bough.kernels.attention.cpu import CpuAttention
from bough.kernels.cpu_build import library
from bough.kernels.decoder_stack import BlockParts, Packed
from bough.kernels.decoder_stack.cpu import DecoderStack
from bough.kernels.kv_codes import Ranges
from bough.kernels.packed_linear import cpu
from tests.covers import cover
from tests.kernels.test_cpu_attention import Spec
from tests.kernels.test_cpu_packed_linear import KINDS, random_weight, with_outliers

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")

COUNTS = (1, 2, 3, 5, 8, 13, 32, 33, 64, 100)
PAGE = 16


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(133, 768), (37, 2304)])
def test_products(kind: str, exact: bool, rows: int, cols: int) -> None:
    raw, _ = random_weight(kind, rows, cols)
    weight = cpu.pack(kind, raw, cols)
    x, bias = with_outliers(torch.randn(100, cols)), torch.randn(rows)
    with threads(1):
        alone = torch.cat([packed.packed_linear(x[i : i + 1], weight, bias, exact=exact) for i in range(100)])
    for number, count in enumerate(COUNTS):
        with threads((1, 2, 3, 5)[number % 4]):
            chosen = torch.randperm(100)[:count]
            together = packed.packed_linear(x[chosen], weight, bias, exact=exact)
        assert torch.equal(together, alone[chosen]), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16"])
def test_products_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    raw, _ = random_weight(kind, 48, 512)
    weight = cpu.pack(kind, raw, 512)
    x = torch.randn(100, 512).to(dtype)
    alone = torch.cat([packed.packed_linear(x[i : i + 1], weight) for i in range(100)])
    for count in COUNTS:
        assert torch.equal(packed.packed_linear(x[:count], weight), alone[:count]), count


def step_inputs(
    rows: list[tuple[int, int, int]],
    table: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    shared: SpanTensors | None = None,
) -> AttentionInputs:
    """A step of rows (sequence, first token, last token); sequence i has the pages of the table's line i."""
    counts = torch.tensor([last - first for _, first, last in rows])
    positions = [torch.arange(first, last) for _, first, last in rows]
    loc = [table[r].long()[p // PAGE] * PAGE + p % PAGE for (r, _, _), p in zip(rows, positions, strict=True)]
    return AttentionInputs(
        query_start_R1=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        kv_len_R=torch.tensor([last for _, _, last in rows], dtype=torch.int32),
        slots_R=torch.tensor([r for r, _, _ in rows], dtype=torch.int32),
        page_table=table,
        loc_T=torch.cat(loc),
        page_size=PAGE,
        max_query=int(counts.max()),
        max_kv=table.shape[1] * PAGE,
        k_caches=k_caches,
        v_caches=v_caches,
        shared=shared,
    )


@dataclass
class Sequences:
    """Tokens whose keys and values lie in pages of their own; sequences that begin alike share those of their beginning."""

    spec: Spec
    cache_dtype: torch.dtype | int
    """A number: bits of codes."""
    lengths: tuple[int, ...]
    shared: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        spec, v_dim = self.spec, self.spec.v_head_dim or self.spec.head_dim

        def make(heads: int, width: int) -> list[Tensor]:
            each = [3 * torch.randn(n, heads, width, generator=generator) for n in self.lengths]
            for one in each[1:]:
                one[: self.shared] = each[0][: self.shared]
            return each

        self.q = make(spec.num_heads, spec.head_dim)
        self.k, self.v = make(spec.num_kv_heads, spec.head_dim), make(spec.num_kv_heads, v_dim)
        per_row = -(-max(self.lengths) // PAGE)
        self.table = (torch.randperm(len(self.lengths) * per_row, generator=generator) + 1).int().view(-1, per_row)
        self.table[1:, : self.shared // PAGE] = self.table[0, : self.shared // PAGE]
        bits = self.cache_dtype if isinstance(self.cache_dtype, int) else 0
        dtype = torch.uint8 if isinstance(self.cache_dtype, int) else self.cache_dtype
        held = (self.table.numel() + 1, PAGE, spec.num_kv_heads)
        self.caches = [
            torch.zeros(*held, width * bits // 8 if bits else width, dtype=dtype) for width in (spec.head_dim, v_dim)
        ]
        self.ranges = [Ranges(*(torch.zeros(held, dtype=torch.int32) for _ in range(2)))] if bits else []

    def step(self, rows: list[tuple[int, int, int]], shares: bool = False) -> list[Tensor]:
        """Attention of rows (sequence, first token, last token), all earlier tokens being in their pages."""
        members = [i for i, (_, first, last) in enumerate(rows) if last - first == 1 and first > self.shared]
        zero = torch.zeros(1, dtype=torch.int32)
        spans = SpanTensors(
            rows_M=torch.tensor(members, dtype=torch.int32),
            start_S1=torch.tensor([0, len(members)], dtype=torch.int32),
            first_S=zero,
            last_S=torch.tensor([self.shared], dtype=torch.int32),
            level_S=zero,
            levels=1,
            num_tokens=len(rows),
        )
        shared = spans if shares and len(members) > 1 else None
        inputs = step_inputs(rows, self.table, [self.caches[0]], [self.caches[1]], shared)
        inputs.ranges = self.ranges
        q, k, v = (
            torch.cat([of[r][first:last] for r, first, last in rows]).contiguous() for of in (self.q, self.k, self.v)
        )
        return list(CpuAttention(inputs).forward(self.spec, q, k, v).split([last - first for _, first, last in rows]))  # type: ignore[arg-type]


LAYERS = {
    "plain": Spec(num_heads=9, num_kv_heads=3),
    "window": Spec(window=75),
    "softcap": Spec(softcap=3.0),
    "both": Spec(window=130, softcap=5.0),
    "one head each": Spec(num_heads=3, num_kv_heads=3),
    "many heads": Spec(num_heads=16, num_kv_heads=1, head_dim=32),
    "width 128": Spec(num_heads=4, num_kv_heads=2, head_dim=128, scale=0.09),
    "width 80": Spec(head_dim=80),
    "narrow values": Spec(head_dim=96, v_head_dim=64),
}


@pytest.mark.parametrize(("layer", "cache_dtype"), cover(LAYERS, [torch.float32, torch.bfloat16, torch.float16, 8, 4]))
def test_attention(layer: Spec, cache_dtype: torch.dtype | int) -> None:
    """A prompt at once, in chunks, token by token, among others, with its beginning read for several at once."""
    lengths = (330, 257, 300, 211)
    if cache_dtype == 4 and layer.head_dim % 32:
        cache_dtype = 8  # torch computes those, whose sums depend on how steps are cut
    both = Sequences(layer, cache_dtype, lengths, shared=144)
    with threads(1):
        expected = [both.step([(r, 0, n)])[0] for r, n in enumerate(lengths)]
    for count in (1, 2, 3, 5):
        with threads(count):
            for cut in (1, 7, 64, 100, 193):
                rows = [(r, cut, n) for r, n in enumerate(lengths)]
                for (r, first, last), actual in zip(rows, both.step(rows), strict=True):
                    assert torch.equal(actual, expected[r][first:last]), (count, cut)
            for at in (0, 1, 63, 64, 145, 191, 192, 200, 210):
                alone = [both.step([(r, at + r, at + r + 1)])[0] for r in range(3)]
                rows = [(2, at + 2, at + 3), (0, at, at + 1), (3, at // 2, at), (1, at + 1, at + 2)]
                rows = [row for row in rows if row[1] < row[2]]
                together, shared = both.step(rows), both.step(rows, shares=True)
                for r in range(3):
                    assert torch.equal(alone[r], expected[r][at + r : at + r + 1]), (count, at)
                for (r, first, last), one, other in zip(rows, together, shared, strict=True):
                    assert torch.equal(one, expected[r][first:last]), (count, at)
                    assert torch.equal(other, expected[r][first:last]), (count, at, "shared")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_attention_of_any_step(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(list(LAYERS.values())))
    lengths = tuple(data.draw(st.lists(st.integers(2, 400), min_size=1, max_size=5)))
    shared = data.draw(st.integers(0, min(lengths) // PAGE)) * PAGE
    both = Sequences(spec, data.draw(st.sampled_from([torch.float32, torch.bfloat16, 8])), lengths, shared)
    with threads(1):
        expected = [both.step([(r, 0, n)])[0] for r, n in enumerate(lengths)]
    order = data.draw(st.permutations(range(len(lengths))))
    rows = []
    for r in order:
        last = data.draw(st.integers(1, lengths[r]))
        single = data.draw(st.booleans())
        rows.append((r, last - 1 if single else data.draw(st.integers(0, last - 1)), last))
    with threads(data.draw(st.integers(1, 6))):
        actual = both.step(rows, shares=data.draw(st.booleans()))
    for (r, first, last), one in zip(rows, actual, strict=True):
        assert torch.equal(one, expected[r][first:last])


WIDTH, INNER, LAYERS_OF_STACK = 256, 512, 3
STACK_SPEC = Spec(num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2)


def stack_of(kinds: tuple[str, str, str]) -> DecoderStack:
    heads, kv, dim = STACK_SPEC.num_heads, STACK_SPEC.num_kv_heads, STACK_SPEC.head_dim
    angles = torch.outer(torch.arange(400.0), 1e3 ** -(torch.arange(0, dim, 2) / dim))

    def matrix(rows: tuple[int, ...], cols: int, *kinds: str) -> Packed:
        pieces = [
            packed.pack(kind, random_weight(kind, n, cols, seed=n)[0], cols)
            for n, kind in zip(rows, kinds, strict=True)
        ]
        return Packed(pieces)

    def block(layer: int) -> BlockParts:
        return BlockParts(
            attn_norm=torch.rand(WIDTH),
            ffn_norm=torch.rand(WIDTH),
            eps=1e-5,
            qkv=matrix((heads * dim, 2 * kv * dim), WIDTH, kinds[0], kinds[1]),
            out=matrix((WIDTH,), heads * dim, "Q4_0"),
            gate_up=matrix((2 * INNER,), WIDTH, kinds[2]),
            down=matrix((WIDTH,), INNER, kinds[1]),
            activation="silu",
            spec=replace(STACK_SPEC, layer=layer),  # type: ignore[arg-type]
            cos_sin_PR=torch.cat((angles.cos(), angles.sin()), -1),
        )

    return DecoderStack([block(layer) for layer in range(LAYERS_OF_STACK)])


@pytest.mark.parametrize("kinds", [("Q4_1", "Q8_0", "Q4_1"), ("Q4_K", "Q6_K", "Q5_K"), ("BF16", "Q5_1", "F16")])
def test_stacks(kinds: tuple[str, str, str]) -> None:
    torch.manual_seed(0)
    stack = stack_of(kinds)
    tokens = 140
    x = torch.randn(2, tokens, WIDTH)
    per_row = -(-tokens // PAGE)

    def run(steps: list[list[tuple[int, int, int]]]) -> list[Tensor]:
        """What the steps of rows (sequence, first, last) give for every token of the sequences."""
        caches = [
            torch.zeros(2 * per_row + 1, PAGE, STACK_SPEC.num_kv_heads, STACK_SPEC.head_dim)
            for _ in range(2 * LAYERS_OF_STACK)
        ]
        table = torch.arange(1, 2 * per_row + 1, dtype=torch.int32).view(2, per_row)
        k_caches, v_caches = caches[:LAYERS_OF_STACK], caches[LAYERS_OF_STACK:]
        results = torch.full((2, 2, tokens, WIDTH), torch.nan)
        for rows in steps:
            positions = torch.cat([torch.arange(first, last) for _, first, last in rows])
            owner = torch.cat([torch.full((last - first,), r) for r, first, last in rows])
            inputs = step_inputs(rows, table, k_caches, v_caches)
            made = stack(x[owner, positions], positions, CpuAttention(inputs))
            assert made is not None
            for kept, values in zip(results, made, strict=True):
                kept[owner, positions] = values
        return [*results, *caches]

    with threads(1):
        expected = run([[(0, 0, tokens)], [(1, 0, tokens)]])
    assert not any(each.isnan().any() for each in expected)
    chunks = [[(0, at, min(tokens, at + 13)), (1, at, min(tokens, at + 13))] for at in range(0, tokens, 13)]
    singly = [[(0, 0, 100)], [(1, 0, 90)], *([(0, at, at + 1), (1, at - 10, at - 9)] for at in range(100, tokens))]
    singly.append([(1, tokens - 10, tokens)])
    for steps in (chunks, singly):
        for count in (1, 2, 3):
            with threads(count):
                for ours, theirs in zip(run(steps), expected, strict=True):
                    assert torch.equal(ours, theirs)
