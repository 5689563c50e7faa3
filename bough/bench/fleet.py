"""A fleet of engines in simulated time: the real scheduler, prefix cache and load balancing of each, on devices whose steps
take what `config.step_cost` says.

    bough simulate benchmarks/models/llama-3.1-70b --gpu h200 --tp-size 4 --dp-size 2 --rate 8

Engines plan one step ahead of the device, as they do on a GPU; of a pipeline, each stage has a step. Replicas of
attention run their steps together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bough.bench.fleet_trace import TOKEN_IDS, Arrival
from bough.cache.prefix import PrefixCache
from bough.config.concerns import LoadBalance, SchedulerConfig
from bough.config.step_cost import NO_LOAD, FleetModel, StepLoad
from bough.core.messages import Generate, RequestId, ToDetokenizer, ToEngine, Tokens, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import Mask, Outcome, RunnerLimits, Step
from bough.engine.loop import Loop
from bough.engine_client.replicas import Replicas
from bough.observability.health import Beat, State
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues

PAGE = 64
CHUNK_TOKENS = 8192
SLOTS = 512


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Followed:
    """The progress of a request."""

    arrival: Arrival
    replica: int
    first_s: float = 0.0
    end_s: float = 0.0
    tokens: int = 0
    cached: int = 0
    failed: bool = False


class _SimulatedStep:
    needs_masks = False

    def __init__(self, step: Step, clock: VirtualClock) -> None:
        self.step = step
        self._clock = clock
        self.launched_s = clock.now_s
        self.end_s = float("inf")
        """A step whose result is known at the end of the iteration in which it was launched."""

    def sample(self, masks: Mask) -> None:
        raise AssertionError("no request has a grammar")

    def wait(self) -> Outcome:
        assert self.end_s < float("inf"), "a step is not waited for in the turn that launches it"
        self._clock.now_s = max(self._clock.now_s, self.end_s)
        tokens = np.full((self.step.num_rows, 1), self.step.index % TOKEN_IDS, np.int32)
        return Outcome(tokens=tokens, counts=self.step.samples.astype(np.int32))


class SimulatedRunner:
    """Records launched steps; the group determines how long they take."""

    def __init__(self, limits: RunnerLimits, clock: VirtualClock) -> None:
        self.limits = limits
        self._clock = clock
        self.launched: _SimulatedStep | None = None

    def launch(self, step: Step) -> _SimulatedStep:
        self.launched = _SimulatedStep(step, self._clock)
        return self.launched

    def clear(self) -> None:
        """Nothing is queued."""

    def take_load(self) -> tuple[_SimulatedStep | None, StepLoad]:
        launched, self.launched = self.launched, None
        if launched is None:
            return None, NO_LOAD
        step = launched.step
        return launched, StepLoad.of(step.num_query.tolist(), step.context.tolist(), int(step.samples.sum()))


class _Post:
    """An inbox."""

    def __init__(self) -> None:
        self.messages: list[ToEngine] = []
        self.closed = False

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.messages = self.messages, []
        return messages


class SimulatedReplica:
    """One scheduler."""

    def __init__(self, model: FleetModel, clock: VirtualClock, context: int) -> None:
        page = PAGE * model.layout.cp
        limits = RunnerLimits(
            num_slots=SLOTS,
            num_pages=max(2, model.room_tokens // page),
            page_size=page,
            pages_per_slot=-(-context // page),
            context_length=context,
            max_step_tokens=CHUNK_TOKENS + SLOTS,
            vocab_size=TOKEN_IDS,
        )
        config = SchedulerConfig(max_running_requests=SLOTS, chunked_prefill_size=CHUNK_TOKENS)
        planned = Limits.of(limits, config)
        stages = model.layout.pp
        if stages > 1:
            planned = replace(planned, num_stages=stages)
        self.followed: dict[RequestId, Followed] = {}
        self.ended: list[Followed] = []
        self.clock = clock
        self.inbox = _Post()
        self.runner = SimulatedRunner(limits, clock)
        self.queues = Queues(planned)
        self.loop = Loop(
            runner=self.runner,
            queues=self.queues,
            cache=PrefixCache(num_pages=limits.num_pages, page_size=page),
            limits=planned,
            inbox=self.inbox,
            outbox=self,
            depth=max(1, stages - 1),
            clock=clock,
        )

    @property
    def busy(self) -> bool:
        return bool(self.inbox.messages) or bool(self.followed)

    def ask(self, number: int, followed: Followed) -> None:
        arrival = followed.arrival
        sampling = SamplingParams(temperature=0.0, max_new_tokens=arrival.new_tokens, ignore_eos=True)
        ask = Generate(id=number, rid=str(number), prompt=pack_ids(arrival.prompt), sampling=sampling)
        self.followed[number] = followed
        self.inbox.messages.append(ask)

    def send(self, message: ToDetokenizer) -> None:
        if not isinstance(message, Tokens):
            return
        for row, (number, count) in enumerate(zip(message.ids, message.counts, strict=True)):
            followed = self.followed[number]
            if count and not followed.tokens:
                followed.first_s = self.clock.now_s
            followed.tokens += count
            output = message.rows.get(row)
            if output is not None and output.end is not None:
                followed.end_s = self.clock.now_s
                followed.cached = output.end.cached_tokens
                followed.failed = output.end.reason != "length"
                self.ended.append(self.followed.pop(number))


class RankGroup:
    """Replicas of attention that run in lockstep on the same ranks; one, as a rule."""

    def __init__(self, model: FleetModel, context: int) -> None:
        self.model = model
        self.clock = VirtualClock()
        self.replicas = [SimulatedReplica(model, self.clock, context) for _ in range(model.layout.dp)]
        self.busy_s = 0.0
        self.steps = 0
        self._free_s = 0.0

    @property
    def busy(self) -> bool:
        return any(each.busy for each in self.replicas)

    def turn(self) -> None:
        for each in self.replicas:
            each.loop.turn()
        taken = [each.runner.take_load() for each in self.replicas]
        launched = [step for step, _ in taken if step is not None]
        if not launched:
            return
        cost = self.model.cost([load for _, load in taken])
        stages = self.model.layout.pp
        start_s = max(self._free_s, *(step.launched_s for step in launched))
        self._free_s = start_s + cost.stage_s
        self.busy_s += cost.stage_s
        self.steps += 1
        for step in launched:
            step.end_s = start_s + stages * cost.stage_s + (stages - 1) * cost.hop_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """Results of a fleet, in simulated time."""

    ranks: int
    requests: int
    failed: int
    seconds: float
    """Seconds from the first arrival to the last end."""
    output_tokens_s: float
    total_tokens_s: float
    output_tokens_s_per_rank: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    cached_share: float
    """Share of prompt tokens that were cached."""
    busy_share: float
    """Share of time in which devices were busy; for a pipeline, its stages."""
    mean_step_ms: float
    room_tokens: int
    """KV capacity of each scheduler, in tokens."""


class _NoBeat:
    """A channel that is never full: replicas count what they were sent."""

    def read(self) -> Beat:
        return Beat(steps=0, age_s=0.0, state=State.READY, num_running=0, num_waiting=0, pid=0)


class _NoWriter:
    def send_all(self, messages: Sequence[object]) -> None:
        raise AssertionError("nothing is sent in a simulation")

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Fleet:
    """Engines behind one server."""

    model: FleetModel
    num_engines: int
    context: int
    balance: LoadBalance = "prefix"
    groups: list[RankGroup] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = [RankGroup(self.model, self.context) for _ in range(self.num_engines)]
        self._every = [(group, each) for group in self.groups for each in group.replicas]
        count = len(self._every)
        self._router = Replicas([_NoWriter()] * count, [_NoBeat()] * count, self.balance)  # type: ignore[list-item]

    def run(self, arrivals: Sequence[Arrival]) -> FleetResult:
        """Runs until all requests have ended."""
        done: list[Followed] = []
        waiting = list(reversed(arrivals))
        number = 0
        busy: list[tuple[float, int]] = []  # a heap: when the engine's clock is next, and its number
        while waiting or busy:
            if waiting and waiting[-1].at_s <= (busy[0][0] if busy else float("inf")):
                number += 1
                woken = self._route(number, waiting.pop())
                if woken is not None:
                    heapq.heappush(busy, (self.groups[woken].clock.now_s, woken))
                continue
            _, turned = heapq.heappop(busy)
            group = self.groups[turned]
            group.turn()
            if group.busy:
                heapq.heappush(busy, (group.clock.now_s, turned))
            for each in group.replicas:
                for followed in each.ended:
                    self._router.ended(followed.replica, len(followed.arrival.prompt))
                    done.append(followed)
                each.ended.clear()
        return self._result(done)

    def _route(self, number: int, arrival: Arrival) -> int | None:
        """Returns the number of the engine if it had nothing to do before."""
        chosen = self._router.choose(arrival.prompt, "")
        self._router.began(chosen, len(arrival.prompt))
        group, replica = self._every[chosen]
        sleeps = not group.busy
        if sleeps:
            group.clock.now_s = max(group.clock.now_s, arrival.at_s)
        replica.ask(number, Followed(arrival, chosen))
        return chosen // self.model.layout.dp if sleeps else None

    def _result(self, done: list[Followed]) -> FleetResult:
        begin_s = min(each.arrival.at_s for each in done)
        seconds = max(each.end_s for each in done) - begin_s
        fine = [each for each in done if not each.failed]
        outputs = sum(each.tokens for each in fine)
        prompts = sum(len(each.arrival.prompt) for each in fine)
        ranks = self.model.layout.size * self.num_engines
        steps = sum(group.steps for group in self.groups)
        busy_s = sum(group.busy_s for group in self.groups)
        ttft = [1e3 * (each.first_s - each.arrival.at_s) for each in fine]
        tpot = [1e3 * (each.end_s - each.first_s) / (each.tokens - 1) for each in fine if each.tokens > 1]
        return FleetResult(
            ranks=ranks,
            requests=len(done),
            failed=len(done) - len(fine),
            seconds=seconds,
            output_tokens_s=outputs / seconds,
            total_tokens_s=(outputs + prompts) / seconds,
            output_tokens_s_per_rank=outputs / seconds / ranks,
            ttft_ms=_quantiles(ttft),
            tpot_ms=_quantiles(tpot),
            cached_share=sum(each.cached for each in fine) / max(1, prompts),
            busy_share=busy_s / (seconds * len(self.groups)),
            mean_step_ms=1e3 * busy_s / max(1, steps),
            room_tokens=self.model.room_tokens,
        )


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return {"p50": float(p50), "p99": float(p99)}
