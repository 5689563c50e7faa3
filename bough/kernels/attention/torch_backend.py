"""Attention in plain torch, on any device: rows of similar length are padded together and attended in one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.config.step_memory import GATHERED_KEYS
from bough.kernels.attention import sparse
from bough.kernels.attention.inputs import I32, AttentionInputs, HostLengths, IndexQueries, Spec
from bough.kernels.attention.reference import sees
from bough.kernels.kv_codes import decode
from bough.kernels.rotary import write_kv

MAX_PAIRS = 1 << 22
"""Query-key pairs of a bucket at most (further rows, or queries of one, go to another bucket): bounds the masks' memory."""
MAX_KEYS = GATHERED_KEYS
"""Keys of a bucket of several rows at most: they are gathered from their pages."""


@dataclass(slots=True)
class Bucket:
    """Rows attended together: B rows, padded to Q queries and S keys each."""

    tokens_BQ: Tensor
    """Index of each query token; padding repeats the row's last one."""
    loc_BS: Tensor
    """KV location of each key; padding repeats location 0 of the cache."""
    key_BS: Tensor
    """Position of each key: [1, S] where all rows have the same."""
    position_BQ: Tensor
    kv_len_B: Tensor
    real: Tensor | None
    """bool [B, Q]: queries that are not padding; None: all."""
    gaps_BQ2: Tensor | None = None
    """Keys that are hidden (`AttentionInputs.gaps_T2`)."""


Kind = tuple[int, int | None, int | None, bool]
"""Layers of one kind see the same keys, in the same pages: line, window, chunk, whether it is causal."""


