"""The whole engine on the oracle runner, turn by turn, with every invariant looked at after each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bough.bench.fake_media import media_mark, media_tokens
from bough.bench.fake_runner import OracleRunner, lone_output, pick, prefix_hash, score
from bough.cache.prefix import PrefixCache
from bough.config.concerns import EvictionPolicy
from bough.core.grammar import Compiled, CompileFailed, Matcher
from bough.core.kv import Grows, KvGroup, KvLayout
from bough.core.media import Features, MediaItem
from bough.core.messages import (
    Abort,
    Began,
    End,
    Generate,
    LogprobSpec,
    Reply,
    RowOutput,
    StopAt,
    TextSpec,
    ToDetokenizer,
    ToEngine,
    Tokens,
    pack_ids,
    unpack_ids,
)
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.core.step import MediaLimits, RunnerLimits, SpanCosts, Step
from bough.engine.control import Hooks
from bough.engine.loop import Loop
from bough.scheduler.accept import output_limit
from bough.scheduler.constrain import Gate
from bough.scheduler.drafting import Drafter
from bough.scheduler.limits import Limits
from bough.scheduler.media import MediaAccount
from bough.scheduler.plan import StepPlan, plan_step
from bough.scheduler.queues import Queues, Waiting

VOCAB = 40
PATIENCE = 64


class Clock:
    """Time passes by the turn."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Inbox:
    def __init__(self) -> None:
        self.messages: list[ToEngine] = []
        self.closed = False

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.messages = self.messages, []
        return messages


@dataclass
class Client:
    """What the other side of the outbox sees of one request."""

    ask: Generate
    began: int = 0
    tokens: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    rows: list[RowOutput] = field(default_factory=list)
    aborted: bool = False
    stopped_at: int | None = None
    crosses: bool = False
    """Whether cross attention reads media."""

    @property
    def end(self) -> End:
        assert len(self.ends) == 1, f"{self.ask.rid} ended {len(self.ends)} times"
        return self.ends[0]

    @property
    def prompt(self) -> list[int]:
        """What the model reads: of media what they are made of."""
        ids = unpack_ids(self.ask.prompt).astype(np.int64)
        for item in self.ask.media:
            if item.length and not self.crosses:
                here = ids[item.start : item.stop]
                here[unpack_ids(self.ask.prompt)[item.start : item.stop] == item.token] = opened_features(item.features)
        return ids.tolist()

    @property
    def marks(self) -> list[int]:
        """By token of the prompt: of the media that it reads by cross attention."""
        marks = []
        for token in range(len(unpack_ids(self.ask.prompt))):
            seen = [item for item in self.ask.media if item.start <= token] if self.crosses else []
            for number in range(len(seen) - 1, 0, -1):  # from the last run of neighbours on
                if seen[number - 1].stop != seen[number].start:
                    del seen[:number]
                    break
            values = [opened_features(item.features) for item in seen]
            marks.append(media_mark(np.concatenate(values).astype(np.int64)) if values else 0)
        return marks


def opened_features(features: Features) -> npt.NDArray[np.generic]:
    """What an item is made of; its path says which."""
    return media_tokens(int(features.path), features.shape[0])


class ParityMatcher:
    """`length` tokens: token k is congruent to k modulo 3, but the last `run` of every 8 places are forced."""

    def __init__(self, length: int, run: int) -> None:
        self.length = length
        self.run = run
        self.taken: list[int] = []

    def allowed(self) -> list[int]:
        at = len(self.taken)
        if self.is_terminated():
            return []
        if self.run and at % 8 >= 8 - self.run:
            return [self._forced_at(at)]
        return [token for token in range(VOCAB) if token % 3 == at % 3]

    def _forced_at(self, at: int) -> int:
        return (7 * at + 1) % VOCAB

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.taken.append(token)
        return True

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = 0
        words = out.view(np.uint32)
        for token in self.allowed():
            words[token >> 5] |= np.uint32(1 << (token & 31))

    @property
    def is_open(self) -> bool:
        return False

    def is_terminated(self) -> bool:
        return len(self.taken) >= self.length

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def ends_with(self, tokens: Sequence[int]) -> bool:
        return len(self.taken) + len(tokens) >= self.length

    def respell(self) -> int | None:
        return None

    def forced(self) -> list[int]:
        at, out = len(self.taken), []
        while self.run and at % 8 >= 8 - self.run and at < self.length:
            out.append(self._forced_at(at))
            at += 1
        return out


