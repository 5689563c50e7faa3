"""Trains a head on a model's answers, and says how many tokens a step yields with it. B texts, T tokens of the longest, Q
places of a batch's answers, M some of them, E the model's width, V tokens that the head can draft."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.core.step import I64
from bough.training.heads import Trainee
from bough.training.recording import StateRecording
from bough.training.samples import Sample
from bough.training.target import TrainingTarget

Tell = Callable[[str], None]
_SAY_S = 5
"""Between two lines about the loss; each waits for the device."""
_LATER = 0.8
"""What a draft counts for, beside the one before it."""
_WARM_UP = 0.03
_LEAST_RATE = 0.02
"""Of the learning rate, at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast."""

    num_drafts: int
    epochs: int
    minutes: float
    """At most; the learning rate falls so that it ends with the time."""
    learning_rate: float
    batch_tokens: int
    """Of a batch, padding included."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DraftJudgement:
    """What drafts are worth, one request at a time, if all of them are verified."""

    accept_length: float
    """Tokens that a step yields."""
    by_position: tuple[float, ...]
    """Share of the steps in which the draft at each place is right, with all before it."""
    steps: int


def frequent_tokens(samples: Sequence[Sample], vocab: int, count: int) -> Tensor:
    """int64 [V], ascending: the tokens that answers have most often, filled up with those of prompts and the lowest ids."""
    seen = Counter(token for sample in samples for token in sample.answer)
    asked = Counter(token for sample in samples for token in sample.prompt)
    ranked = sorted(range(vocab), key=lambda token: (-seen[token], -asked[token], token))
    return torch.tensor(sorted(ranked[:count]))


def batches(lengths: Sequence[int], most_tokens: int, draw: random.Random) -> list[list[int]]:
    """Numbers of texts, those of similar length together, in random order; each once."""
    order = sorted(range(len(lengths)), key=lambda number: (lengths[number], draw.random()))
    made: list[list[int]] = []
    for number in order:
        if made and (len(made[-1]) + 1) * lengths[number] <= most_tokens:
            made[-1].append(number)
        else:
            made.append([number])
    draw.shuffle(made)
    return made


