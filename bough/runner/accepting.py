"""Rules by which drafts count. The usual one needs none of this: a draft is right if it is what the model draws there.

A rule is called where a step that verifies drafts has drawn its tokens, and gives others: behind a draft's predecessor the
draft itself, if it counts. Nothing here reads from the device, so that a graph can hold it.

L samples of all rows: behind each row's newest token, and behind each of its drafts. V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bough.kernels.sampling import sample
from bough.kernels.sampling.reference import LOGITS_AT_ONCE, kept, philox
from bough.kernels.step_start import SlotState
from bough.runner.inputs import StepTensors

_DRAFT_NOISE = 0x5851F42D4C957F2D
_COINS = 1
"""The last word of the counter that coins are made from; noise of draws has 0 there."""


class AcceptRule(Protocol):
    """Says which drafts count."""

    needs_odds: bool
    """Drafts are drawn with noise of their own, and the probabilities that they were drawn with are kept."""

    def redraw(self, drawn_L: Tensor, logits_LV: Tensor, tensors: StepTensors, state: SlotState) -> Tensor:
        """int64 [L]: tokens in place of `drawn_L`, which were drawn by `logits_LV`."""
        ...


class Links(NamedTuple):
    """How the samples of a step hang together. [L] each."""

    is_draft: Tensor
    """Whether it stands behind a draft, not behind the row's newest token."""
    token: Tensor
    """That draft (or the newest token)."""
    parent: Tensor
    """The sample in whose place the draft stands."""
    start: Tensor
    """The row's first sample."""
    place: Tensor
    """Of the row's samples."""
    counter: Tensor
    """The number of the draw in its request."""


def links_of(tensors: StepTensors, state: SlotState, count: int) -> Links:
    """Of a step with `count` samples."""
    slots = tensors.sample_slots_L[:count].long()
    index = torch.arange(count, device=slots.device)
    is_draft = torch.zeros(count, dtype=torch.bool, device=slots.device)
    is_draft[1:] = (slots[1:] == slots[:-1]) & (slots[1:] != len(state.last_token) - 1)
    start = torch.where(is_draft, 0, index).cummax(0).values
    place = index - start
    parent = (index - 1).clamp_min(0)
    if state.tree is not None:
        node = (place - 1).clamp(0, state.tree.parents.shape[1] - 1)
        parent = torch.where(is_draft, start + state.tree.parents[slots, node], parent)
    token = tensors.ids_T[tensors.sample_at_L[:count].long()]
    return Links(is_draft, token, parent, start, place, tensors.counter_L[:count].long())


