"""Drafters for the grid: they draft whatever they can, worth it or not, so that every path is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bough.core.step import I32
from bough.scheduler.drafting import Drafter
from bough.speculative.acceptance import F64
from bough.speculative.device import DeviceDrafter
from bough.speculative.guesses import NO_GUESS, Guess
from bough.speculative.host import HostDrafter
from bough.speculative.ngram import NgramGuesser

Answers = Mapping[tuple[int, ...], Sequence[int]]


class KnownGuesser:
    """Knows what requests will be answered; every third place of a guess may be wrong."""

    most = 4
    prior: F64 = np.array([0.8])

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def guess(self, text: I32, namespace: str) -> Guess:
        said = text.tolist()
        for prompt, answer in self.answers.items():
            output = said[len(prompt) :]
            if tuple(said[: len(prompt)]) == prompt and output and list(answer[: len(output)]) == output:
                follows = np.array(answer[len(output) : len(output) + self.most], np.int32)
                wrong = (np.arange(len(follows)) + len(output)) % 3 == 2
                return Guess(np.where(wrong & (follows % 2 == 0), abs(follows - 1), follows).astype(np.int32), 0)
        return NO_GUESS

    def add(self, text: I32, num_prompt: int, namespace: str) -> None:
        pass


def drafter(
    kind: str, num_slots: int, *, overlaps: bool, answers: Answers | None = None, most_drafts: int = 0
) -> Drafter | None:
    match kind:
        case "device" | "device-adaptive":
            adaptive = kind == "device-adaptive"
            return DeviceDrafter(most_drafts, num_slots, adaptive=adaptive, reach=lambda count: 3 * max(count, 0))
        case "ngram":
            ngram = NgramGuesser(most=5, least_match=1, most_match=8, capacity_tokens=10_000)
            return HostDrafter(ngram, num_slots, overlaps=overlaps, adaptive=False)
        case "adaptive":
            ngram = NgramGuesser(most=5, least_match=1, most_match=8, capacity_tokens=10_000)
            return HostDrafter(ngram, num_slots, overlaps=overlaps, adaptive=True)
        case "known":
            return HostDrafter(KnownGuesser(answers or {}), num_slots, overlaps=overlaps, adaptive=False)
    return None
