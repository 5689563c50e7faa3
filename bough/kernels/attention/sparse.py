"""Attention over chosen tokens: which ones a query reads, in plain torch, and how any backend reads them.

A choice is a page table with pages of one token: each query becomes a row whose pages are the tokens it reads. So kernels
that attend to paged KV need to know nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bough.config.step_memory import INDEX_PAIRS
from bough.kernels.attention.inputs import AttentionInputs, HostLengths, IndexQueries, Spec

_LEAST = torch.iinfo(torch.int64).min


def write_index(k_TD: Tensor, cache: Tensor, loc_T: Tensor) -> None:
    """Writes the keys that tokens are chosen by to their pages; those of tokens that go nowhere to page 0, which is no
    request's."""
    if cache.dtype.itemsize == 1:
        most = torch.finfo(cache.dtype).max
        held = k_TD.clamp(-most, most).to(cache.dtype).view(torch.uint8)
        cache.view(torch.uint8).flatten(0, 2)[loc_T.clamp_min(0)] = held
    else:
        cache.flatten(0, 2)[loc_T.clamp_min(0)] = k_TD.to(cache.dtype)


def read_index(cache: Tensor, loc_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, D]: keys that tokens are chosen by."""
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8).flatten(0, 2)[loc_BS].view(cache.dtype).to(dtype)
    return cache.flatten(0, 2)[loc_BS].to(dtype)


def index_scores(index: IndexQueries, tokens_BQ: Tensor, k_BSD: Tensor) -> Tensor:
    """float32 [B, Q, S]: what each query makes of each token of its row."""
    rows, queries = tokens_BQ.shape
    keys_BDS = k_BSD.float().transpose(1, 2)
    scores_BQS = keys_BDS.new_zeros(rows, queries, keys_BDS.shape[2])
    num_heads = index.q_TID.shape[1]
    step = max(1, INDEX_PAIRS // scores_BQS.numel())
    for first in range(0, num_heads, step):
        heads = slice(first, min(first + step, num_heads))
        q_BXD = index.q_TID[:, heads][tokens_BQ].float().flatten(1, 2)
        by_head_BQIS = (q_BXD @ keys_BDS).view(rows, queries, heads.stop - heads.start, -1).relu_()
        scores_BQS += (index.weights_TI[:, heads][tokens_BQ].unsqueeze(2) @ by_head_BQIS).squeeze(2)
    return scores_BQS


def best(scores_BQS: Tensor, seen_BQS: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(int64 [B, Q, K] places of the tokens with the best scores, in the order of places; int64 [B, Q] how many they are).

    Of tokens with equal scores the newest are taken: which ones does not depend on how rows are cut and padded.
    """
    num_keys = scores_BQS.shape[2]
    bits = (scores_BQS + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place_S = torch.arange(num_keys, device=bits.device)
    rank_BQS = (ordered.long() << 32 | place_S).masked_fill_(~seen_BQS, _LEAST)
    found, at_BQK = rank_BQS.topk(min(topk, num_keys), dim=2, sorted=False)
    is_seen = found != _LEAST
    at_BQK = at_BQK.masked_fill_(~is_seen, num_keys).sort(2).values
    return at_BQK.clamp_max_(num_keys - 1), is_seen.sum(2)


def view_of(
    inputs: AttentionInputs, table_TK: Tensor, count_T: Tensor, host: HostLengths | None = None
) -> AttentionInputs:
    """A step whose rows are the queries of `inputs`: query t reads the tokens at locations `table_TK[t, : count_T[t]]`.

    `host`: lengths of these rows.
    """
    tokens, device = len(table_TK), table_TK.device
    rows = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    return replace(
        inputs,
        query_start_R1=rows,
        kv_len_R=count_T,
        slots_R=rows[:-1],
        page_table=table_TK,
        loc_T=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        page_size=1,
        max_query=1,
        max_kv=table_TK.shape[1],
        k_caches=[cache.flatten(0, 1).unsqueeze(1) for cache in inputs.k_caches],
        v_caches=[cache.flatten(0, 1).unsqueeze(1) for cache in inputs.v_caches],
        index_caches=(),
        shared=None,
        host=host,
        tree=None,
        tail=None,
        lines=None,
    )


def cache_of(inputs: AttentionInputs, spec: Spec) -> Tensor:
    """The keys that a layer chooses tokens by. Raises RuntimeError if there are none."""
    found = inputs.index_caches[spec.layer] if inputs.index_caches else None
    if found is None or inputs.lines is not None:
        raise RuntimeError(f"layer {spec.layer} has no pages for the keys that it chooses tokens by")
    return found
