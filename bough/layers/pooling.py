"""From the hidden states of whole texts to one vector each. T tokens, R texts, D width; float32 throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.config.pooling_facts import PoolMode


@dataclass(frozen=True, slots=True)
class Spans:
    """Where each text lies among the tokens."""

    start_R: Tensor
    """int64: its first token."""
    length_R: Tensor
    """int64: its number of tokens, at least 1."""
    row_T: Tensor
    """int64: the text that each token belongs to."""

    @classmethod
    def of(cls, query_start_R1: Tensor, num_tokens: int) -> Spans:
        """From the tokens' borders; waits for nothing."""
        start = query_start_R1.long()
        length = start.diff()
        rows = torch.arange(len(length), device=start.device)
        return cls(start[:-1], length, torch.repeat_interleave(rows, length, output_size=num_tokens))


def pool(mode: PoolMode, hidden_TD: Tensor, spans: Spans) -> Tensor:
    """[R, D]"""
    return _MODES[mode](hidden_TD, spans)


def normalise(x_RD: Tensor) -> Tensor:
    """Vectors of length 1."""
    return F.normalize(x_RD, dim=-1)


def _cls(hidden_TD: Tensor, spans: Spans) -> Tensor:
    return hidden_TD.index_select(0, spans.start_R).float()


def _last(hidden_TD: Tensor, spans: Spans) -> Tensor:
    return hidden_TD.index_select(0, spans.start_R + spans.length_R - 1).float()


def _max(hidden_TD: Tensor, spans: Spans) -> Tensor:
    low = hidden_TD.new_full((len(spans.length_R), hidden_TD.shape[1]), float("-inf"), dtype=torch.float32)
    return low.scatter_reduce_(0, spans.row_T[:, None].expand(hidden_TD.shape), hidden_TD.float(), "amax")


def _sum(x_TD: Tensor, spans: Spans) -> Tensor:
    zeros = x_TD.new_zeros((len(spans.length_R), x_TD.shape[1]), dtype=torch.float32)
    return zeros.index_add_(0, spans.row_T, x_TD.float())


def _mean(hidden_TD: Tensor, spans: Spans) -> Tensor:
    return _sum(hidden_TD, spans) / spans.length_R[:, None]


def _mean_sqrt(hidden_TD: Tensor, spans: Spans) -> Tensor:
    return _sum(hidden_TD, spans) / spans.length_R[:, None].sqrt()


def _weighted_mean(hidden_TD: Tensor, spans: Spans) -> Tensor:
    """Tokens weigh by their place in the text, counted from 1."""
    place_T = torch.arange(len(hidden_TD), device=hidden_TD.device) - spans.start_R[spans.row_T] + 1
    length = spans.length_R.float()
    return _sum(hidden_TD.float() * place_T[:, None], spans) / (length * (length + 1) / 2)[:, None]


_MODES: Final[dict[PoolMode, Callable[[Tensor, Spans], Tensor]]] = {
    "cls": _cls,
    "last": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
}
