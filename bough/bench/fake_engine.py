"""An engine without a model, for measuring everything around it: `python -m bough.bench.fake_engine DIRECTORY`.

Accepts the engine's messages and answers with them: one token per live request and tick, or, if the request does not
stream, all of them at once. The tokens are ordinary words of the vocabulary, so that detokenization has its usual cost.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from bough.config.hf import open_checkpoint
from bough.core.messages import (
    Abort,
    Began,
    End,
    FlushCache,
    Generate,
    GetInfo,
    Look,
    Pause,
    Profile,
    Reply,
    Resume,
    RowOutput,
    Shutdown,
    StopAt,
    ToEngine,
    Tokens,
    pack_ids,
)
from bough.engine.inbox import MessageSink
from bough.engine.outbox import open_outbox
from bough.ipc import EngineStatus, Inbox, Launch, run_child, write_status
from bough.observability.health import Heartbeat, State
from bough.platform.environment import prepare_environment

TICK_S = 0.004
CONTEXT = 8192
MAX_RUNNING = 4096
_WORDS = (1000, 9000)
"""Ids of generated tokens."""
_IDLE_S = 0.5


class _Answer:
    """An unfinished request."""

    __slots__ = ("ask", "began_s", "left", "made")

    def __init__(self, ask: Generate, began_s: float) -> None:
        self.ask = ask
        self.began_s = began_s
        self.left = max(1, ask.sampling.max_new_tokens)
        self.made = 0

    def end(self, now: float) -> End:
        return End(
            reason="length",
            prompt_tokens=len(self.ask.prompt) // 4,
            completion_tokens=self.made,
            decode_s=now - self.began_s,
        )


class FakeEngine:
    """Handles the engine's messages without an engine."""

    def __init__(self, inbox: Inbox[ToEngine], outbox: MessageSink, heartbeat: Heartbeat, tick_s: float) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._heartbeat = heartbeat
        self._tick_s = tick_s
        self._live: dict[int, _Answer] = {}
        self._steps = 0
        self._done = False
        words = np.random.default_rng(0).integers(*_WORDS, 65_536, dtype=np.int32)
        self._words = words

    def run(self) -> None:
        due = time.monotonic()
        while not self._done and not self._inbox.closed:
            now = time.monotonic()
            for message in self._inbox.drain(max(0.0, due - now) if self._live else _IDLE_S):
                self._take(message)
            now = time.monotonic()
            if self._live and now >= due:
                self._tick(now)
                due = max(due + self._tick_s, now)
            elif not self._live:
                due = now + self._tick_s
            self._heartbeat.beat(self._steps, State.READY, len(self._live), 0)

    def _take(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._begin(message)
            case Abort(id=which) | StopAt(id=which):
                answer = self._live.pop(which, None)
                if answer is not None:
                    end = answer.end(time.monotonic())
                    end.reason = "stop" if isinstance(message, StopAt) else "abort"
                    self._outbox.send(Tokens(ids=[which], counts=[0], tokens=b"", rows={0: RowOutput(end=end)}))
            case FlushCache(call=call) | GetInfo(call=call) | Pause(call=call) | Resume(call=call):
                self._outbox.send(Reply(call=call, body=self._info()))
            case Look(call=call) | Profile(call=call):
                self._outbox.send(Reply(call=call, error="this engine is not a real one"))
            case Shutdown():
                self._done = True
            case _:
                pass

    def _begin(self, ask: Generate) -> None:
        now = time.monotonic()
        self._outbox.send(Began(id=ask.id, rid=ask.rid, text=ask.text))
        answer = _Answer(ask, now)
        if ask.stream:
            self._live[ask.id] = answer
            return
        count = answer.left
        answer.made = count
        row = RowOutput(end=answer.end(now))
        self._outbox.send(Tokens(ids=[ask.id], counts=[count], tokens=pack_ids(self._words[:count]), rows={0: row}))

    def _tick(self, now: float) -> None:
        """One token for every request."""
        self._steps += 1
        ids = list(self._live)
        rows: dict[int, RowOutput] = {}
        for at, answer in enumerate(self._live.values()):
            answer.made += 1
            answer.left -= 1
            if not answer.left:
                rows[at] = RowOutput(end=answer.end(now))
        first = (self._steps * 7919) % (len(self._words) - MAX_RUNNING)
        tokens = pack_ids(self._words[first : first + len(ids)])
        for at in rows:
            del self._live[ids[at]]
        self._outbox.send(Tokens(ids=ids, counts=[1] * len(ids), tokens=tokens, rows=rows))

    def _info(self) -> dict[str, Any]:
        return {"running": len(self._live), "queued": 0, "prefilling": 0, "steps": self._steps}


def serve(launch: Launch, tick_s: float) -> None:
    model = launch.config.model
    checkpoint = open_checkpoint(
        model.model, revision=model.revision, load_format=model.load_format, overrides=model.json_model_override_args
    )
    engine = FakeEngine(
        Inbox(launch.endpoints.engine, ToEngine),
        open_outbox(launch),
        Heartbeat(launch.endpoints.heartbeat),
        tick_s,
    )
    facts = {
        "model": checkpoint.name,
        "context_length": CONTEXT,
        "vocab_size": checkpoint.vocab,
        "kv_tokens": CONTEXT * MAX_RUNNING,
        "page_size": 16,
        "max_running_requests": MAX_RUNNING,
        "eos_ids": list(checkpoint.eos_ids),
        "device": "none",
        "dtype": "none",
        "ranks": [],
    }
    write_status(launch.endpoints, EngineStatus(phase="ready", facts=facts))
    engine.run()


if __name__ == "__main__":
    prepare_environment()
    given = sys.argv[1:] if len(sys.argv) > 2 else [str(TICK_S), *sys.argv[1:]]
    title = given[3] if len(given) > 3 else "engine"  # one of several has a name
    sys.exit(run_child(title, given[1], lambda launch: serve(launch, float(given[0]))))
