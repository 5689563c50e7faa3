"""Replicas of attention run in lockstep: each has a scheduler of its own, and all of them launch a step together.

Schedulers are awake or asleep, all of them alike. While they are awake, every turn of each has an agreement, in which it
says how many tokens it brings; one that has nothing to run brings none, and launches an empty step if another has some. If
none has, all fall asleep at that agreement. One that gets work then wakes the others by a message and waits for them. A
sleep has a number, so that a message about an earlier one wakes no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from bough.config.layout import Layout
from bough.core.messages import Wake
from bough.core.step import Launched, RunnerLimits, Step
from bough.distributed.collectives import ALONE, Collectives
from bough.distributed.join import join_host
from bough.distributed.mesh import Mesh
from bough.distributed.shared_memory import Patience
from bough.engine.inbox import MessageSource
from bough.engine.step_channels import StepChannel
from bough.engine.step_frame import RunStep
from bough.engine.worker import InStep, SharedLaunched, Stop, Timed
from bough.ipc import Launch, Outbox
from bough.ipc.store import AnyStore
from bough.layers.spread import TokenSpread
from bough.runner.model_runner import ModelRunner

_LOOK_S: Final = 0.5
"""A scheduler that has ended, and waits for the others, looks for messages this often."""


class Agreed(NamedTuple):
    """What schedulers agree on for one step."""

    rows: int
    """Tokens that each of their ranks brings, zeros among them; 0: none has any, and all fall asleep."""
    split: bool
    """Ranks of some replica that share contexts compute different tokens."""
    over: bool
    """All have ended."""


class Agreement:
    """One scheduler's end. `exchange` gives the others' numbers with its own, in the order of replicas, once all have come
    to it; `wake` sends a message to each of the others."""

    def __init__(self, exchange: Callable[[Sequence[int]], list[list[int]]], wake: Callable[[Wake], None]) -> None:
        self._exchange = exchange
        self._wake = wake
        self.awake = False
        self.sleep = 0
        """Number of the sleep that lasts, or comes next."""

    def woken(self, message: Wake) -> None:
        """Another scheduler has work."""
        if message.sleep == self.sleep:
            self.awake = True

    def agree(self, num_tokens: int, *, split: bool = False, ends: bool = False) -> Agreed:
        """Waits for the others. Wakes them if they sleep."""
        if not self.awake:
            self._wake(Wake(self.sleep))
            self.awake = True
        every = self._exchange((num_tokens, int(split), int(ends)))
        rows = max(tokens for tokens, _, _ in every)
        if not rows:
            self.awake = False
            self.sleep += 1
        return Agreed(rows, any(split for _, split, _ in every), all(ended for _, _, ended in every))


def exchange_over(talk: Collectives) -> Callable[[Sequence[int]], list[list[int]]]:
    """The exchange of an `Agreement` over collectives for tensors on the host."""

    def exchange(mine: Sequence[int]) -> list[list[int]]:
        every: list[list[int]] = talk.all_gather(torch.tensor(mine)).tolist()
        return every

    return exchange


class LockstepInbox:
    """A scheduler's inbox without the others' messages, which go to the agreement."""

    def __init__(self, inbox: MessageSource, agreement: Agreement) -> None:
        self._inbox = inbox
        self._agreement = agreement

    @property
    def closed(self) -> bool:
        return self._inbox.closed

    def drain(self, block_s: float) -> Sequence[Any]:
        """What has come for the scheduler. Waits for nothing while others are at work."""
        messages = self._inbox.drain(0.0 if self._agreement.awake else block_s)
        kept = [message for message in messages if not isinstance(message, Wake)]
        if len(kept) < len(messages):
            for message in messages:
                if isinstance(message, Wake):
                    self._agreement.woken(message)
        return kept


class LockstepRunner:
    """The runner of one replica's first rank."""

    def __init__(
        self,
        local: ModelRunner,
        agreement: Agreement,
        spread: TokenSpread,
        others: StepChannel | None,
        patience: Patience | None = None,
    ) -> None:
        """`others`: the way to the other ranks of the replica, if it has any."""
        self._local = local
        self._agreement = agreement
        self._spread = spread
        self._others = others
        self._patience = patience or Patience()
        self._empty = empty_step(local.limits)

    def launch(self, step: Step) -> Launched:
        context = self._local.context
        rows, split = (step.num_tokens, False) if context is None else context.num_rows(step)
        return self._run(step, self._agreement.agree(rows, split=split))

    def join(self) -> bool:
        """A turn without a step of its own. Returns whether others are at work: then there is another turn at once."""
        if not self._agreement.awake:
            return False
        agreed = self._agreement.agree(0)
        if agreed.rows:
            self._run(self._empty, agreed).wait()
        return agreed.rows > 0

    def clear(self) -> None:
        self._local.clear()

    def idle(self) -> None:
        """Nothing: ranks must capture the same graphs at the same step."""

    def stop(self, inbox: MessageSource) -> None:
        """Ends together with the others: takes part in their steps until all have ended. `inbox`: where they wake it."""
        over = False
        while not over and not inbox.closed:
            agreed = self._agreement.agree(0, ends=True)
            over = agreed.over
            if agreed.rows:
                self._run(self._empty, agreed).wait()
            while not over and not self._agreement.awake and not inbox.closed:
                inbox.drain(_LOOK_S)
        if self._others is not None:
            self._others.send(Stop())

    def _run(self, step: Step, agreed: Agreed) -> Launched:
        self._spread.begin(agreed.rows, alike=not agreed.split)
        if self._others is None:
            with Timed(self._patience):
                return self._alone(step)
        with InStep(), Timed(self._patience):
            self._others.send(RunStep(step, agreed.rows, alike=not agreed.split))
            return SharedLaunched(self._local.launch(step), self._others)

    def _alone(self, step: Step) -> Launched:
        """A replica of one rank: if its step fails, it takes part in what is left of it for the others' sake."""
        try:
            return self._local.launch(step)
        except Exception:
            with InStep(), torch.inference_mode():
                if not self._spread.join_rest():
                    raise
            raise


def empty_step(limits: RunnerLimits) -> Step:
    """A step of one token in the spare slot, which has no pages and samples nothing."""
    one = np.ones(1, np.int32)
    return Step(
        index=-1,
        num_decodes=0,
        slots=one * limits.num_slots,
        num_query=one,
        context=np.zeros(1, np.int32),
        samples=np.zeros(1, np.bool_),
        tokens=np.zeros(1, np.int32),
        table_at=np.empty(0, np.int64),
        table_pages=np.empty(0, np.int32),
    )


def open_company(
    launch: Launch,
    layout: Layout,
    rank: int,
    store: AnyStore,
    mesh: Mesh,
    runner: ModelRunner,
    spread: TokenSpread,
    others: StepChannel | None,
    patience: Patience,
) -> tuple[LockstepRunner, Agreement]:
    """The first rank's runner where several replicas of attention run in lockstep, and what it agrees with the others by."""
    parallel = launch.config.parallel
    talk: Collectives = ALONE
    if parallel.attn_dp_size > 1:
        talk = join_host(layout, rank, store, mesh.dp, patience=patience, timeout_s=parallel.dist_timeout_s)
    first = launch.replica * parallel.attn_dp_size
    peers = launch.server.replicas(parallel.num_schedulers)[first : first + parallel.attn_dp_size]
    outboxes = [Outbox(each.engine) for each in peers if each != launch.endpoints]

    def wake(message: Wake) -> None:
        for outbox in outboxes:
            outbox.send(message)

    agreement = Agreement(exchange_over(talk), wake)
    return LockstepRunner(runner, agreement, spread, others, patience), agreement