def odds_of(logits_LV: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """float32 [L, V]: what each token is drawn with; zeros for those that filters leave out."""
    parts = []
    at_once = max(1, LOGITS_AT_ONCE // logits_LV.shape[1])
    for begin in range(0, len(logits_LV), at_once):
        piece = slice(begin, begin + at_once)
        logits = logits_LV[piece].float()
        keep = kept(logits, temperature[piece], top_k[piece], top_p[piece], min_p[piece])
        scaled = logits / temperature[piece].float().clamp_min(1e-10)[:, None]
        parts.append(scaled.masked_fill(~keep, float("-inf")).softmax(-1))
    return torch.cat(parts)


def _sampled_odds(logits_LV: Tensor, tensors: StepTensors) -> Tensor:
    count = len(logits_LV)
    return odds_of(
        logits_LV, tensors.temperature_L[:count], tensors.top_k_L[:count], tensors.top_p_L[:count],
        tensors.min_p_L[:count],
    )  # fmt: skip


def coins(tensors: StepTensors, links: Links) -> Tensor:
    """float32 [L], uniform: by a request's seed, the place in its answer and where its step began."""
    count = len(links.counter)
    began, zero = links.counter[links.start], torch.zeros_like(links.counter)
    word, *_ = philox(tensors.seed_L[:count].long(), links.counter, began, zero, zero + _COINS)
    return (word >> 8).float() * 2.0**-24


def draft_seeds(seed_R: Tensor, counter_R: Tensor) -> Tensor:
    """int64 [R]: seeds of drafts whose noise is neither that of the model's draws nor that of drafts of another step."""
    return (seed_R.long() ^ _DRAFT_NOISE) + counter_R.long() * 0x9E3779B97F4A7C1


class Thresholds:
    """SGLang's lossy rule: a draft counts that is likely enough, and unlikely ones count more often than they are drawn."""

    needs_odds = False

    def __init__(self, single: float, total: float) -> None:
        """A draft of probability `single` or more always counts; others as if probabilities were divided by `total`."""
        self._single = single
        self._total = total

    def redraw(self, drawn_L: Tensor, logits_LV: Tensor, tensors: StepTensors, state: SlotState) -> Tensor:
        links = links_of(tensors, state, len(drawn_L))
        odds_LV = _sampled_odds(logits_LV, tensors)
        parent = links.parent
        likely = odds_LV[parent, links.token].masked_fill(~links.is_draft, 0.0)
        nothing = torch.zeros_like(likely)
        together = nothing.scatter_add(0, parent, likely).clamp(max=1.0)
        best = nothing.scatter_reduce(0, parent, likely, "amax")
        said = (links.is_draft & (links.token == drawn_L[parent])).float()
        is_right = nothing.scatter_reduce(0, parent, said, "amax") > 0
        chosen = links.is_draft & (likely == best[parent])
        token = torch.full_like(drawn_L, -1).scatter_reduce(0, parent, torch.where(chosen, links.token, -1), "amax")
        wanted = (together / self._total).clamp(max=1.0)
        more = (wanted - together) / (1.0 - together).clamp_min(1e-9)
        counts = (best >= self._single) | (coins(tensors, links) < more)
        takes = ~is_right & counts & (token >= 0) & (best > 0) & (tensors.temperature_L[: len(drawn_L)] > 0)
        return torch.where(takes, token, drawn_L)


class Rejection:
    """Lossless: a draft that was drawn with probability q counts with probability min(1, p / q); otherwise a token is drawn
    from what p has more than q. With `block`, drafts of a row are judged together, and as many count as can."""

    needs_odds = True

    def __init__(self, *, block: bool) -> None:
        self._block = block

    def redraw(self, drawn_L: Tensor, logits_LV: Tensor, tensors: StepTensors, state: SlotState) -> Tensor:
        assert state.odds is not None, "made for a runner with this rule"
        count = len(drawn_L)
        links = links_of(tensors, state, count)
        has_child = torch.zeros_like(links.is_draft)
        has_child[:-1] = links.is_draft[1:]
        draft = links.token.roll(-1)
        slots = tensors.sample_slots_L[:count].long()
        p_LV = _sampled_odds(logits_LV, tensors)
        q_LV = state.odds[slots, links.place.clamp_max(state.odds.shape[1] - 1)]
        p, q = (each.gather(1, draft[:, None])[:, 0] for each in (p_LV, q_LV))
        ratio = torch.where(has_child, p / q.clamp_min(1e-30), 1.0)
        weight = torch.ones_like(ratio)
        coin = coins(tensors, links)
        if self._block:
            for _ in range(state.odds.shape[1]):
                before = weight[links.parent] * ratio[links.parent]
                weight = torch.where(links.is_draft, before.clamp(max=1.0), 1.0)
        left_LV = (weight[:, None] * p_LV - q_LV).clamp_min(0.0)
        if self._block:
            mass = left_LV.sum(1)
            reached = torch.where(has_child, mass / (mass + 1.0 - weight).clamp_min(1e-9), weight)
            reached = torch.where(has_child & (mass + 1.0 - weight <= 1e-9), 1.0, reached)
            counts = (links.place == 0) | (coin < reached)
            last = torch.zeros_like(links.place).scatter_reduce(
                0, links.start, torch.where(counts, links.place, 0), "amax"
            )
            goes_on = links.place < last[links.start]
            ends = links.place == last[links.start]
        else:
            goes_on = coin < ratio
            ends = ~goes_on
        none = torch.zeros_like(coin)
        rest = sample(
            left_LV.log(), none + 1.0, torch.zeros_like(drawn_L), none + 1.0, none, tensors.seed_L[:count],
            tensors.counter_L[:count],
        )  # fmt: skip
        chance = has_child & (tensors.temperature_L[:count] > 0)
        altered = torch.where(goes_on, draft, torch.where(ends, rest, drawn_L))
        return torch.where(chance, altered, drawn_L)
