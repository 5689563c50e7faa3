"""Spans of tokens that see each other in both directions, in a step whose other tokens see what is before them (Gemma 3).

The step's own attention runs first, and has written all KV; then what the spans' tokens have read is computed anew by torch,
over the pages up to the span's end. Only steps that bring images have spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bough.kernels.attention.inputs import AttentionInputs, AttentionSpec
from bough.kernels.attention.reference import attend_row, gather_row


class TwoWaySpan(NamedTuple):
    """Tokens of one row."""

    slot: int
    token: int
    """The first one's place in the step..."""
    position: int
    """...and in its prompt."""
    length: int


class _Inner(Protocol):
    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor: ...

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor: ...


class TwoWayAttention:
    """An attention backend around another one."""

    def __init__(self, inner: _Inner, inputs: AttentionInputs, spans: Sequence[TwoWaySpan]) -> None:
        self._inner = inner
        self._inputs = inputs
        self._spans = spans

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """[T, N * V]"""
        return self._both_ways(spec, q_TNH, self._inner.forward(spec, q_TNH, k_TKH, v_TKH))

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """[T, N * V], of KV that is in the pages."""
        return self._both_ways(spec, q_TNH, self._inner.attend(spec, q_TNH))

    def _both_ways(self, spec: AttentionSpec, q_TNH: Tensor, out_TF: Tensor) -> Tensor:
        for span in self._spans if spec.both_ways else ():
            place = slice(span.token, span.token + span.length)
            out_TF[place] = self._read(spec, q_TNH[place], span).to(out_TF.dtype)
        return out_TF

    def _read(self, spec: AttentionSpec, q_QNH: Tensor, span: TwoWaySpan) -> Tensor:
        inputs, stop = self._inputs.of_layer(spec.layer), span.position + span.length
        k_SKH, v_SKV = gather_row(inputs, spec, inputs.page_table[span.slot], stop)
        if spec.softcap or spec.sinks is not None or spec.slopes is not None or spec.chunk is not None:
            return attend_row(
                q_QNH, k_SKH, v_SKV, scale=spec.scale, window=spec.window, softcap=spec.softcap, causal=False,
                chunk=spec.chunk, sinks=spec.sinks, slopes=spec.slopes,
            ).flatten(1)  # fmt: skip
        mask = None
        if spec.window is not None:  # nothing before the first query's window is seen
            first = max(0, span.position - spec.window + 1)
            k_SKH, v_SKV = k_SKH[first:], v_SKV[first:]
            at = torch.arange(span.position, stop, device=q_QNH.device).unsqueeze(1)
            mask = torch.arange(first, stop, device=q_QNH.device).unsqueeze(0) > at - spec.window
        q, k, v = (each.to(q_QNH.dtype).transpose(0, 1).unsqueeze(0) for each in (q_QNH, k_SKH, v_SKV))
        read = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale, enable_gqa=True)
        return read[0].transpose(0, 1).flatten(1)
