"""Logits to token ids, without sorting the vocabulary.

in: logits [rows, vocabulary] and per-row parameters on the device. out: int64 ids. never: penalties or masks.

A row is kept to the tokens that pass every filter: fewer than `top_k` tokens are strictly likelier, the likelier ones hold
less than `top_p` of the probability, and the token has at least `min_p` times the probability of the likeliest. All three
look at the full softmax at the row's temperature; tokens with equal logits stand or fall together. The draw is
argmax(logit / temperature + g_i) over the kept tokens, with Gumbel noise g_i made from (seed, counter, i) alone: what a row
draws doesn't depend on the batch, nor on the device beyond the rounding of `log`.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def argmax(logits_RV: Tensor, ids_V: Tensor | None = None) -> Tensor:
    """int64 [R]: the first largest entry of each row; with `ids_V` (int64, ascending) what that has there."""
    out: Tensor = _IMPLEMENTATIONS.pick("argmax", logits_RV.device)(logits_RV, ids_V)
    return out


def sample_among(
    logits_RV: Tensor,
    ids_V: Tensor,
    vocab: int,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    counters_R: Tensor,
) -> Tensor:
    """`sample` among the tokens `ids_V` (int64, ascending) of a vocabulary of `vocab`, which the logits stand for: as if the
    others' were -inf."""
    out: Tensor = _IMPLEMENTATIONS.pick("sample_among", logits_RV.device)(
        logits_RV, ids_V, vocab, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, counters_R
    )
    return out


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    counters_R: Tensor,
) -> Tensor:
    """int64 [R]: one draw a row. Temperature 0 takes the argmax; `top_k` < 1 keeps the whole vocabulary.

    float32 temperature, top_p, min_p; int32 or int64 top_k; int64 seeds and counters (the counter is the number of the
    row's draw, so that a seeded row can be replayed).
    """
    out: Tensor = _IMPLEMENTATIONS.pick("sample", logits_RV.device)(
        logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, counters_R
    )
    return out