class HeadFit:
    """Trains one head for one model."""

    def __init__(self, target: TrainingTarget, trainee: Trainee, schedule: Schedule) -> None:
        self._target = target
        self._trainee = trainee
        self._schedule = schedule

    def run(self, samples: Sequence[Sample], tell: Tell) -> float:
        """Returns the mean loss of the last tenth of the batches."""
        plan = self._schedule
        weights = list(self._trainee.parameters())
        optimiser = torch.optim.AdamW(
            weights,
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self._target.device.type == "cuda",
        )
        losses: list[Tensor] = []
        began = said = time.monotonic()
        recording = self._record(samples)
        for done, group in self._all_batches(recording, began):
            optimiser.zero_grad(set_to_none=True)
            loss = self.learn(recording, group)
            if loss is None:
                continue
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            for choice in optimiser.param_groups:
                choice["lr"] = plan.learning_rate * _rate_at(done)
            optimiser.step()
            losses.append(loss)
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                tell(f"{done:4.0%}  loss {_mean(losses[-50:]):.3f}  {len(losses)} batches, {said - began:.0f} s")
        return _mean(losses[-max(1, len(losses) // 10) :]) if losses else math.nan

    def _record(self, samples: Sequence[Sample]) -> StateRecording:
        return StateRecording(self._target, samples, self._trainee.taps, self._target.spare_bytes())

    def _all_batches(self, recording: StateRecording, began: float) -> Iterator[tuple[float, list[int]]]:
        """Batches of all epochs, as long as there is time, with the share of the training that is done."""
        plan = self._schedule
        draw = random.Random(plan.seed)
        for epoch in range(plan.epochs):
            groups = batches(recording.lengths.tolist(), plan.batch_tokens, draw)
            for number, group in enumerate(groups):
                share = (epoch + number / len(groups)) / plan.epochs
                done = max(share, (time.monotonic() - began) / (60 * plan.minutes))
                if done >= 1:
                    return
                yield done, group

    def learn(self, recording: StateRecording, group: Sequence[int]) -> Tensor | None:
        """Adds the gradients of a batch. Returns its loss, on the device; None: it has nothing to learn from.

        Draft j at token t is compared with the target at token t + 1 + j: the target's probabilities are computed once for
        all drafts. Gradients of the states are added up piece by piece, so that only a piece's logits are held.
        """
        count, trainee = self._schedule.num_drafts, self._trainee
        places, ago = _places(recording, group)
        numbers = [int((ago >= number).sum()) for number in range(count)]
        if not numbers[0]:
            return None
        seen = recording.of(group)
        at_Q, ago_Q = (self._target.on_device(each) for each in (places, ago))
        hidden_QE = seen.hidden_BTE.flatten(0, 1)[at_Q]
        made = trainee.drafts(seen, count)
        # Where a draft would begin before the answer does, any state serves: it counts for nothing.
        reached = [
            each.flatten(0, 1).index_select(0, (at_Q - 1 - number).clamp_min(0)) for number, each in enumerate(made)
        ]
        states = [each.detach().requires_grad_() for each in reached]
        shares = [_LATER**number if counted else 0.0 for number, counted in enumerate(numbers)]
        weights = [share / sum(shares) / max(1, counted) for share, counted in zip(shares, numbers, strict=True)]
        total = torch.zeros((), device=at_Q.device)
        for begin in range(0, len(places), size := self._target.places_at_once(trainee.tokens.count)):
            part = slice(begin, begin + size)
            wanted_MV = trainee.tokens.wanted(hidden_QE[part])
            for number, (each, weight) in enumerate(zip(states, weights, strict=True)):
                found_MV = trainee.logits(each[part].to(self._target.dtype), number).float()
                of_place_M = F.cross_entropy(found_MV, wanted_MV, reduction="none")
                loss = (of_place_M * (ago_Q[part] >= number)).sum() * weight
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        torch.autograd.backward(reached, [each.grad for each in states])
        return total

    @torch.no_grad()
    def judge(self, samples: Sequence[Sample]) -> DraftJudgement:
        """On answers that the model gave without chance. A draft counts only if those before it are right, and then it was
        made behind the answer's own tokens: so all places can be looked at at once."""
        count = self._schedule.num_drafts
        reached, steps, tokens = [0] * count, 0, 0
        recording = self._record(samples)
        for group in batches(recording.lengths.tolist(), self._schedule.batch_tokens, random.Random(0)):
            for sample, right in zip((samples[each] for each in group), self._right(recording, group), strict=True):
                at, end = len(sample.prompt), len(sample.ids)
                while at + 1 < end:  # token `at` is the newest
                    run = next((n for n in range(count) if at + 1 + n >= end or not right[n][at - 1]), count)
                    for place in range(run):
                        reached[place] += 1
                    steps += 1
                    gained = min(run + 1, end - 1 - at)
                    tokens += gained
                    at += gained
        by_position = tuple(round(each / max(1, steps), 3) for each in reached)
        return DraftJudgement(round(tokens / max(1, steps), 3), by_position, steps)

    def _right(self, recording: StateRecording, group: Sequence[int]) -> list[list[list[bool]]]:
        """By text and draft: whether the draft that is made behind a token is what the answer says there."""
        seen, trainee = recording.of(group), self._trainee
        (rows, length), drafts = seen.ids_BT.shape, []
        size = self._target.places_at_once(trainee.tokens.count)
        for number, made in enumerate(trainee.drafts(seen, self._schedule.num_drafts)):
            states = made.flatten(0, 1).to(self._target.dtype)
            parts = [trainee.logits(part, number).argmax(-1) for part in torch.split(states, size)]
            guessed = trainee.tokens.named(torch.cat(parts))
            drafts.append((guessed.view(rows, length) == seen.ids_BT.roll(-2 - number, 1)).cpu())
        return torch.stack(drafts, 1).tolist()


def _places(recording: StateRecording, group: Sequence[int]) -> tuple[I64, I64]:
    """Where the target's probabilities are learned from, as indices of [B, T], and how far behind the answer's first token
    each is: all tokens of answers, except for the last, behind which nothing is known."""
    which = np.asarray(group)
    lengths, prompts = recording.lengths[which], recording.prompts[which]
    longest, counts = int(lengths.max()), lengths - 1 - prompts
    ago = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(which)) * longest + prompts, counts) + ago, ago


def _rate_at(done: float) -> float:
    """Of the learning rate: rises for a moment, then falls like a cosine."""
    if done < _WARM_UP:
        return max(_LEAST_RATE, done / _WARM_UP)
    return max(_LEAST_RATE, 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))))


def _mean(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).mean())