class Grammars:
    """Compiles "length,run,turns" after that many polls; "bad" fails."""

    def __init__(self) -> None:
        self.pending: dict[int, list[int | str]] = {}
        self.looks = 0

    def submit(self, request_id: int, spec: GrammarSpec) -> None:
        self.pending[request_id] = ["bad", 0, 2] if spec.source == "bad" else [int(x) for x in spec.source.split(",")]

    def poll(self) -> list[Compiled | CompileFailed]:
        out: list[Compiled | CompileFailed] = []
        for request_id, (length, run, turns) in list(self.pending.items()):
            if int(turns) > 0:
                self.pending[request_id][2] = int(turns) - 1
                continue
            del self.pending[request_id]
            if length == "bad":
                out.append(CompileFailed(request_id, "the grammar is wrong"))
            else:
                out.append(Compiled(request_id, ParityMatcher(int(length), int(run))))
        return out

    def cancel(self, request_id: int) -> None:
        self.pending.pop(request_id, None)

    def look(self, matchers: Sequence[Matcher]) -> None:
        self.looks += 1


class Sim:
    """An engine and its clients. `turn` runs the loop once and checks everything that must always hold."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        num_slots: int = 8,
        context_length: int = 96,
        max_step_tokens: int = 32,
        depth: int = 1,
        radix: bool = True,
        eviction: EvictionPolicy = "lru",
        pooling: bool = False,
        fail_launch: Callable[[Step], Exception | None] | None = None,
        fail_wait: Callable[[Step], Exception | None] | None = None,
        drafter: Drafter | None = None,
        yields: Callable[[int], int] | None = None,
        propose: Callable[[list[int], int], list[int]] | None = None,
        media: MediaLimits | None = None,
        groups: tuple[KvGroup, ...] = (KvGroup(Grows()),),
        num_snapshots: int | None = None,
        **limits: object,
    ) -> None:
        self.runner_limits = RunnerLimits(
            media=media,
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            pages_per_slot=-(-context_length // page_size),
            context_length=context_length,
            max_step_tokens=max_step_tokens,
            vocab_size=VOCAB,
            spans=SpanCosts() if KvLayout(groups, page_size).growing_pages else None,
            groups=groups,
            num_snapshots=num_snapshots,
        )
        defaults: dict[str, object] = {
            "max_running": num_slots,
            "chunk_tokens": max_step_tokens,
            "policy": "fcfs",
            "share_tokens": page_size,
            "min_chunk_tokens": 4,
            "max_step_drafts": max_step_tokens,
        }
        shape = {name: getattr(self.runner_limits, name) for name in RunnerLimits.__struct_fields__}
        self.limits = Limits(**{**shape, **defaults, **limits})  # type: ignore[arg-type]
        self.clock = Clock()
        self.inbox = Inbox()
        self.clients: dict[int, Client] = {}
        self.replies: list[Reply] = []
        self.problems: list[str] = []
        self.reports: list[dict[str, object]] = []
        self.grammars = Grammars()
        self.runner = OracleRunner(
            self.runner_limits,
            pooling=pooling,
            fail_launch=fail_launch,
            fail_wait=fail_wait,
            yields=yields,
            propose=propose,
            is_void=lambda slot, step: self.queues.is_void(slot, step),
        )
        self.queues = Queues(self.limits, self.grammars)
        self.queues.drafter = drafter
        if media is not None:
            self.queues.media = MediaAccount(media, opened_features)
        self.cache = PrefixCache(
            num_pages=num_pages, layout=self.limits.layout, policy=eviction, enabled=radix, num_snapshots=num_snapshots
        )
        self.loop = Loop(
            runner=self.runner,
            queues=self.queues,
            cache=self.cache,
            limits=self.limits,
            inbox=self.inbox,
            outbox=self,
            depth=depth,
            hooks=Hooks(problem=self.problems.append, report=self.reports.append),
            clock=self.clock,
            strict=True,
        )
        self._next_id = 1
        self._overtaken = 0
        self._fitting = 0
        self._oldest: Waiting | None = None

    # -- the clients' side ------------------------------------------------------------------------

    def ask(
        self,
        prompt: list[int],
        max_new: int = 8,
        *,
        stops: tuple[int, ...] = (),
        stream: bool = True,
        text: TextSpec | None = None,
        priority: int = 0,
        namespace: str = "",
        logprobs: LogprobSpec | None = None,
        hidden: str = "",
        pool: str = "",
        deadline_s: float = 0.0,
        reasoning_end: tuple[int, ...] = (),
        reasoning_open: bool = False,
        thinking_budget: int = -1,
        min_new: int = 0,
        grammar: GrammarSpec | None = None,
        eos: tuple[int, ...] = (),
        trace: bool = False,
        media: tuple[MediaItem, ...] = (),
        positions: bytes = b"",
    ) -> Client:
        ask = Generate(
            media=media,
            positions=positions,
            id=self._next_id,
            rid=f"r{self._next_id}",
            prompt=pack_ids(prompt),
            sampling=SamplingParams(
                max_new_tokens=max_new, min_new_tokens=min_new, temperature=0.0, stop_token_ids=stops, grammar=grammar
            ),
            stream=stream,
            text=text,
            priority=priority,
            namespace=namespace,
            logprobs=logprobs,
            hidden_states=hidden,  # type: ignore[arg-type]
            pool=pool,
            deadline_s=deadline_s,
            reasoning_end=reasoning_end,
            reasoning_open=reasoning_open,
            thinking_budget=thinking_budget,
            eos_ids=eos,
            trace=trace,
        )
        self._next_id += 1
        client = self.clients[ask.id] = Client(
            ask, crosses=self.limits.media is not None and self.limits.media.fixed > 0
        )
        self.inbox.messages.append(ask)
        return client

    def abort(self, client: Client) -> None:
        client.aborted = True
        self.inbox.messages.append(Abort(client.ask.id))

    def stop(self, client: Client, num_tokens: int) -> None:
        """As the detokenizer would: only about tokens it has seen, only once."""
        if client.stopped_at is None and 0 < num_tokens <= len(client.tokens):
            client.stopped_at = num_tokens
            self.inbox.messages.append(StopAt(client.ask.id, num_tokens))

    def send(self, message: ToDetokenizer) -> None:
        match message:
            case Began():
                client = self.clients[message.id]
                client.began += 1
                assert client.began == 1
                assert not client.tokens
            case Tokens():
                self._tokens(message)
            case Reply():
                self.replies.append(message)

    def _tokens(self, message: Tokens) -> None:
        assert len(message.ids) == len(message.counts)
        tokens = unpack_ids(message.tokens).tolist()
        assert len(tokens) == sum(message.counts)
        at = 0
        for row, (request_id, count) in enumerate(zip(message.ids, message.counts, strict=True)):
            client = self.clients[request_id]
            assert client.began == 1
            assert not client.ends, f"{client.ask.rid} got news after its end"
            client.tokens += tokens[at : at + count]
            at += count
            output = message.rows.get(row)
            if output is not None:
                client.rows.append(output)
                if output.end is not None:
                    client.ends.append(output.end)

    # -- running ----------------------------------------------------------------------------------

    def turn(self) -> None:
        self._check_pure()
        before = set(self.queues.where)
        oldest = self.queues.waiting.oldest()
        admitted = self._admitted()
        self.clock.now += 0.01
        self.loop.turn()
        assert not self.runner.violations, self.runner.violations
        assert self.cache.balanced
        self._check_patience(oldest, admitted)
        self._check_released(before)

    def run(self, max_turns: int = 3000) -> None:
        """Until everything has ended."""
        for _ in range(max_turns):
            if not self.inbox.messages and self.queues.idle and not self.loop._in_flight:
                break
            self.turn()
        assert self.queues.idle, f"not done after {max_turns} turns: {self.loop.control.info()}"
        self.turn()
        assert self.cache.num_held == self.cache.num_kept
        assert self.cache.tree.num_evictable == self.cache.tree.num_cached
        assert self.cache.num_repairs == 0
        if self.queues.media is not None:
            store = self.queues.media.store
            assert store.num_available == store.num_blocks, "somebody is still in the middle of an item"
        if not self.cache.enabled:
            assert self.cache.pool.num_free == self.cache.total
        for client in self.clients.values():
            assert client.end is not None

    def _admitted(self) -> set[int]:
        queues = self.queues
        return {row.job.id for row in (*queues.prefilling.values(), *queues.running.values())}

    def _check_patience(self, oldest: Waiting | None, before: set[int]) -> None:
        """The oldest waiting request is not overtaken for ever, and if it fits beside everybody's worst case, it starts."""
        if oldest is None or self.queues.waiting.oldest() is not oldest or oldest is not self._oldest:
            self._overtaken = self._fitting = 0
            self._oldest = self.queues.waiting.oldest()
            return
        if self._admitted() - before:
            self._overtaken += 1
        self._fitting = self._fitting + 1 if self._fits(oldest) else 0
        assert self._overtaken <= PATIENCE, "the oldest waiting request is overtaken for ever"
        assert self._fitting <= PATIENCE, "a request that fits is not planned"

    def _fits(self, waiting: Waiting) -> bool:
        queues, limits = self.queues, self.limits
        if queues.num_live >= limits.max_running or self.loop.control.paused:
            return False
        # Pages behind a window go back when a chunk has settled: until then a prompt holds those of the whole chunk.
        chunk = limits.columns_for(min(len(waiting.key), limits.chunk_tokens)) * limits.layout.column_pages
        worst = max(limits.layout.pages_for(len(waiting.key) + waiting.job.limit), chunk)
        for row in (*queues.prefilling.values(), *queues.running.values(), *queues.leaving.values()):
            worst += limits.layout.pages_for(len(row.job.prompt) + row.job.limit)
        return worst <= self.cache.total

    def _check_released(self, before: set[int]) -> None:
        """A request that has ended is out of memory within two steps."""
        slots = self.queues.slots
        for slot in self.queues.leaving:
            assert self.queues.in_flight(slot)
            assert slots.last_step[slot] <= self.queues.settled + max(self.loop.depth, 1)

    # -- purity -----------------------------------------------------------------------------------

    def _check_pure(self) -> None:
        before = self._digest()
        first = plan_step(self.queues, self.cache.view(), self.limits)
        second = plan_step(self.queues, self.cache.view(), self.limits)
        assert _plain(first) == _plain(second), "planning twice gives two plans"
        assert self._digest() == before, "planning changed something"

    def _digest(self) -> str:
        queues, slots, cache = self.queues, self.queues.slots, self.cache
        digest = hashlib.sha256()
        for name, value in sorted(vars(slots).items()):
            digest.update(name.encode() + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()))
        digest.update(repr([(w.job.id, w.skipped) for w in queues.waiting]).encode())
        digest.update(repr([sorted(queues.prefilling), list(queues.running), sorted(queues.leaving)]).encode())
        digest.update(repr([row.computed for row in queues.prefilling.values()]).encode())
        digest.update(repr((queues.next_step, queues.settled, queues.epoch, sorted(queues.forced.items()))).encode())
        digest.update(repr((cache.num_held, cache.num_available, cache.tree.version, cache.tree.num_cached)).encode())
        digest.update(repr(sorted((n.depth, n.locks, n.hits, n.last_used) for n in cache.tree.nodes())).encode())
        return digest.hexdigest()


