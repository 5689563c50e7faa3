"""What the sampling kernels compute, in plain torch, with the same random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from bough.kernels import sampling

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
LOGITS_AT_ONCE = 1 << 20
"""Logits that filters look at in one go: each takes about 80 bytes meanwhile."""
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 with ten rounds: four 32-bit words from a 64-bit key and a 128-bit counter. All int64 tensors."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((b >> 32) & _LOW) ^ c1 ^ k0, ((a >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = b & _LOW, a & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(seeds_R: Tensor, counters_R: Tensor, vocab: int) -> Tensor:
    """float32 [R, vocab] standard Gumbel noise; entry i comes from word i % 4 of block i // 4."""
    block = torch.arange((vocab + 3) // 4, device=seeds_R.device).unsqueeze(0)
    seed, counter = seeds_R.long().unsqueeze(1), counters_R.long().unsqueeze(1)
    zero = torch.zeros_like(block * seed)
    words = philox(seed, block + zero, (counter & _LOW) + zero, ((counter >> 32) & _LOW) + zero, zero)
    bits = torch.stack(words, -1).flatten(1)[:, :vocab]
    return -exponential(bits).log()


def exponential(bits: Tensor) -> Tensor:
    """-log(1 - u) for u = (bits + 1/2) / 2**32, with full relative precision where u is small."""
    u = (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=1.0 - 2.0**-24)
    return torch.where(u < 1e-3, u * (1.0 + u * (0.5 + u * (1.0 / 3.0))), -torch.log(1.0 - u))


def kept(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """bool [R, V]: the tokens that pass every filter."""
    logits = logits_RV.float()
    vocab = logits.shape[1]
    inverse = (1.0 / temperature_R.float().clamp(min=1e-10)).unsqueeze(1)
    ordered, order = logits.sort(dim=-1, descending=True)
    place = torch.arange(vocab, device=logits.device).expand_as(order)
    is_tied = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    likelier = torch.empty_like(order).scatter_(1, order, place.masked_fill(is_tied, 0).cummax(-1).values)
    most = ordered[:, :1] * inverse
    mass = (logits * inverse - most).double().exp()
    cumulative = (ordered * inverse - most).double().exp().cumsum(-1)
    before = torch.cat((torch.zeros_like(cumulative[:, :1]), cumulative), -1)
    mass_before = before.gather(1, likelier) / cumulative[:, -1:]
    top_k = torch.where(top_k_R < 1, vocab, top_k_R).unsqueeze(1)
    by_mass = (mass_before < top_p_R.double().unsqueeze(1)) | (top_p_R >= 1.0).unsqueeze(1)
    return (likelier < top_k) & by_mass & (mass >= min_p_R.double().unsqueeze(1))


def argmax(logits_RV: Tensor, ids_V: Tensor | None = None) -> Tensor:
    best = logits_RV.argmax(-1)
    return best if ids_V is None else ids_V[best]


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
    spread = spread_logits(logits_RV, ids_V, vocab)
    return sampling.sample(spread, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, counters_R)


def spread_logits(logits_RV: Tensor, ids_V: Tensor, vocab: int) -> Tensor:
    """[R, vocab]: -inf but for the tokens `ids_V`."""
    spread = logits_RV.new_full((len(logits_RV), vocab), float("-inf"))
    spread[:, ids_V] = logits_RV
    return spread


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    counters_R: Tensor,
) -> Tensor:
    given = (logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, counters_R)
    at_once = max(1, LOGITS_AT_ONCE // logits_RV.shape[1])
    if len(logits_RV) > at_once:
        pieces = zip(*(torch.split(each, at_once) for each in given), strict=True)
        return torch.cat([sample(*rows) for rows in pieces])
    chosen = argmax(logits_RV)
    if logits_RV.device.type == "cpu" and not temperature_R.any():
        return chosen
    at = _those(temperature_R != 0)
    logits, temperature, *filters, seeds, counters = (each[at] for each in given)
    inverse = (1.0 / temperature.float().clamp(min=1e-10)).unsqueeze(1)
    score = logits.float() * inverse + gumbel(seeds, counters, logits.shape[1])
    top_k, top_p, min_p = filters
    by = _those((top_k >= 1) | (top_p < 1.0) | (min_p > 0.0))
    keep = kept(logits[by], temperature[by], *(each[by] for each in filters))
    score[by] = torch.where(keep, score[by], float("-inf"))
    chosen[at] = torch.where(temperature == 0, chosen[at], score.argmax(-1))
    return chosen


def _those(asking_R: Tensor) -> Tensor | slice:
    """The rows that ask for something; all of them where looking would mean waiting for a device."""
    return asking_R.nonzero().squeeze(1) if asking_R.device.type == "cpu" else slice(None)
