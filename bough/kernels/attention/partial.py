"""Attention of queries over a part of their keys, in plain torch, on any device; and the sum of such parts.

A rank that holds every c-th token of a sequence attends to those, and gives with its result the logarithm of the sum of
its softmax's terms (LSE), by which the ranks' results are weighed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionInputs, HostLengths, Spec
from bough.kernels.attention.torch_backend import (
    Bucket,
    RowLengths,
    by_row,
    gather_layer,
    group_rows,
    make_bucket,
    query_pieces,
)


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Which tokens of a sequence are here: those at positions `rank`, `rank + size`, ..."""

    rank: int
    size: int

    def held(self, lengths: Tensor) -> Tensor:
        """How many tokens of sequences of these lengths are here."""
        return torch.div(lengths - self.rank + self.size - 1, self.size, rounding_mode="floor").clamp(min=0)

    def locations(self, loc_T: Tensor) -> Tensor:
        """Where tokens are kept here, by their locations in pages of all tokens; -1: elsewhere."""
        return torch.where((loc_T >= 0) & (loc_T % self.size == self.rank), loc_T // self.size, -1)


class PartialAttention:
    """Attention of a step's rows over the keys that are here. Rows' keys lie in pages of `inputs.page_size / share.size`
    tokens; `inputs` speaks of all tokens, except for its caches."""

    def __init__(self, inputs: AttentionInputs, share: TokenShare) -> None:
        assert inputs.host is not None, "steps over shared contexts are not captured"
        self._share = share
        host = inputs.host
        bound = (host.context_R + host.num_query_R - share.rank + share.size - 1) // share.size  # of keys here
        local = replace(
            inputs,
            page_size=inputs.page_size // share.size,
            kv_len_R=share.held(inputs.kv_len_R).to(torch.int32),
            host=HostLengths(
                num_query_R=host.num_query_R, context_R=(bound - host.num_query_R).clip(min=-host.num_query_R)
            ),
        )
        self._inputs = local
        self._total_R = inputs.kv_len_R.long()
        lengths = RowLengths.read(local)
        groups = [
            (torch.from_numpy(rows).to(inputs.kv_len_R.device), make_bucket(local, lengths, rows, queries))
            for rows in group_rows(lengths.num_query_R, lengths.kv_len_R)
            for queries in query_pieces(lengths, rows)
        ]
        # A query's position follows from all tokens of its row, not from those here.
        self._buckets = [
            replace(each, position_BQ=each.position_BQ + (self._total_R[rows] - each.kv_len_B).unsqueeze(1))
            for rows, each in groups
        ]

    def forward(self, spec: Spec, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        """(float32 [T, N, V], LSE float32 [T, N]): zeros and -infinity for queries that see nothing here."""
        inputs = self._inputs
        out_TNV = q_TNH.new_zeros((len(q_TNH), spec.num_heads, spec.v_width), dtype=torch.float32)
        lse_TN = out_TNV.new_full(out_TNV.shape[:2], float("-inf"))
        for bucket in self._buckets:
            k, v = gather_layer(inputs, spec, bucket.loc_BS, torch.float32)
            result, lse = self._attend(spec, q_TNH[bucket.tokens_BQ].float(), k, v, bucket)
            tokens, real = bucket.tokens_BQ, bucket.real
            at = tokens.flatten() if real is None else tokens[real]
            out_TNV[at] = result.flatten(0, 1) if real is None else result[real]
            lse_TN[at] = lse.flatten(0, 1) if real is None else lse[real]
        return out_TNV, lse_TN

    def _attend(
        self, spec: Spec, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, bucket: Bucket
    ) -> tuple[Tensor, Tensor]:
        """[B, Q, N, V] and [B, Q, N]."""
        rows, queries = q_BQNH.shape[:2]
        group = spec.num_heads // spec.num_kv_heads
        q_BKXH = q_BQNH.reshape(rows, queries, spec.num_kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = q_BKXH @ k_BSKH.permute(0, 2, 3, 1) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        keys_S = torch.arange(k_BSKH.shape[1], device=scores.device) * self._share.size + self._share.rank
        if spec.slopes is not None:
            scores = scores + by_row(spec.slopes, spec.num_kv_heads, queries) * keys_S
        seen_BQS = self._seen(spec, keys_S, bucket)
        # Pages before a window, and behind a row's end, may be another row's, and hold what is not a number.
        v_BSKV = v_BSKV.masked_fill(~seen_BQS.any(1)[:, :, None, None], 0.0)
        seen = seen_BQS.repeat(1, group, 1).unsqueeze(1)
        scores = scores.masked_fill(~seen, float("-inf"))
        if spec.sinks is not None and self._share.rank == 0:  # a sink takes part once
            beside = by_row(spec.sinks, spec.num_kv_heads, queries).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, beside), -1)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
        out = weights[..., : k_BSKH.shape[1]] @ v_BSKV.transpose(1, 2)
        out = out.reshape(rows, spec.num_kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out, lse.reshape(rows, spec.num_kv_heads, group, queries).permute(0, 3, 1, 2).flatten(2, 3)

    def _seen(self, spec: Spec, keys_S: Tensor, bucket: Bucket) -> Tensor:
        """bool [B, Q, S]"""
        at = bucket.position_BQ.unsqueeze(2)
        here = torch.arange(len(keys_S), device=at.device) < bucket.kv_len_B.view(-1, 1, 1)
        seen = here & (keys_S <= at)
        if spec.window is not None:
            seen = seen & (keys_S > at - spec.window)
        if spec.chunk is not None:
            seen = seen & (keys_S >= at // spec.chunk * spec.chunk)
        return seen


def merge_partials(out_PTNV: Tensor, lse_PTN: Tensor) -> Tensor:
    """[T, N, V]: P results over different keys as one; zeros for queries that saw nothing anywhere."""
    most_TN = lse_PTN.amax(0)
    weights_PTN = torch.exp(lse_PTN - torch.where(most_TN.isinf(), 0.0, most_TN))
    total_TN = weights_PTN.sum(0)
    weights_PTN = weights_PTN / torch.where(total_TN > 0, total_TN, 1.0)
    return (weights_PTN.unsqueeze(-1) * out_PTNV).sum(0)
