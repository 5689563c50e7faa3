"""Attention of texts that lie whole in the step: no pages, no context, nothing kept. For models that pool.

Half precision on CUDA goes to the library's kernel for ragged batches; elsewhere rows of similar length are padded together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.attention.inputs import I32, AttentionInputs, HostLengths, Spec

MAX_PAIRS = 1 << 24
"""Query-key pairs of a bucket at most: bounds the masks' memory."""


@dataclass(slots=True)
class _Bucket:
    """B rows padded to Q tokens each."""

    tokens_BQ: Tensor
    """Index of each token; padding repeats the row's last one."""
    real_BQ: Tensor | None
    """Which are not padding; None: all."""
    back_X: Tensor | None
    """Where the real ones stand in the flattened bucket; None: all, in order."""
    length_B: Tensor


class WholeAttention:
    """An attention backend for rows without context. Reads the lengths on the host (`AttentionInputs.host`)."""

    def __init__(self, inputs: AttentionInputs) -> None:
        host = inputs.host
        if host is None or host.context_R.any():
            raise ValueError("texts must be computed whole, outside captured graphs")
        self._lengths = host.num_query_R
        self._query_start = inputs.query_start_R1
        self._device = inputs.query_start_R1.device
        self._buckets: list[_Bucket] | None = None
        self._masks: dict[tuple[int, int | None, int | None, bool], Tensor | None] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer: keys and values that later layers read, too."""

    def forward(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """[T, N * V]."""
        if spec.is_shared:
            self._kept[spec.layer] = k_TKH, v_TKH
        return self._attend(spec, q_TNH, k_TKH, v_TKH)

    def attend(self, spec: Spec, q_TNH: Tensor) -> Tensor:
        """[T, N * V], of an earlier layer's keys and values."""
        return self._attend(spec, q_TNH, *self._kept[spec.layer])

    def _attend(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        ragged = _ragged_kernel() if _suits_ragged(spec, q_TNH, v_TKH) else None
        if ragged is not None:
            return ragged(spec, q_TNH, k_TKH, v_TKH, self._query_start, int(self._lengths.max()))
        if self._buckets is None:
            self._buckets = [_bucket(self._lengths, rows, self._device) for rows in by_length(self._lengths)]
        shape = (q_TNH.shape[0], spec.num_heads, v_TKH.shape[2])
        result = q_TNH.new_empty(shape)
        for number, bucket in enumerate(self._buckets):
            where = bucket.tokens_BQ
            out = _attend(spec, q_TNH[where], k_TKH[where], v_TKH[where], self._mask(spec, number, bucket))
            flat = out.flatten(0, 1)
            if bucket.back_X is None:
                result[where.flatten()] = flat
            else:
                assert bucket.real_BQ is not None
                result[where[bucket.real_BQ]] = flat[bucket.back_X]
        return result.flatten(1)

    def _mask(self, spec: Spec, number: int, bucket: _Bucket) -> Tensor | None:
        """bool [B, 1, Q, Q] of what each token sees; None: everything. Layers of one kind share it."""
        key = (number, spec.window, spec.chunk, spec.causal)
        if key not in self._masks:
            self._masks[key] = _mask_of(spec, bucket)
        return self._masks[key]


def whole_inputs(lengths: I32, device: torch.device) -> AttentionInputs:
    """Of a step that holds whole texts, one behind the other, and leaves nothing behind."""
    start = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    start[1:] = torch.from_numpy(np.cumsum(lengths)).to(device)
    nothing = torch.zeros(len(lengths), dtype=torch.int32, device=device)
    return AttentionInputs(
        query_start_R1=start,
        kv_len_R=start.diff(),
        slots_R=nothing,
        page_table=nothing[:, None],
        loc_T=torch.arange(int(lengths.sum()), device=device),
        page_size=1,
        max_query=int(lengths.max()),
        max_kv=int(lengths.max()),
        k_caches=(),
        v_caches=(),
        host=HostLengths(lengths, lengths * 0),
    )


def by_length(lengths: I32) -> list[I32]:
    """Rows in groups within which padding adds at most a quarter (or 8 tokens)."""
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    groups: list[I32] = []
    at = 0
    while at < len(order):
        shortest = int(lengths[order[at]])
        most = max(shortest + 8, shortest + shortest // 4)
        end = at + int(np.searchsorted(lengths[order[at:]], most, side="right"))
        longest = int(lengths[order[end - 1]])
        end = min(end, at + max(1, MAX_PAIRS // (longest * longest)))
        groups.append(np.sort(order[at:end]))
        at = end
    return groups


def _bucket(lengths: I32, rows: I32, device: torch.device) -> _Bucket:
    starts = (np.cumsum(lengths) - lengths)[rows].astype(np.int64)
    length = lengths[rows].astype(np.int64)
    step = np.minimum(np.arange(length.max()), length[:, None] - 1)
    real = np.arange(length.max()) < length[:, None]
    padded = not real.all()
    return _Bucket(
        tokens_BQ=torch.from_numpy(starts[:, None] + step).to(device),
        real_BQ=torch.from_numpy(real).to(device) if padded else None,
        back_X=torch.from_numpy(np.flatnonzero(real)).to(device) if padded else None,
        length_B=torch.from_numpy(length).to(device),
    )


def _mask_of(spec: Spec, bucket: _Bucket) -> Tensor | None:
    at = torch.arange(bucket.tokens_BQ.shape[1], device=bucket.length_B.device)
    key, query = at[None, :], at[:, None]
    seen: Tensor | None = None
    if spec.causal:
        seen = key <= query
    if spec.window is not None:
        inside = key > query - spec.window
        if not spec.causal:
            inside = inside & (key < query + spec.window)
        seen = inside if seen is None else seen & inside
    if spec.chunk is not None:
        inside = key // spec.chunk == query // spec.chunk
        seen = inside if seen is None else seen & inside
    if bucket.real_BQ is None:
        return None if seen is None else seen[None, None]
    # Padding repeats real tokens, so a query that sees padding alone (beyond its window) still has a finite result.
    real = at[None, None, :] < bucket.length_B[:, None, None]
    if seen is None:
        return real.expand(-1, len(at), -1)[:, None]
    itself = torch.eye(len(at), dtype=torch.bool, device=at.device)
    return ((seen & real) | itself)[:, None]


def _attend(spec: Spec, q_BQNH: Tensor, k_BQKH: Tensor, v_BQKV: Tensor, mask: Tensor | None) -> Tensor:
    """[B, Q, N, V]"""
    q, k, v = (x.transpose(1, 2) for x in (q_BQNH, k_BQKH, v_BQKV))
    grouped = spec.num_heads != spec.num_kv_heads
    if not spec.softcap and spec.sinks is None and spec.slopes is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    if grouped:
        k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for x in (k, v))
    scores = (q.float() @ k.float().transpose(2, 3)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.slopes is not None:
        scores = scores + spec.slopes.view(1, -1, 1, 1) * torch.arange(scores.shape[3], device=scores.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : v.shape[2]] @ v.float()).to(q_BQNH.dtype).transpose(1, 2)


def _suits_ragged(spec: Spec, q_TNH: Tensor, v_TKV: Tensor) -> bool:
    return (
        q_TNH.device.type == "cuda"
        and q_TNH.dtype in (torch.bfloat16, torch.float16)
        and q_TNH.shape[2] == v_TKV.shape[2]
        and q_TNH.shape[2] % 8 == 0
        and q_TNH.shape[2] <= 256
        and not spec.softcap
        and spec.is_plain
    )


@cache
def _ragged_kernel() -> Callable[[Spec, Tensor, Tensor, Tensor, Tensor, int], Tensor] | None:
    """torch's attention over ragged batches, where this torch has it."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    varlen = vars(import_module("torch.nn.attention.varlen")).get("varlen_attn")
    if varlen is None or "window_size" not in signature(varlen).parameters:
        return None

    def run(spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, start_R1: Tensor, longest: int) -> Tensor:
        if spec.num_kv_heads != spec.num_heads:
            k_TKH, v_TKH = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for x in (k_TKH, v_TKH))
        back = -1 if spec.window is None else spec.window - 1
        out: Tensor = varlen(
            q_TNH.contiguous(), k_TKH.contiguous(), v_TKH.contiguous(), start_R1, start_R1, longest, longest,
            scale=spec.scale, window_size=(back, 0 if spec.causal else back),
        )  # fmt: skip
        return out.flatten(1)

    return run
