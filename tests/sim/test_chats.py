"""Conversations in random traffic: requests go on from what others have said, follow kept prompts, and meet pauses, flushes
and failed steps, over every mix of windows, states and drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bough.core.kv import Grows, KvGroup, KvLayout, Window
from bough.core.messages import FlushCache, Pause, Resume
from bough.core.step import Step
from tests.sim.drafters import DeviceDrafter, HostDrafter, proposer
from tests.sim.harness import VOCAB, Client, Sim, check_answer
from tests.sim.test_traffic import LAYOUTS, STEMS

ALL = KvGroup(Grows())
MORE_LAYOUTS = {
    **LAYOUTS,
    "three windows": (ALL, KvGroup(Window(2)), KvGroup(Window(5)), KvGroup(Window(13), ((), ()))),
    "windows alone": (KvGroup(Window(4)), KvGroup(Window(11))),
    "chunks and a window": (ALL, KvGroup(Window(8, chunked=True)), KvGroup(Window(5))),
}
CONTEXT = 120
NEWS = 6
"""Tokens that a request adds to what was said, at most."""


class Chats:
    """One engine and its traffic, all of it from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        chance = self.rng.random()
        self.broken = {self.rng.randrange(80) for _ in range(4)} if chance < 0.3 else set()
        self.sim = Sim(
            **self._engine(), fail_wait=self._fail if chance < 0.15 else None, fail_launch=self._fail_launch()
        )
        self.clients: list[Client] = []
        self.kept: list[Client] = []

    def _engine(self) -> dict[str, Any]:
        rng = self.rng
        size, step_tokens = rng.choice([1, 1, 2, 4, 16]), rng.choice([8, 20, 64])
        groups = MORE_LAYOUTS[rng.choice(sorted(MORE_LAYOUTS))]
        groups = tuple(group for group in groups if size % group.parts == 0) or (ALL,)
        height = rng.randint(1, KvLayout(groups, size).column_pages)
        states = rng.choice([None, 1, 5, 20])
        return {
            "groups": groups,
            "page_size": size,
            "num_pages": rng.choice([48, 96, 160, 400]) // size * height + 1,
            "num_snapshots": states,
            "state_interval": rng.choice([1, 4, 16]),
            "num_slots": rng.choice([1, 3, 8]),
            "context_length": CONTEXT,
            "max_step_tokens": step_tokens,
            "chunk_tokens": rng.choice([4, step_tokens]),
            "whole_prompts": rng.random() < 0.3,
            "depth": rng.choice([0, 1, 1, 2]),
            "eviction": rng.choice(["lru", "lfu", "slru", "fifo", "filo", "mru", "priority"]),
            "policy": rng.choice(["auto", "fcfs", "lpm", "dfs-weight", "random"]),
            "conservativeness": rng.choice([0.0, 0.3, 1.0]),
            "priority": rng.random() < 0.5,
            "max_retractions": rng.choice([1, 4]),
            **(self._drafts(least=0 if states is None else 1) if rng.random() < 0.4 else {}),
        }

    def _drafts(self, least: int) -> dict[str, Any]:
        """`least`: tokens that a row yields. One that yields none would have its newest in its state already."""
        rng = self.rng
        most, right, lazy = rng.randint(1, 6), rng.choice([0.0, 0.5, 0.9, 1.0]), rng.choice([0.0, 0.3])
        yielded = random.Random(rng.random())
        made: dict[str, Any] = {
            "yields": lambda count: max(least, yielded.randint(0, count)) if yielded.random() < lazy else count
        }
        if rng.random() < 0.5:
            return made | {"drafter": HostDrafter(most, right, rng.choice([0.0, 0.7, 1.0]))}
        return made | {"drafter": DeviceDrafter(most, rests=rng.random() < 0.5), "propose": proposer(right)}

    def _fail(self, step: Step) -> Exception | None:
        return MemoryError("out of memory") if step.index in self.broken else None

    def _fail_launch(self) -> Any:
        return self._fail if self.broken and self.rng.random() < 0.5 else None

    def _news(self) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, NEWS))]

    def ask(self, max_new: int | None = None) -> Client:
        """A new conversation, or one that goes on from what was said, to its end or to somewhere before."""
        rng = self.rng
        before, namespace = rng.choice(STEMS)[: rng.randint(0, 40)], rng.choice(["", "", "other"])
        spoken = [client for client in self.clients[-8:] if client.tokens]
        if spoken and rng.random() < 0.5:
            client = rng.choice(spoken)
            said = client.prompt + client.tokens
            before = said[: CONTEXT - 2 * NEWS] if rng.random() < 0.7 else said[: rng.randint(1, CONTEXT - 2 * NEWS)]
            namespace = client.ask.namespace
        if max_new is None:
            max_new = rng.choice([rng.randint(0, 12), rng.randint(0, 50)])
        stops = tuple(self._news()) if rng.random() < 0.3 else ()
        client = self.sim.ask(
            before + self._news(), max_new, stops=stops, namespace=namespace, priority=rng.choice([0, 0, 0, 5, 20])
        )
        self.clients.append(client)
        return client

    def keep(self) -> None:
        client = self.ask(max_new=0)
        client.ask.keep = True
        self.kept.append(client)

    def follow(self) -> None:
        kept = self.rng.choice(self.kept)
        client = self.sim.ask(kept.prompt + self._news(), self.rng.randint(0, 9), namespace=kept.ask.namespace)
        client.ask.follows = kept.ask.rid
        self.clients.append(client)

    def pause(self) -> None:
        inbox = self.sim.inbox
        inbox.messages.append(Pause(call=1, mode=self.rng.choice(["retract", "in_place"])))
        self.wait(5)
        if self.rng.random() < 0.3:
            inbox.messages.append(FlushCache(call=2))
        inbox.messages.append(Resume(call=3))

    def wait(self, most: int = 12) -> None:
        for _ in range(self.rng.randint(1, most)):
            self.sim.turn()

    def go(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(10, 40)):
            match rng.choices(["ask", "abort", "stop", "keep", "follow", "pause", "wait"], [40, 6, 6, 7, 8, 5, 28])[0]:
                case "ask":
                    self.ask()
                case "abort" if self.clients:
                    self.sim.abort(rng.choice(self.clients))
                case "stop" if self.clients:
                    self.sim.stop(rng.choice(self.clients), rng.randint(1, 30))
                case "keep":
                    self.keep()
                case "follow" if self.kept:
                    self.follow()
                case "pause":
                    self.pause()
                case _:
                    self.wait()
        self.sim.run(max_turns=6000)
        for client in self.clients:
            too_long = len(client.prompt) > self.sim.limits.capacity_tokens
            check_answer(self.sim, client, failures=bool(self.broken) or too_long)
        assert self.broken or not self.sim.problems


@pytest.mark.parametrize("seed", range(29, 37))
def test_chats(seed: int) -> None:
    Chats(seed).go()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_chats_at_length() -> None:
    for seed in range(37, 600):
        Chats(seed).go()
