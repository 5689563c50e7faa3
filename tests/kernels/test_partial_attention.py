"""Attention over parts of the keys, merged, is attention over all of them: every kind of layer, rows of any shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bough.kernels.attention.inputs import AttentionInputs, HostLengths, Spec
from bough.kernels.attention.partial import PartialAttention, TokenShare, merge_partials
from bough.kernels.attention.torch_backend import TorchAttention

HEADS, KV_HEADS, DIM = 4, 2, 8
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "chunk": {"chunk": 7},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "sinks in a window": {"sinks": torch.linspace(-1, 2, HEADS), "window": 3},
    "slopes": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "latent": {"latent": True, "num_kv_heads": 1, "v_head_dim": 6},
}
# (query tokens, context) of each row: decodes, drafts, prompts with and without a cached prefix, one row of a single token.
ROWS = [(1, 0), (1, 40), (3, 17), (9, 0), (5, 30), (1, 1)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_the_whole(kind: str, size: int) -> None:
    spec = Spec(
        **{"layer": 0, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "scale": 0.3, **KINDS[kind]}
    )
    generator = torch.Generator().manual_seed(len(kind))
    page = 4 * size  # tokens of a sequence
    width = 16
    num_query = np.array([query for query, _ in ROWS], np.int32)
    context = np.array([before for _, before in ROWS], np.int32)
    table = torch.from_numpy(np.random.default_rng(0).permutation(len(ROWS) * width).reshape(len(ROWS), -1) + 1).int()
    num_pages = int(table.max()) + 1
    v_dim = spec.v_head_dim or DIM

    def caches(page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.zeros(num_pages, page_size, spec.num_kv_heads, DIM)
        if spec.latent:
            return keys, keys[..., :v_dim]
        return keys, torch.zeros(num_pages, page_size, spec.num_kv_heads, v_dim)

    whole_k, whole_v = caches(page)
    parts = [caches(page // size) for _ in range(size)]
    for row, (query, before) in enumerate(ROWS):
        for position in range(before + query):
            key = torch.randn(spec.num_kv_heads, DIM, generator=generator)
            value = key[..., :v_dim] if spec.latent else torch.randn(spec.num_kv_heads, v_dim, generator=generator)
            at = int(table[row, position // page]) * page + position % page
            for (k, v), where in ((parts[at % size], at // size), ((whole_k, whole_v), at)):
                k.flatten(0, 1)[where] = key
                v.flatten(0, 1)[where] = value
    num_tokens = int(num_query.sum())
    inputs = AttentionInputs(
        query_start_R1=torch.from_numpy(np.concatenate(([0], np.cumsum(num_query)))).int(),
        kv_len_R=torch.from_numpy(num_query + context),
        slots_R=torch.arange(len(ROWS)).int(),
        page_table=table,
        loc_T=torch.full((num_tokens,), -1),
        page_size=page,
        max_query=int(num_query.max()),
        max_kv=int((num_query + context).max()),
        k_caches=[whole_k],
        v_caches=[whole_v],
        # The host knows bounds of decode rows' lengths.
        host=HostLengths(num_query_R=num_query, context_R=context + np.where(num_query == 1, 3, 0).astype(np.int32)),
    )
    q = torch.randn(num_tokens, HEADS, DIM, generator=generator)
    nothing_k, nothing_v = (
        torch.zeros(num_tokens, spec.num_kv_heads, DIM),
        torch.zeros(num_tokens, spec.num_kv_heads, v_dim),
    )
    expected = TorchAttention(inputs).forward(spec, q, nothing_k, nothing_v)
    results = []
    for rank, (k, v) in enumerate(parts):
        shared = PartialAttention(replace(inputs, k_caches=[k], v_caches=[v]), TokenShare(rank, size))
        results.append(shared.forward(spec, q))
    merged = merge_partials(torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results]))
    assert torch.allclose(merged.flatten(1), expected, atol=2e-5)


def test_where_a_rank_keeps_tokens() -> None:
    share = TokenShare(1, 3)
    assert share.held(torch.tensor([0, 1, 2, 3, 4, 5])).tolist() == [0, 0, 1, 1, 1, 2]
    assert share.locations(torch.tensor([-1, 12, 13, 14, 16])).tolist() == [-1, -1, 4, -1, 5]


def test_what_sees_nothing_is_zero() -> None:
    out, lse = torch.ones(2, 1, 1, 3), torch.full((2, 1, 1), float("-inf"))
    assert merge_partials(out, lse).tolist() == [[[0.0, 0.0, 0.0]]]