class TorchAttention:
    """Sizes of buckets come from `AttentionInputs.host` where it is given, else from the tensors (a wait on CUDA)."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        self._lengths = RowLengths.read(inputs)
        self._groups = list(group_rows(self._lengths.num_query_R, self._lengths.kv_len_R))
        self._covers_all = sum(int(self._lengths.num_query_R[rows].sum()) for rows in self._groups) == inputs.num_tokens
        self._buckets: dict[Kind, list[Bucket]] = {}
        self._masks: dict[tuple[Kind, int], Tensor] = {}
        self._chosen: TorchAttention | None = None
        """Reads the tokens that were chosen last; None: all are read."""

    def choose(self, spec: Spec, index: IndexQueries) -> None:
        """Writes the keys of the step's tokens to their pages, and chooses what this layer and those after it read."""
        inputs, lengths = self._inputs, self._lengths
        cache = sparse.cache_of(inputs, spec)
        sparse.write_index(index.k_TD, cache, inputs.loc_T)
        self._chosen = None
        most = int(lengths.kv_len_R.max(initial=0))
        if most <= spec.topk:
            return
        tokens, device = inputs.num_tokens, inputs.loc_T.device
        table_TK = torch.zeros(tokens, spec.topk, dtype=torch.int32, device=device)
        count_T = torch.zeros(tokens, dtype=torch.int32, device=device)
        for number, bucket in enumerate(self._buckets_of(spec)):
            k_BSD = sparse.read_index(cache, bucket.loc_BS, index.q_TID.dtype)
            scores = sparse.index_scores(index, bucket.tokens_BQ, k_BSD)
            at_BQK, count_BQ = sparse.best(scores, self._mask(spec, self._kind(spec), number), spec.topk)
            row_B1K = torch.arange(len(at_BQK), device=device)[:, None, None]
            # Padding repeats a row's last query, and is chosen for alike.
            table_TK[bucket.tokens_BQ, : at_BQK.shape[2]] = bucket.loc_BS[row_B1K, at_BQK].int()
            count_T[bucket.tokens_BQ] = count_BQ.int()
        self._chosen = TorchAttention(sparse.view_of(inputs, table_TK, count_T, self._host_of_queries(spec.topk)))

    def _host_of_queries(self, topk: int) -> HostLengths:
        """Lengths of rows of one query each that read `topk` tokens at most."""
        lengths, tokens = self._lengths, self._inputs.num_tokens
        seen, num_query = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
        for start, count, kv_len in zip(lengths.start_R, lengths.num_query_R, lengths.kv_len_R, strict=True):
            seen[start : start + count] = np.arange(kv_len - count + 1, kv_len + 1)
            num_query[start : start + count] = 1
        return HostLengths(num_query_R=num_query, context_R=np.minimum(seen, topk) - num_query)

    def forward(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Writes k and v to their pages, then attends: [T, N * V]."""
        inputs = self._inputs.of_layer(spec.layer)
        k_cache, v_cache = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
        k_scale, v_scale = inputs.scales(spec.layer)
        ranges = inputs.ranges_of(spec.layer)
        write_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.loc_T, k_scale=k_scale, v_scale=v_scale, ranges=ranges)
        return self.attend(spec, q_TNH)

    def attend(self, spec: Spec, q_TNH: Tensor) -> Tensor:
        """Attends to KV that is in the pages: [T, N * V]."""
        if spec.topk and self._chosen is not None:
            return self._chosen.attend(spec, q_TNH)
        inputs = self._inputs.of_layer(spec.layer)
        shape = (q_TNH.shape[0], spec.num_heads, spec.v_width)
        out = q_TNH.new_empty(shape) if self._covers_all else q_TNH.new_zeros(shape)
        kind = self._kind(spec)
        for number, bucket in enumerate(self._buckets_of(spec)):
            k, v = gather_layer(inputs, spec, bucket.loc_BS, q_TNH.dtype)
            mask = self._mask(spec, kind, number)
            result = _attend(spec, q_TNH[bucket.tokens_BQ], k, v, mask, bucket.key_BS)
            if bucket.real is None:
                out[bucket.tokens_BQ.flatten()] = result.flatten(0, 1)
            else:
                out[bucket.tokens_BQ[bucket.real]] = result[bucket.real]
        return out.flatten(1)

    def _kind(self, spec: Spec) -> Kind:
        lines = self._inputs.lines
        return 0 if lines is None else lines.of_layer[spec.layer], spec.window, spec.chunk, spec.causal

    def _buckets_of(self, spec: Spec) -> list[Bucket]:
        kind, lengths = self._kind(spec), self._lengths
        if kind not in self._buckets:
            inputs = self._inputs.of_layer(spec.layer)
            self._buckets[kind] = [
                make_bucket(inputs, lengths, rows, queries, spec)
                for rows in self._groups
                for queries in query_pieces(lengths, rows)
            ]  # fmt: skip
        return self._buckets[kind]

    def _mask(self, spec: Spec, kind: Kind, number: int) -> Tensor:
        """bool [B, Q, S]: what each query sees. Layers of one kind share it, unless there are too many to keep."""
        key = (kind, number)
        found = self._masks.get(key)
        if found is None:
            bucket = self._buckets[kind][number]
            at, keys = bucket.position_BQ.unsqueeze(2), bucket.key_BS.unsqueeze(1)
            found = keys < bucket.kv_len_B.view(-1, 1, 1)
            tree = self._inputs.tree
            if tree is not None:
                tokens = bucket.tokens_BQ
                found = found & sees(tree.seen_T[tokens].unsqueeze(2), tree.tail_T[tokens].unsqueeze(2), keys)
                at = tree.positions_T[tokens].unsqueeze(2)
            elif spec.causal:
                found = found & (keys <= at)
            if spec.window is not None:
                found = found & (keys > at - spec.window)
            if spec.chunk is not None:
                found = found & (keys >= at // spec.chunk * spec.chunk)
            if bucket.gaps_BQ2 is not None:
                found = found & ((keys < bucket.gaps_BQ2[..., :1]) | (keys >= bucket.gaps_BQ2[..., 1:]))
            found = found.expand(-1, at.shape[1], -1)
            if sum(each.tokens_BQ.numel() * each.loc_BS.shape[1] for each in self._buckets[kind]) <= MAX_PAIRS:
                self._masks[key] = found
        return found


def _attend(spec: Spec, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, mask_BQS: Tensor, key_BS: Tensor) -> Tensor:
    """[B, Q, N, V]. Heads that share keys become further queries of one head, so that keys are never repeated."""
    group = spec.num_heads // spec.num_kv_heads
    rows, queries = q_BQNH.shape[:2]
    q_BQKGH = q_BQNH.reshape(rows, queries, spec.num_kv_heads, group, -1)
    q_BKXH = q_BQKGH.permute(0, 2, 3, 1, 4).flatten(2, 3)
    k_BKSH, v_BKSV = k_BSKH.transpose(1, 2), v_BSKV.transpose(1, 2)
    mask = mask_BQS.repeat(1, group, 1).unsqueeze(1)
    if spec.softcap or spec.sinks is not None or spec.slopes is not None:
        scores = (q_BKXH.float() @ k_BKSH.float().transpose(2, 3)) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.slopes is not None:
            scores = scores + by_row(spec.slopes, spec.num_kv_heads, queries) * key_BS[:, None, None]
        scores = scores.masked_fill(~mask, float("-inf"))
        if spec.sinks is not None:
            beside = by_row(spec.sinks, spec.num_kv_heads, queries).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, beside), -1)
        out = (scores.softmax(-1)[..., : k_BKSH.shape[2]] @ v_BKSV.float()).to(q_BQNH.dtype)
    else:
        out = F.scaled_dot_product_attention(q_BKXH, k_BKSH, v_BKSV, attn_mask=mask, scale=spec.scale)
    return out.reshape(rows, spec.num_kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)


def by_row(values_N: Tensor, num_kv_heads: int, queries: int) -> Tensor:
    """[1, K, X, 1]: values by head, for rows that are the queries of each head of a group."""
    return values_N.float().view(1, num_kv_heads, -1, 1).repeat_interleave(queries, 2)


@dataclass(slots=True)
class RowLengths:
    """On the host, by row. Rows without keys have no queries either."""

    start_R: I32
    num_query_R: I32
    kv_len_R: I32
    """At most."""

    @staticmethod
    def read(inputs: AttentionInputs) -> RowLengths:
        if inputs.host is not None:
            num_query, kv_len = inputs.host.num_query_R, inputs.host.num_query_R + inputs.host.context_R
            start = np.cumsum(num_query) - num_query
        else:
            bounds, kv_len = inputs.query_start_R1.cpu().numpy(), inputs.kv_len_R.cpu().numpy()
            start, num_query = bounds[:-1], np.diff(bounds)
        return RowLengths(start, np.where(kv_len > 0, num_query, 0), kv_len)


def group_rows(num_query: I32, kv_len: I32) -> Iterable[I32]:
    """Rows that have queries, in groups of similar shape: within each, padding at most doubles queries and keys."""
    live = np.flatnonzero(num_query > 0)
    if len(live) == 0:
        return []
    key = _log2(num_query[live]) * 64 + _log2(np.maximum(kv_len[live], 32))
    groups = []
    for value in np.unique(key):
        rows = live[key == value]
        pairs = int(num_query[rows].max()) * int(kv_len[rows].max())
        step = max(1, min(MAX_PAIRS // max(1, pairs), MAX_KEYS // max(1, int(kv_len[rows].max()))))
        groups += [rows[i : i + step] for i in range(0, len(rows), step)]
    return groups


def query_pieces(lengths: RowLengths, rows: I32) -> Iterable[slice]:
    """The queries of a group, all at once or, where one row's are too many, in turns."""
    queries, keys = int(lengths.num_query_R[rows].max()), int(lengths.kv_len_R[rows].max())
    step = max(1, MAX_PAIRS // (keys * len(rows)))
    return [slice(at, min(at + step, queries)) for at in range(0, queries, step)]


def _log2(lengths: I32) -> I32:
    return np.ceil(np.log2(lengths)).astype(np.int32)


def make_bucket(
    inputs: AttentionInputs, lengths: RowLengths, rows: I32, queries: slice, spec: Spec | None = None
) -> Bucket:
    """`spec`: what a layer sees; None: all keys are needed."""
    device = inputs.page_table.device
    num_query, starts = lengths.num_query_R[rows].astype(np.int64), lengths.start_R[rows].astype(np.int64)
    wanted = np.arange(queries.start, queries.stop)
    step = np.minimum(wanted, num_query[:, None] - 1)
    real = None if (num_query == num_query[0]).all() else wanted < num_query[:, None]
    rows_B = torch.from_numpy(rows).to(device)
    kv_len_B, slots = inputs.kv_len_R[rows_B].long(), inputs.slots_R[rows_B].long()
    position_BQ = kv_len_B.unsqueeze(1) + torch.from_numpy(step - num_query[:, None]).to(device)
    key_BS = _keys(spec, int(lengths.kv_len_R[rows].max()), position_BQ)
    # A row that is shorter than others has no such column: its table ends, or what it has there is none of its own.
    column_BS = (key_BS // inputs.page_size).clamp_max_(inputs.page_table.shape[1] - 1)
    loc = inputs.page_table[slots.unsqueeze(1), column_BS].long() * inputs.page_size + key_BS % inputs.page_size
    tokens = torch.from_numpy(starts[:, None] + step).to(device)
    return Bucket(
        tokens_BQ=tokens,
        loc_BS=loc.masked_fill(key_BS >= kv_len_B.unsqueeze(1), 0),
        key_BS=key_BS,
        position_BQ=position_BQ,
        kv_len_B=kv_len_B,
        real=None if real is None else torch.from_numpy(real).to(device),
        gaps_BQ2=None if inputs.gaps_T2 is None else inputs.gaps_T2[tokens],
    )


def _keys(spec: Spec | None, num_keys: int, position_BQ: Tensor) -> Tensor:
    """Positions of the keys that some query of a row sees: of a window no others are read, which may be gone."""
    bound = (spec.chunk or spec.window) if spec is not None and spec.causal else None
    if spec is None or bound is None:
        return torch.arange(num_keys, device=position_BQ.device).unsqueeze(0)
    first_B = position_BQ[:, 0]
    first_B = first_B // bound * bound if spec.chunk else (first_B - bound + 1).clamp_min_(0)
    count = min(num_keys, bound + position_BQ.shape[1] - 1)
    return first_B.unsqueeze(1) + torch.arange(count, device=position_BQ.device)


def gather_layer(inputs: AttentionInputs, spec: Spec, loc_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, S, K, H] and [B, S, K, V]: keys and values of a layer."""
    caches, ranges = (inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]), inputs.ranges_of(spec.layer)
    if ranges is not None:
        held = zip(caches, ranges, (spec.head_dim, spec.v_width), strict=True)
        keys, values = (
            decode(c.flatten(0, 1)[loc_BS], r.flatten(0, 1)[loc_BS], width).to(dtype) for c, r, width in held
        )
        return keys, values
    k_scale, v_scale = inputs.scales(spec.layer)
    return gather_kv(caches[0], loc_BS, dtype, k_scale), gather_kv(caches[1], loc_BS, dtype, v_scale)


def gather_kv(cache: Tensor, loc_BS: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """[B, S, K, H] in the queries' dtype."""
    flat = cache.flatten(0, 1)
    if cache.dtype.itemsize == 1:
        found = flat.view(torch.uint8)[loc_BS].view(cache.dtype).to(dtype)
    else:
        found = flat[loc_BS].to(dtype)
    return found if scale == 1.0 else found * scale
