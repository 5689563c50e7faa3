"""Schedulers of attention replicas in lockstep, as threads on the oracle runner: whatever comes when, no step is missed by a
replica, none waits for ever, all sleep when there is nothing to do, and answers are those of a lone request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

import pytest
import torch

from bough.bench.fake_runner import OracleLaunched, OracleRunner, lone_output
from bough.config.layout import Layout
from bough.core.messages import Shutdown, Wake
from bough.core.step import Launched, Outcome, Step
from bough.distributed.mesh import Mesh
from bough.distributed.threads import ThreadMeshes
from bough.engine.lockstep import Agreement, LockstepInbox, LockstepRunner, exchange_over
from bough.layers.spread import TokenSpread
from tests.covers import long
from tests.sim.harness import VOCAB, Client, Sim


class ThreadInbox:
    """An inbox that other threads send to."""

    def __init__(self) -> None:
        self.queue: Queue[Any] = Queue()
        self.closed = False

    def send(self, message: Any) -> None:
        self.queue.put(message)

    def drain(self, block_s: float) -> Sequence[Any]:
        messages = []
        try:
            messages.append(self.queue.get(timeout=block_s) if block_s else self.queue.get_nowait())
            while True:
                messages.append(self.queue.get_nowait())
        except Empty:
            return messages


class Nothing:
    """An empty step, launched."""

    needs_masks = False

    def __init__(self, step: Step) -> None:
        self.step = step

    def wait(self) -> Outcome | None:
        return None


class TalkingRunner:
    """The oracle, with blocks that all replicas compute together. May fail in front of one of them."""

    def __init__(self, oracle: OracleRunner, spread: TokenSpread, num_blocks: int) -> None:
        self.oracle = oracle
        self.limits = oracle.limits
        self.context = None
        self.spread = spread
        self.fail_at = -1
        """The block in front of which the next step fails."""
        self.steps = 0
        spread.blank_1D = torch.zeros(1, 1)
        spread.blocks = [self._block] * num_blocks

    def _block(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Everybody's tokens are summed, so that a replica that computes another step is noticed."""
        out = self.spread.through(x_TD, lambda x_ND: x_ND + 1)
        assert (out == self.spread.owners.size + x_TD[0] * self.spread.owners.size).all()
        return out

    def launch(self, step: Step) -> Launched:
        self.steps += 1
        fail_at, self.fail_at = (self.fail_at, -1) if step.index >= 0 else (-1, self.fail_at)
        for number, block in enumerate(self.spread.blocks):
            if number == fail_at:
                raise ZeroDivisionError("this replica fails")
            block(torch.zeros(step.num_tokens, 1))
        launched: OracleLaunched | Nothing = self.oracle.launch(step) if step.index >= 0 else Nothing(step)
        return launched  # type: ignore[return-value]

    def clear(self) -> None:
        pass


class Replica:
    def __init__(self, mesh: Mesh, group: list[Replica], num_blocks: int) -> None:
        self.sim = Sim(depth=random.Random(mesh.dp.rank).choice([0, 1]))
        self.inbox = ThreadInbox()
        self.agreement = Agreement(
            exchange_over(mesh.dp.talk), lambda wake: [each.inbox.send(wake) for each in group if each is not self]
        )
        self.talking = TalkingRunner(self.sim.runner, spread := TokenSpread(mesh), num_blocks)
        self.runner = LockstepRunner(self.talking, self.agreement, spread, None)  # type: ignore[arg-type]
        loop = self.sim.loop
        loop.runner = loop.company = self.runner
        loop.idle_s = 0.2
        loop.inbox = self.lockstep_inbox = LockstepInbox(self.inbox, self.agreement)
        loop.clock = type("Clock", (), {"monotonic": staticmethod(time.monotonic)})()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.sim.loop.run()
            self.runner.stop(self.lockstep_inbox)
        except BaseException as error:
            self.error = error

    def ask(self, prompt: list[int], max_new: int) -> Client:
        client = self.sim.ask(prompt, max_new)
        (message,) = self.sim.inbox.messages
        self.sim.inbox.messages.clear()
        self.inbox.send(message)
        return client