def _plain(plan: StepPlan) -> tuple[object, ...]:
    shares = [(id(s.phase), s.start, s.held, s.num_tokens) for s in plan.shares]
    runs = [(r.slot, r.tokens, r.num_new_columns) for r in plan.runs]
    drafts = plan.num_new_columns.tolist(), plan.drafts.tolist(), plan.draft_tokens.tolist()
    return plan.decodes.tolist(), *drafts, shares, runs, plan.retract, plan.preempt


def expected(sim: Sim, client: Client) -> tuple[list[int], str]:
    """What the request gets when it is alone in the world."""
    ask = client.ask
    stops = (*ask.eos_ids, *ask.sampling.stop_token_ids)
    limit = output_limit(sim.limits, len(client.prompt), ask.sampling.max_new_tokens)
    least = ask.sampling.min_new_tokens
    return lone_output(client.prompt, vocab_size=VOCAB, limit=limit, stops=stops, min_new=least, marks=client.marks)


def check_answer(sim: Sim, client: Client, *, failures: bool = False) -> None:
    """The request ended once, with what it would have got alone, or a prefix of it if it was cut."""
    end = client.end
    tokens, reason = expected(sim, client)
    if end.reason == "error":
        assert failures, f"{client.ask.rid} failed: {end.message}"
        assert tokens[: len(client.tokens)] == client.tokens
    elif end.reason == "abort":
        assert client.aborted or client.ask.deadline_s, end.message
        assert tokens[: len(client.tokens)] == client.tokens
        assert end.completion_tokens == len(client.tokens)
    elif client.stopped_at is not None and end.completion_tokens == client.stopped_at:
        assert end.reason == "stop" or end.reason == reason
        assert tokens[: len(client.tokens)] == client.tokens
    else:
        assert client.tokens == tokens
        assert end.reason == reason
        assert end.completion_tokens == len(tokens)
        assert end.matched == (tokens[-1] if reason == "stop" else None)
    if end.reason != "error":
        assert end.prompt_tokens == len(client.prompt)


