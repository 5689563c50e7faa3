"""Drafters that know the oracle: what they guess is right about as often as they are told to be."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from bough.bench.fake_runner import pick, prefix_hash
from bough.core.step import FIRST_DRAFT, I32, I64, NO_PROPOSER, Bool
from bough.scheduler.constrain import Gate
from bough.scheduler.drafting import Offer
from bough.scheduler.queues import Job, Queues
from tests.sim.harness import VOCAB


def continuation(tokens: list[int], count: int, right: float, gate: Gate | None = None) -> list[int]:
    """What the oracle says after these tokens, now and then something else; always the same for the same tokens."""
    rng = random.Random(prefix_hash(np.array(tokens, np.int64)))
    said, accepted = list(tokens), 0
    for _ in range(count):
        mask = None
        if gate is not None and not gate.terminated:
            mask = np.zeros(-(-VOCAB // 32), np.int32)
            gate.fill_mask(mask)
        token = pick(prefix_hash(np.array(said, np.int64)), VOCAB, mask)
        if rng.random() > right:
            token = rng.randrange(VOCAB)
        said.append(token)
        if gate is not None and accepted == len(said) - len(tokens) - 1:
            accepted += gate.accept(token)
    if gate is not None:
        gate.rollback(accepted)
    return said[len(tokens) :]


class Counting:
    """What all of them do: note that they were told of everything once."""

    def __init__(self) -> None:
        self.is_resting = False
        self.begun: dict[int, int] = {}
        self.learned = 0
        self.accepted = 0
        self.times = 0

    def begin(self, slot: int, job: Job) -> None:
        assert slot not in self.begun
        self.begun[slot] = job.id

    def learn(self, queues: Queues, slots: I64, drafts: I32, accepted: I32) -> None:
        assert (accepted <= drafts).all()
        self.learned += int(drafts.sum())
        self.accepted += int(accepted.sum())

    def timed(self, num_rows: int, num_tokens: int, ms: float, proposals: int) -> None:
        self.times += 1

    def prompts_timed(self, ms: float, proposals: int) -> None:
        self.times += 1

    def proposals(self, num_rows: int, *, prompts: bool) -> int:
        return NO_PROPOSER

    def reach(self, proposals: int) -> int:
        return 0

    def forget(self, queues: Queues, slot: int, job: Job, *, has_ended: bool) -> None:
        assert self.begun.pop(slot) == job.id


class HostDrafter(Counting):
    """Guesses on the host: rows that are in flight wait, or go on without drafts."""

    def __init__(self, most: int = 3, right: float = 0.8, waits: float = 0.8) -> None:
        super().__init__()
        self.most, self.right, self.patience = most, right, waits

    def waits(self, queues: Queues, slots: I64) -> Bool:
        return np.array([(slot * 7 + queues.next_step) % 10 < 10 * self.patience for slot in slots.tolist()], np.bool_)

    def offer(self, queues: Queues, slots: I64, most: I32, num_tokens: int) -> Offer | None:
        counts, tokens = np.zeros(len(slots), np.int32), []
        for at, slot in enumerate(slots.tolist()):
            if queues.in_flight(slot):
                continue
            known = int(queues.slots.known[slot])
            count = min(self.most - known % 2, int(most[at]), num_tokens - len(tokens))
            if count > 0:
                said = queues.slots.history[slot, :known].tolist()
                tokens += continuation(said, count, self.right, queues.gates.get(slot))
                counts[at] = count
        return Offer(counts, np.array(tokens, np.int32)) if tokens else None


class DeviceDrafter(Counting):
    """The runner has the drafts; they may be verified in a step that is planned before they are known."""

    def __init__(self, most: int = 3, *, rests: bool = False) -> None:
        """`rests`: the proposer does not run in some steps, and leaves fewer drafts in others; in some it is not asked."""
        super().__init__()
        self.most = most
        self.rests = rests

    def timed(self, num_rows: int, num_tokens: int, ms: float, proposals: int) -> None:
        super().timed(num_rows, num_tokens, ms, proposals)
        self.is_resting = self.rests and self.times // 5 % 3 == 2

    def prompts_timed(self, ms: float, proposals: int) -> None:
        super().prompts_timed(ms, proposals)
        self.is_resting = self.rests and self.times // 5 % 3 == 2

    def proposals(self, num_rows: int, *, prompts: bool) -> int:
        return (7 * num_rows + len(self.begun)) % (self.most + 2) - 1 if self.rests else self.most

    def reach(self, proposals: int) -> int:
        return max(0, 2 * proposals)

    def waits(self, queues: Queues, slots: I64) -> Bool:
        return np.zeros(len(slots), np.bool_)

    def offer(self, queues: Queues, slots: I64, most: I32, num_tokens: int) -> Offer | None:
        wanted = np.minimum(queues.slots.num_proposed[slots], (slots + queues.next_step) % (self.most + 1))
        counts = np.minimum(most, wanted).astype(np.int32)
        counts[np.cumsum(counts) > num_tokens] = 0
        if not counts.any():
            return None
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Offer(counts, (FIRST_DRAFT - place).astype(np.int32))


def proposer(right: float) -> Callable[[list[int], int], list[int]]:
    return lambda tokens, count: continuation(tokens, count, right)
