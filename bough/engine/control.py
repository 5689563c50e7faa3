"""Everything that is not a request: cache flushes, information, pauses, shutdown, and the line about throughput."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from bough.cache.prefix import PrefixCache
from bough.core.errors import Aborted, BoughError
from bough.core.messages import (
    AbortByName,
    Corpus,
    ExpertRecord,
    FlushCache,
    GetInfo,
    JoinBranches,
    Look,
    Pause,
    Profile,
    Recall,
    Reply,
    Resume,
    Shutdown,
)
from bough.scheduler.accept import abort_all
from bough.scheduler.join import join, recall
from bough.scheduler.leave import retract
from bough.scheduler.policy import effective
from bough.scheduler.queues import Prefilling, Queues, Running
from bough.scheduler.snapshot import snapshot

Info = dict[str, Any]
ControlMessage = (
    AbortByName
    | FlushCache
    | GetInfo
    | Look
    | JoinBranches
    | Recall
    | Pause
    | Resume
    | Profile
    | Corpus
    | ExpertRecord
    | Shutdown
)


def _ignore_beat(step: int) -> None:
    """No client watches."""


def _ignore_report(report: Info) -> None:
    """It is not read."""


class Hooks(Struct, kw_only=True):
    """What the process around the loop wants to hear."""

    heartbeat: Callable[[int], None] = _ignore_beat
    """Called every turn with the number of steps settled."""
    report: Callable[[Info], None] = _ignore_report
    """Called every few seconds while there is work: `Control.info` and the throughput since the last time."""
    problem: Callable[[str], None] = logging.getLogger(__name__).warning
    """Called with a sentence about something that went wrong and was handled."""
    profile: Callable[[Profile], Info] | None = None
    """Starts or stops a profile; returns what to tell about it, or raises `BoughError`."""
    corpus: Callable[[Corpus], Info] | None = None
    """Adds, removes or lists texts to draft from; returns what to tell about it, or raises `BoughError`."""
    experts: Callable[[ExpertRecord], Info] | None = None
    """Counts tokens by expert; returns what to tell about it."""
    extra_info: Callable[[], Info] | None = None
    """More for `GetInfo`: what the process knows and the loop does not."""


class Control:
    """Answers control messages and holds the states they lead to."""

    def __init__(
        self, queues: Queues, cache: PrefixCache, hooks: Hooks, *, report_every_s: float, report_every_steps: int = 0
    ) -> None:
        """`report_every_steps`: report by steps instead of seconds; 0: by seconds."""
        self.paused = False
        self.stop_by_s: float | None = None
        """Set while shutting down: when to give up on what still runs."""
        self._queues = queues
        self._cache = cache
        self._hooks = hooks
        self._every_s = report_every_s
        self._every_steps = report_every_steps
        self._reported_s = 0.0
        self._reported = (0, 0, 0, 0, 0)

    def handle(self, message: ControlMessage, *, now: float) -> None:
        """Does what the message says; the reply goes out with the queues' mail."""
        match message:
            case AbortByName(call, rid, reason):
                ended = abort_all(
                    self._queues, self._cache, Aborted(what=reason),
                    now=now, rid=rid, tenant=message.tenant, worker=message.worker,
                )  # fmt: skip
                self._reply(call, "", {"aborted": ended})
            case FlushCache():
                self._reply(message.call, *self._flush())
            case GetInfo():
                self._reply(message.call, "", self.info())
            case Look():
                self._reply(message.call, "", self._look(message, now))
            case JoinBranches() | Recall():
                self._reply(message.call, *self._join(message))
            case Pause():
                self._reply(message.call, "", self._pause(message, now))
            case Resume():
                self.paused = False
                self._reply(message.call, "", {})
            case Profile():
                self._reply(message.call, *self._profile(message))
            case Corpus():
                self._reply(message.call, *self._corpus(message))
            case ExpertRecord():
                self._reply(message.call, *self._experts(message))
            case Shutdown():
                self._queues.draining = True
                self.stop_by_s = now + message.drain_s

    def _reply(self, call: int, error: str, body: Info) -> None:
        self._queues.mail.put(Reply(call=call, error=error, body=body))

    def _join(self, message: JoinBranches | Recall) -> tuple[str, Info]:
        try:
            if isinstance(message, Recall):
                return "", recall(self._cache, message)
            return "", join(self._queues, self._cache, message)
        except BoughError as error:
            return error.sentence(), {}

    def _flush(self) -> tuple[str, Info]:
        live = self._queues.num_live
        if live:
            return f"the cache can't be flushed while {live} requests are running", {}
        if self._queues.media is not None:
            self._queues.media.store.clear()
        return "", {"pages_freed": self._cache.flush()}

    def _profile(self, message: Profile) -> tuple[str, Info]:
        if self._hooks.profile is None:
            return "this engine has no profiler", {}
        try:
            return "", self._hooks.profile(message)
        except BoughError as error:
            return error.sentence(), {}

    def _corpus(self, message: Corpus) -> tuple[str, Info]:
        if self._hooks.corpus is None:
            return "this engine makes no drafts that are looked up in texts", {}
        try:
            return "", self._hooks.corpus(message)
        except BoughError as error:
            return error.sentence(), {}

    def _experts(self, message: ExpertRecord) -> tuple[str, Info]:
        if self._hooks.experts is None:
            return "tokens are not counted by expert (--expert-distribution-recorder-mode stat)", {}
        return "", self._hooks.experts(message)

    def _pause(self, message: Pause, now: float) -> Info:
        queues, cache = self._queues, self._cache
        self.paused = True
        if message.mode == "abort":
            return {"aborted": abort_all(queues, cache, Aborted(what="the server was paused"), now=now)}
        if message.mode == "retract":
            rows: list[Prefilling | Running] = [*queues.prefilling.values(), *queues.running.values()]
            for row in rows:
                retract(queues, cache, row, dry=False)
            return {"retracted": len(rows)}
        return {"frozen": queues.num_live}

    def _look(self, message: Look, now: float) -> Info:
        picture = snapshot(
            self._queues,
            self._cache,
            max_spans=message.max_spans,
            max_rows=message.max_rows,
            span_tokens=message.span_tokens,
            now=now,
        )
        return {**self.info(), **structs.asdict(picture)}

    # -- telling ----------------------------------------------------------------------------------

    def info(self) -> Info:
        """Where the engine stands, as plain values."""
        queues, cache = self._queues, self._cache
        extra = self._hooks.extra_info() if self._hooks.extra_info is not None else {}
        return {
            "running": len(queues.running),
            "prefilling": len(queues.prefilling),
            "leaving": len(queues.leaving),
            "queued": len(queues.waiting),
            "queued_tokens": queues.waiting.num_tokens,
            "compiling": len(queues.compiling),
            "paused": self.paused,
            "draining": queues.draining,
            "pages": {
                "total": cache.total,
                "free": cache.pool.num_free,
                "cached": cache.num_cached,
                "evictable": cache.tree.num_evictable,
                "held": cache.num_held,
                "page_size": cache.page_size,
                "repairs": cache.num_repairs,
            },
            "token_usage": 1.0 - cache.num_available / cache.total,
            "cache_hit_rate": queues.hits.overall,
            "cache_hit_rate_recent": queues.hits.recent,
            "policy": effective(queues, cache, queues.limits),
            "output_ratio": queues.ratio.mean,
            "decode_step_ms": queues.cost.decode_ms,
            "prefill_token_ms": queues.cost.prefill_token_ms,
            "counters": structs.asdict(queues.counters),
            **extra,
        }

    def tell(self, *, now: float) -> None:
        """Reports throughput every few seconds or steps, if anything has happened."""
        passed = now - self._reported_s
        counters = self._queues.counters
        if self._every_steps:
            if counters.steps - self._reported[2] < self._every_steps:
                return
        elif passed < self._every_s:
            return
        numbers = (
            counters.output_tokens,
            counters.prompt_tokens,
            counters.steps,
            counters.decoded_rows,
            counters.accepted_tokens,
        )
        done = [new - old for new, old in zip(numbers, self._reported, strict=True)]
        self._reported_s, self._reported = now, numbers
        if done[2]:
            rates = {"output_tokens_per_s": done[0] / passed, "prompt_tokens_per_s": done[1] / passed}
            if self._queues.drafter is not None:
                rates["accept_length"] = 1.0 + done[4] / max(done[3], 1)
            self._hooks.report({**self.info(), **rates, "steps": done[2], "seconds": passed})