def alone(client: Client, gate: Gate, limit: int) -> list[int]:
    """The answer of a constrained request that is alone: mask, pick, accept."""
    sequence = list(client.prompt)
    stops = client.ask.sampling.stop_token_ids
    while len(sequence) - len(client.prompt) < limit and not gate.terminated:
        mask = np.zeros(-(-VOCAB // 32), np.int32)
        gate.fill_mask(mask)
        token = pick(prefix_hash(np.array(sequence, np.int64)), VOCAB, mask)
        sequence.append(token)
        if token in stops:
            break
        assert gate.accept(token)
    return sequence[len(client.prompt) :]


def gate_of(client: Client) -> Gate | None:
    """A fresh gate for a request: None if it is free."""
    ask, grammar = client.ask, client.ask.sampling.grammar
    if grammar is None:
        budgeted = ask.thinking_budget >= 0 and ask.reasoning_end
        gate = Gate(None, marker=ask.reasoning_end, before=client.prompt, budget=ask.thinking_budget)
        return gate if budgeted else None
    length, run, _ = (int(x) for x in grammar.source.split(","))
    return Gate(
        ParityMatcher(length, run),
        marker=ask.reasoning_end,
        before=client.prompt,
        after_reasoning=grammar.after_reasoning,
        budget=ask.thinking_budget,
        ends=ask.eos_ids,
    )


def check_scores(client: Client) -> None:
    """Log-probabilities of everything that was sent are those of the tokens in their places; where nothing was to be sent,
    those of the token that would have been the first."""
    spec = client.ask.logprobs
    assert spec is not None
    values = [v for row in client.rows if row.logprobs for v in row.logprobs.logprobs]
    ids = [i for row in client.rows if row.logprobs for i in row.logprobs.token_ids]
    assert ids == client.tokens or (not client.tokens and len(ids) == 1 and client.end.reason == "length")
    sequence = np.array(client.prompt + ids, np.int64)
    for at, value in enumerate(values, len(client.prompt)):
        assert value is not None
        assert abs(value - score(sequence[:at], int(sequence[at]))) < 1e-5
    scored = [row.prompt_logprobs for row in client.rows if row.prompt_logprobs is not None]
    if spec.start < 0 or not client.tokens:
        assert spec.start >= 0 or not scored
        return
    assert len(scored) == (1 if spec.start < len(client.prompt) else 0)
    for part in scored:
        assert part.token_ids == client.prompt[spec.start :]
        for at, value in enumerate(part.logprobs, spec.start):
            assert value is None if at == 0 else abs(value - score(sequence[:at], int(sequence[at]))) < 1e-5  # type: ignore[operator]