@contextmanager
def replicas(count: int, num_blocks: int = 1) -> Iterator[list[Replica]]:
    """Running schedulers, which are asked to end at the end."""
    ranks = ThreadMeshes(Layout(tp=count, dp=count), timeout_s=20)
    group: list[Replica] = []
    group += [Replica(mesh, group, num_blocks) for mesh in ranks.meshes]
    for each in group:
        each.thread.start()
    try:
        yield group
        for each in random.Random(count).sample(group, count):
            each.inbox.send(Shutdown(0.0))
        for each in group:
            each.thread.join(20)
            assert not each.thread.is_alive(), "it waits for ever"
            assert each.error is None
        assert len({each.talking.steps for each in group}) == 1, "every replica takes part in every step"
    finally:
        ranks.break_up("the test is over")
        for each in group:
            each.inbox.closed = True
            each.thread.join(20)


def wait_for(what: Any, group: list[Replica]) -> None:
    give_up_s = time.monotonic() + 20
    while not what():
        assert time.monotonic() < give_up_s, "it waits for ever"
        assert all(each.error is None for each in group), [each.error for each in group]
        time.sleep(0.0002)


@pytest.mark.parametrize(("count", "patterns"), [(2, 150), (3, 75), (4, 40), long(2, 600), long(3, 300), long(4, 100)])
def test_whatever_comes_when(count: int, patterns: int) -> None:
    """Patterns of arrivals, some of them while others still run, some once all sleep."""
    rng = random.Random(count)
    with replicas(count) as group:
        for _ in range(patterns):
            asked: list[tuple[Replica, Client, list[int], int]] = []
            for each in rng.sample(group, rng.randint(1, count)):
                for _ in range(rng.randint(1, 2)):
                    prompt, max_new = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 9, 40]))], rng.randint(1, 2)
                    asked.append((each, each.ask(prompt, max_new), prompt, max_new))
                    if rng.random() < 0.2:
                        time.sleep(rng.random() * 0.001)
            for _, client, prompt, max_new in asked:
                wait_for(lambda c=client: c.ends, group)
                assert client.tokens == lone_output(prompt, vocab_size=VOCAB, limit=max_new)[0]
            if rng.random() < 0.5:
                wait_for(lambda: not any(each.agreement.awake for each in group), group)
        for each in group:
            assert not each.sim.runner.violations
            assert each.agreement.sleep > patterns // 4, "they have slept in between"
        wait_for(lambda: not any(each.agreement.awake for each in group), group)
        steps = group[0].talking.steps
        time.sleep(0.02)
        assert group[0].talking.steps == steps, "who sleeps computes nothing"


def test_a_failing_replica_takes_part_in_what_is_left() -> None:
    """Its requests fail; the others' answers are what they are, and it answers again."""
    rng = random.Random(5)
    with replicas(3, num_blocks=3) as group:
        for fail_at in (0, 1, 2, 0):
            clients = [(each, each.ask([7, 8, rng.randrange(VOCAB)], 6)) for each in group]
            broken = rng.choice(group)
            broken.talking.fail_at = fail_at
            for each, client in clients:
                wait_for(lambda c=client: c.ends, group)
                if each is not broken:
                    assert client.tokens == lone_output(client.prompt, vocab_size=VOCAB, limit=6)[0]
                    assert client.end.reason == "length"
            wait_for(lambda b=broken: b.talking.fail_at == -1 or b.ask([1, 2], 1), group)
        for each in group:
            again = each.ask([3, 4, 5], 2)
            wait_for(lambda c=again: c.ends, group)
            assert again.tokens == lone_output([3, 4, 5], vocab_size=VOCAB, limit=2)[0]
        assert any("ZeroDivisionError" in problem for each in group for problem in each.sim.problems)


def test_a_message_about_an_earlier_sleep_wakes_nobody() -> None:
    sent: list[Wake] = []
    agreement = Agreement(lambda mine: [list(mine), [0, 0, 0]], sent.append)
    assert agreement.agree(5).rows == 5
    assert sent == [Wake(0)]
    assert agreement.awake
    assert agreement.agree(0).rows == 0
    assert not agreement.awake
    agreement.woken(Wake(0))
    assert not agreement.awake
    agreement.woken(Wake(1))
    assert agreement.awake
