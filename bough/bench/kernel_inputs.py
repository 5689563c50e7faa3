"""Inputs for the attention benchmarks: rows of given lengths over randomly placed pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionInputs, AttentionSpec, HostLengths, SpanTensors
from bough.kernels.attention.triton_backend import TritonAttention


def layer_of(num_heads: int, num_kv_heads: int, head_dim: int, layer: int = 0) -> AttentionSpec:
    """An attention layer."""
    return AttentionSpec(layer, num_heads, num_kv_heads, head_dim, scale=0.09)


LLAMA_8B = layer_of(32, 8, 128)


@dataclass(slots=True)
class Setup:
    """A step's attention, ready to run on each of a few copies of its KV."""

    inputs: AttentionInputs
    spec: AttentionSpec
    q: Tensor
    kv_bytes: int
    flops: float

    def layers(self) -> list[Callable[[], object]]:
        """One call a copy of the KV; the step is planned anew."""
        backend = TritonAttention(self.q.device)
        backend.prepare(self.inputs)
        calls: list[Callable[[], object]] = []
        kv = self.q[:, : self.spec.num_kv_heads]
        for layer in range(len(self.inputs.k_caches)):
            spec = layer_of(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim, layer)
            calls.append(partial(backend.attend, spec, self.q, kv, kv))
        calls[0]()
        return calls * max(1, 8 // len(calls))

    def whole_layers(self, *, hopper: bool) -> list[Callable[[], object]]:
        """As `layers` for decode rows, from the products' results on: rotation, KV write and attention."""
        backend = TritonAttention(self.q.device, hopper=hopper)
        backend.prepare(self.inputs)
        kv = self.q[:, : self.spec.num_kv_heads]
        positions = self.inputs.kv_len_R.long() - 1
        cos_sin = torch.ones((self.inputs.max_kv, self.spec.head_dim), device=self.q.device)
        calls: list[Callable[[], object]] = []
        for layer in range(len(self.inputs.k_caches)):
            spec = layer_of(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim, layer)
            calls.append(partial(backend.forward_rope, spec, self.q, kv, kv, positions, cos_sin))
        calls[0]()
        return calls * max(1, 8 // len(calls))


def decode_inputs(
    batch: int, low: int, high: int, page_size: int, spec: AttentionSpec, device: torch.device, *, copies: int
) -> Setup:
    lengths = np.random.default_rng(0).integers(low, high + 1, batch)
    return _setup([(1, int(length) - 1) for length in lengths], page_size, spec, device, copies)


def extend_inputs(rows: list[tuple[int, int]], page_size: int, spec: AttentionSpec, device: torch.device) -> Setup:
    """Rows of (queries, context). Fresh rows go through the paged kernel too."""
    setup = _setup(rows, page_size, spec, device, 1)
    setup.inputs.host = None
    return setup


def _setup(
    rows: list[tuple[int, int]], page_size: int, spec: AttentionSpec, device: torch.device, copies: int
) -> Setup:
    query = np.array([row[0] for row in rows], np.int32)
    context = np.array([row[1] for row in rows], np.int32)
    kv_len = query + context
    pages = -(-kv_len // page_size)
    num_pages = int(pages.sum()) + 1
    order = np.random.default_rng(1).permutation(num_pages - 1).astype(np.int32) + 1
    table = np.zeros((len(rows), int(pages.max())), np.int32)
    taken = 0
    for row, count in enumerate(pages):
        table[row, :count] = order[taken : taken + count]
        taken += count

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def cache() -> Tensor:
        shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    inputs = AttentionInputs(
        query_start_R1=on_device(np.concatenate(([0], query.cumsum())).astype(np.int32)),
        kv_len_R=on_device(kv_len),
        slots_R=on_device(np.arange(len(rows), dtype=np.int32)),
        page_table=on_device(table),
        loc_T=on_device(np.full(int(query.sum()), -1, np.int64)),
        page_size=page_size,
        max_query=int(query.max()),
        max_kv=int(kv_len.max()),
        k_caches=[cache() for _ in range(copies)],
        v_caches=[cache() for _ in range(copies)],
        host=HostLengths(query, context),
    )
    q = torch.randn(int(query.sum()), spec.num_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
    seen = sum(int(n) * int(c) + int(n) * (int(n) + 1) // 2 for n, c in rows)
    return Setup(
        inputs,
        spec,
        q,
        kv_bytes=int(kv_len.sum()) * spec.num_kv_heads * spec.head_dim * 4,
        flops=4.0 * seen * spec.num_heads * spec.head_dim,
    )


Spans = list[tuple[int, int, int, Sequence[int]]]
"""(level, first and last KV token, rows), levels ascending."""


def equal_spans(levels: Sequence[tuple[int, int]], rows: int) -> Spans:
    """Spans of a regular tree over `rows` rows: (spans, tokens of each) by level."""
    spans: Spans = []
    first = 0
    for level, (count, tokens) in enumerate(levels):
        each = rows // count
        spans += [(level, first, first + tokens, range(n * each, (n + 1) * each)) for n in range(count)]
        first += tokens
    return spans


def share_spans(inputs: AttentionInputs, spans: Spans) -> None:
    """Makes rows of a step share spans: they read the pages of the first of them."""
    for _, first, last, rows in spans:
        stretch = slice(first // inputs.page_size, last // inputs.page_size)
        inputs.page_table[list(rows), stretch] = inputs.page_table[rows[0], stretch]

    def ints(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=inputs.page_table.device)

    inputs.shared = SpanTensors(
        rows_M=ints(row for *_, rows in spans for row in rows),
        start_S1=ints(np.cumsum([0, *(len(rows) for *_, rows in spans)]).tolist()),
        first_S=ints(first for _, first, _, _ in spans),
        last_S=ints(last for _, _, last, _ in spans),
        level_S=ints(level for level, *_ in spans),
        levels=spans[-1][0] + 1,
        num_tokens=inputs.num_tokens,
    )
