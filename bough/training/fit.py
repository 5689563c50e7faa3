"""Trains a head on a model's answers, and says how many tokens a step yields with it. M places of a batch's answers, D
width, V tokens that the head can draft."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bough.training.heads import Trainee
from bough.training.samples import Sample
from bough.training.target import TrainingTarget, Watched

Tell = Callable[[str], None]
_AT_ONCE = 4096
"""Places whose logits are held at a time."""
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


def batches(samples: Sequence[Sample], most_tokens: int, draw: random.Random) -> list[list[Sample]]:
    """Texts of similar length together, in random order; each once."""
    order = sorted(samples, key=lambda sample: (len(sample.ids), draw.random()))
    made: list[list[Sample]] = []
    for sample in order:
        if made and (len(made[-1]) + 1) * len(sample.ids) <= most_tokens:
            made[-1].append(sample)
        else:
            made.append([sample])
    draw.shuffle(made)
    return made


def _places(group: Sequence[Sample], number: int, length: int) -> Tensor:
    """Where draft `number` guesses a token of an answer, as indices of [B, T]: from the token before the answer's first on,
    behind which the first draft is made."""
    found = [
        torch.arange(len(sample.prompt) - 1, len(sample.ids) - 2 - number) + row * length
        for row, sample in enumerate(group)
        if len(sample.answer) > 1 + number
    ]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


class HeadFit:
    """Trains one head for one model."""

    def __init__(self, target: TrainingTarget, trainee: Trainee, ids_V: Tensor | None, schedule: Schedule) -> None:
        self._target = target
        self._trainee = trainee
        self._ids_V = None if ids_V is None else ids_V.to(target.device)
        self._schedule = schedule

    def run(self, samples: Sequence[Sample], tell: Tell) -> float:
        """Returns the mean loss of the last tenth of the batches."""
        plan = self._schedule
        weights = list(self._trainee.parameters())
        optimiser = torch.optim.AdamW(weights, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        losses: list[float | Tensor] = []
        began = said = time.monotonic()
        for done, group in self._all_batches(samples, began):
            for choice in optimiser.param_groups:
                choice["lr"] = plan.learning_rate * _rate_at(done)
            loss = self._loss(group)
            if loss is None:
                continue
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimiser.step()
            losses.append(loss.detach())
            if time.monotonic() - said > 5:
                said = time.monotonic()
                tell(f"{done:4.0%}  loss {_mean(losses[-50:]):.3f}  {len(losses)} batches, {said - began:.0f} s")
        return _mean(losses[-max(1, len(losses) // 10) :]) if losses else math.nan

    def _all_batches(self, samples: Sequence[Sample], began: float) -> Iterator[tuple[float, list[Sample]]]:
        """Batches of all epochs, as long as there is time, with the share of the training that is done."""
        plan = self._schedule
        draw = random.Random(plan.seed)
        for epoch in range(plan.epochs):
            groups = batches(samples, plan.batch_tokens, draw)
            for number, group in enumerate(groups):
                share = (epoch + number / len(groups)) / plan.epochs
                done = max(share, (time.monotonic() - began) / (60 * plan.minutes))
                if done >= 1:
                    return
                yield done, group

    def _loss(self, group: Sequence[Sample]) -> Tensor | None:
        seen = self._target.watch([sample.ids for sample in group], self._trainee.taps)
        length = seen.ids_BT.shape[1]
        total: Tensor | None = None
        weight = 0.0
        for number, made in enumerate(self._trainee.drafts(seen, self._schedule.num_drafts)):
            at_M = _places(group, number, length).to(made.device)
            if len(at_M):
                of_draft = self._cross_entropy(made.flatten(0, 1), seen, at_M, number) / len(at_M)
                total = of_draft if total is None else total + _LATER**number * of_draft
                weight += _LATER**number
        return None if total is None else total / weight

    def _cross_entropy(self, made: Tensor, seen: Watched, at_M: Tensor, number: int) -> Tensor:
        """Of the target's distributions with the drafts', summed. Logits are computed again on the way back."""
        target, hidden = self._target, seen.hidden_BTE.flatten(0, 1)

        def piece(states_MD: Tensor, exact_ME: Tensor) -> Tensor:
            wanted = target.logits(exact_ME)
            if self._ids_V is not None:
                wanted = wanted[:, self._ids_V]
            found = self._trainee.logits(states_MD.to(target.dtype), number).float().log_softmax(-1)
            return -(wanted.float().softmax(-1) * found).sum()

        parts = (at_M[begin : begin + _AT_ONCE] for begin in range(0, len(at_M), _AT_ONCE))
        sums = [checkpoint(piece, made[at], hidden[at + 1 + number], use_reentrant=False) for at in parts]
        return torch.stack(sums).sum()

    @torch.no_grad()
    def judge(self, samples: Sequence[Sample]) -> DraftJudgement:
        """On answers that the model gave without chance. A draft counts only if those before it are right, and then it was
        made behind the answer's own tokens: so all places can be looked at at once."""
        count = self._schedule.num_drafts
        reached, steps, tokens = [0] * count, 0, 0
        for group in batches(samples, self._schedule.batch_tokens, random.Random(0)):
            for sample, right in zip(group, self._right(group), strict=True):
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

    def _right(self, group: Sequence[Sample]) -> list[list[list[bool]]]:
        """By text and draft: whether the draft that is made behind a token is what the answer says there."""
        seen = self._target.watch([sample.ids for sample in group], self._trainee.taps)
        (rows, length), drafts = seen.ids_BT.shape, []
        for number, made in enumerate(self._trainee.drafts(seen, self._schedule.num_drafts)):
            states = made.flatten(0, 1).to(self._target.dtype)
            parts = [
                self._trainee.logits(states[begin : begin + _AT_ONCE], number).argmax(-1)
                for begin in range(0, len(states), _AT_ONCE)
            ]
            guessed = torch.cat(parts)
            if self._ids_V is not None:
                guessed = self._ids_V[guessed]
            wanted = seen.ids_BT.roll(-2 - number, 1)
            drafts.append((guessed.view(rows, length) == wanted).cpu())
        return torch.stack(drafts, 1).tolist()


def _rate_at(done: float) -> float:
    """Of the learning rate: rises for a moment, then falls like a cosine."""
    if done < _WARM_UP:
        return max(_LEAST_RATE, done / _WARM_UP)
    return max(_LEAST_RATE, 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))))


def _mean(losses: Sequence[float | Tensor]) -> float:
    return float(sum(float(loss) for loss in losses) / len(losses))
