"""A stand-in for the engine process: speaks its messages and echoes prompts backwards, one token a turn.

A prompt that begins with SLOW takes 20 ms a token and does not end by itself; one that begins with BAD fails.
FAKE_ENGINE=fail|crash|loading in the environment makes it fail at start, crash, or never get ready.
"""

from __future__ import annotations

import os
import sys
import time

from bough.core.errors import ConfigError
from bough.core.messages import (
    Abort,
    Began,
    End,
    FlushCache,
    Generate,
    GetInfo,
    Pause,
    Profile,
    Reply,
    Resume,
    RowOutput,
    Shutdown,
    StopAt,
    ToEngine,
    TokenLogprobs,
    Tokens,
    pack_ids,
    unpack_ids,
)
from bough.engine.outbox import open_outbox
from bough.ipc import EngineStatus, Inbox, Launch, run_child, write_status
from bough.observability.health import Heartbeat, State

SLOW, BAD = 7, 8
VOCAB, CONTEXT = 49_152, 256


class Row:
    def __init__(self, ask: Generate) -> None:
        self.ask = ask
        self.prompt = unpack_ids(ask.prompt).tolist()
        self.output: list[int] = []
        self.sent = 0

    @property
    def slow(self) -> bool:
        return self.prompt[0] == SLOW

    def step(self) -> End | None:
        if self.slow and len(self.output) >= 100_000:
            return self.end("length")
        if len(self.output) >= self.ask.sampling.max_new_tokens and not self.slow:
            return self.end("length")
        token = self.prompt[-1 - len(self.output) % len(self.prompt)]
        self.output.append(token)
        if token in (*self.ask.eos_ids, *self.ask.sampling.stop_token_ids) and not self.slow:
            return self.end("stop", token)
        if len(self.output) >= self.ask.sampling.max_new_tokens and not self.slow:
            return self.end("length")
        return None

    def end(self, reason: str, matched: int | None = None, **more: object) -> End:
        return End(
            reason=reason,
            matched=matched,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.output),
            cached_tokens=1,
            **more,
        )  # type: ignore[arg-type]

    def news(self, end: End | None) -> tuple[list[int], RowOutput | None]:
        new = self.output[self.sent :]
        self.sent = len(self.output)
        spec = self.ask.logprobs
        if spec is None:
            return new, RowOutput(end=end) if end else None
        scores = TokenLogprobs(new, [-0.5] * len(new), top=[[(t, -0.5)] * spec.top for t in new] if spec.top else [])
        prompt = None
        if end is not None and spec.start >= 0:
            ids = self.prompt[spec.start :]
            prompt = TokenLogprobs(ids, [None if spec.start + i == 0 else -1.0 for i in range(len(ids))])
        return new, RowOutput(end=end, logprobs=scores, prompt_logprobs=prompt)


class FakeEngine:
    def __init__(self, launch: Launch) -> None:
        self.inbox: Inbox[ToEngine] = Inbox(launch.endpoints.engine, ToEngine)
        self.out = open_outbox(launch)
        self.heart = Heartbeat(launch.endpoints.heartbeat)
        self.rows: dict[int, Row] = {}
        self.seen = {"generate": 0, "abort": 0, "stop_at": 0, "sent": 0}
        self.last: dict[str, object] = {}
        self.stop_by = float("inf")
        self.turns = 0

    def run(self) -> None:
        while True:
            busy = any(not row.slow for row in self.rows.values())
            for message in self.inbox.drain(block_s=0.0 if busy else 0.02):
                self.take(message)
            if self.stop_by < float("inf") and (not self.rows or time.monotonic() >= self.stop_by):
                for row in list(self.rows.values()):
                    self.send([(row, row.end("abort", message="shutting down", status=503))])
                return
            self.turns += 1
            self.heart.beat(self.turns, State.READY, len(self.rows))
            done = [(row, row.step()) for row in self.rows.values()]
            self.send([(row, end) for row, end in done if row.ask.stream or end is not None])

    def send(self, rows: list[tuple[Row, End | None]]) -> None:
        if not rows:
            return
        ids, counts, tokens, extras = [], [], [], {}
        for place, (row, end) in enumerate(rows):
            new, extra = row.news(end)
            ids.append(row.ask.id)
            counts.append(len(new))
            tokens += new
            if extra is not None:
                extras[place] = extra
            if end is not None:
                del self.rows[row.ask.id]
        self.seen["sent"] += 1
        self.out.send(Tokens(ids=ids, counts=counts, tokens=pack_ids(tokens), rows=extras))

    def take(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self.seen["generate"] += 1
                self.last = {
                    "rid": message.rid,
                    "stream": message.stream,
                    "seed": message.sampling.seed,
                    "n": message.sampling.n,
                    "max_new_tokens": message.sampling.max_new_tokens,
                    "min_new_tokens": message.sampling.min_new_tokens,
                    "eos_ids": list(message.eos_ids),
                    "namespace": message.namespace,
                    "bad_words": [list(word) for word in message.sampling.bad_words],
                    "text": message.text is not None,
                }
                self.out.send(Began(id=message.id, rid=message.rid, text=message.text))
                row = self.rows[message.id] = Row(message)
                if row.prompt[0] == BAD:
                    self.send([(row, row.end("error", message="bad luck", status=500, code="request_failed"))])
            case Abort(request_id, reason):
                self.seen["abort"] += 1
                self.finish(request_id, "abort", message=reason, status=499)
            case StopAt(request_id):
                self.seen["stop_at"] += 1
                self.finish(request_id, "stop")
            case FlushCache(call):
                error = "requests are running" if self.rows else ""
                self.out.send(Reply(call=call, error=error, body={"flushed": True}))
            case GetInfo(call):
                self.out.send(Reply(call=call, body={**self.seen, "live": len(self.rows), "last": self.last}))
            case Shutdown(drain_s):
                self.stop_by = time.monotonic() + drain_s
            case Pause(call) | Resume(call):
                self.out.send(Reply(call=call, body={"paused": isinstance(message, Pause)}))
            case Profile():
                pass  # never answers

    def finish(self, request_id: int, reason: str, **more: object) -> None:
        row = self.rows.get(request_id)
        if row is not None:
            self.send([(row, row.end(reason, **more))])


def body(launch: Launch) -> None:
    mode = os.environ.get("FAKE_ENGINE", "")
    write_status(launch.endpoints, EngineStatus(phase="loading", detail="reading nothing", progress=0.5))
    if mode == "fail":
        raise ConfigError(what="the model is made of cheese", why="it was asked to be", fix="unset FAKE_ENGINE")
    if mode == "bug":
        raise ZeroDivisionError("by zero")
    if mode == "crash":
        import ctypes

        ctypes.string_at(0)
    if mode == "loading":
        time.sleep(600)
    engine = FakeEngine(launch)
    facts = {"context_length": CONTEXT, "vocab_size": VOCAB, "kv_tokens": 1000, "eos_ids": [2], "model": "fake"}
    write_status(launch.endpoints, EngineStatus(phase="ready", facts=facts))
    engine.run()


if __name__ == "__main__":
    sys.exit(run_child("engine", sys.argv[1], body))
