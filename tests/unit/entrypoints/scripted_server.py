"""An engine that answers from a script, behind a real engine client, a real application and a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers
import uvicorn.server
from tokenizers import decoders, models, pre_tokenizers

from bough.config.server_args import load_config
from bough.core.messages import (
    Abort,
    AbortByName,
    Corpus,
    Delta,
    End,
    ExpertRecord,
    FlushCache,
    Generate,
    GetInfo,
    Look,
    Pause,
    Profile,
    Recall,
    Reply,
    Resume,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from bough.engine_client import EngineClient
from bough.engine_client.replicas import Replicas
from bough.entrypoints.http.app import make_app
from bough.entrypoints.http.server import Front, HttpServer
from bough.entrypoints.http.sockets import bind
from bough.entrypoints.served_model import ServedModel
from bough.entrypoints.service import Service, make_admission
from bough.ipc.endpoints import Endpoints
from bough.observability.health import Beat, State
from bough.parsers import ResponseParser
from bough.tokenizer import ChatTemplate, Tokenizer
from bough.tokenizer.tokenizer import FastCodebook
from tests.waiting import until

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 256
CONTEXT = 4096
INFO: dict[str, Any] = {
    "fake": True, "running": 1, "prefilling": 1, "leaving": 0, "queued": 2, "queued_tokens": 30, "compiling": 0,
    "paused": False, "token_usage": 0.5, "cache_hit_rate": 0.25, "decode_step_ms": 2.0, "rows": [],
    "counters": {"accepted": 9, "finished": 5, "aborted": 1, "failed": 0, "retractions": 0, "steps": 70, "failed_steps": 0,
                 "oom_steps": 0, "prompt_tokens": 80, "cached_tokens": 20, "output_tokens": 60,
                 "draft_tokens": 0, "accepted_tokens": 0, "accepted_at": []},
    "pages": {"total": 100, "free": 40, "cached": 20, "evictable": 10, "held": 50, "page_size": 16, "repairs": 0},
}  # fmt: skip
"""What the engine says about itself."""


def byte_tokenizer(template: str | None = CHATML) -> Tokenizer:
    """Token i is byte i; then the special tokens of ChatML."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=dict(_byte_vocabulary()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    chat = ChatTemplate(template, {"eos_token": "<|im_end|>"}) if template else None
    return Tokenizer(codebook=FastCodebook(tokenizer), eos_id=EOS, eos_ids=(EOS,), chat_template=chat)


@functools.cache
def _byte_vocabulary() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte, and the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = [ord(letter) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {chr(code): code if code in printable else others[code - 256] for code in codes}


def _end_at_once() -> None:
    """uvicorn looks every 0.1 s whether it should end, and then waits 0.1 s more; hundreds of tests start a server."""
    quick = types.SimpleNamespace(**vars(asyncio))
    quick.sleep = lambda pause_s: asyncio.sleep(min(pause_s, 0.01))
    uvicorn.server.asyncio = quick  # type: ignore[assignment]


_end_at_once()

Script = Callable[[Generate, str], "Answer"]


@dataclass
class Answer:
    """What the engine says to one request."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", " there", "."])
    reason: str = "stop"
    matched: int | str | None = EOS
    delay_s: float = 0.0
    """Between pieces."""
    end: End | None = None
    """Instead of an end made from the above."""
    held: threading.Event | None = None
    """Nothing is said before it is set."""


def endless() -> Answer:
    """For longer than any test waits."""
    return Answer(pieces=["x"] * 100_000, delay_s=0.01)


def wait_until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Until it is true, in whichever thread that happens."""
    assert until(condition, within_s, 0.01), "it does not happen"


@dataclass
class FakeEngine:
    """Stands where the engine client's outbox was: gets its messages, delivers deltas."""

    engine_client: EngineClient
    script: Script
    seen: list[Generate] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    flush_error: str = ""
    picture: dict[str, Any] = field(default_factory=dict)
    """What `Look` gets."""
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def send_all(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self.send(message)

    def send(self, message: Any) -> None:
        match message:
            case Generate():
                self.seen.append(message)
                self._tasks[message.id] = asyncio.ensure_future(self._answer(message))
            case Abort(id=which):
                self.aborted.append(which)
                self._abort(which)
            case AbortByName(call=call, rid=rid, tenant=tenant):
                meant = [each for each in self.seen if not rid or each.rid == rid]
                named = [each.id for each in meant if each.id in self._tasks and tenant in (None, each.tenant)]
                live = [each for each in named if not self._tasks[each].done()]
                for each in live:
                    self.aborted.append(each)
                    self._abort(each)
                self.engine_client._calls[call].set_result(Reply(call=call, body={"aborted": len(live)}))
            case Corpus(call=call, corpus_id=name, tokens=tokens):
                counts = [(name, len(tokens) // 4)] if name else []
                self.engine_client._calls[call].set_result(Reply(call=call, body={"corpora": counts}))
            case FlushCache() | GetInfo() | Look() | Pause() | Resume() | Profile() | Recall() | ExpertRecord():
                self.calls.append(message)
                error = self.flush_error if isinstance(message, FlushCache) else ""
                body = INFO if isinstance(message, GetInfo) else {"fake": True}
                if isinstance(message, Look):
                    body = self.picture
                if isinstance(message, Recall):
                    error = "nothing is kept here"
                reply = Reply(call=message.call, error=error, body=dict(body))
                self.engine_client._calls[message.call].set_result(reply)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _deliver(self, delta: Delta) -> None:
        self.engine_client._hear([delta])

    def _abort(self, which: int) -> None:
        task = self._tasks.pop(which, None)
        if task is not None and not task.done():
            task.cancel()
            self._deliver(
                Delta(id=which, end=End(reason="abort", message="aborted by request", status=499, code="aborted"))
            )

    async def _answer(self, message: Generate) -> None:
        if message.pool:
            values = np.linspace(1.0, 0.5, 4, dtype="<f4").tobytes()
            end = End(reason="stop", prompt_tokens=len(message.prompt) // 4)
            self._deliver(Delta(id=message.id, embedding=values, end=end))
            return
        tokenizer = self.engine_client.tokenizer
        prompt = tokenizer.decode(unpack_ids(message.prompt).tolist(), False) if tokenizer else ""
        answer = self.script(message, prompt)
        parser = _parser(message)
        made = 0
        prompt_scores = self._prompt_scores(message)
        while answer.held is not None and not answer.held.is_set():
            await asyncio.sleep(0.005)
        nothing = message.sampling.max_new_tokens == 0
        for piece in [] if nothing else answer.pieces:
            await asyncio.sleep(answer.delay_s)
            ids = tokenizer.encode(piece, add_special_tokens=False) if tokenizer else [1]
            made += len(ids)
            self._deliver(
                Delta(
                    id=message.id,
                    text=piece,
                    tokens=pack_ids(ids),
                    events=parser.feed(piece) if parser else [],
                    logprobs=self._scores(message, ids),
                    prompt_logprobs=prompt_scores,
                )
            )
            prompt_scores = None
        end = answer.end or End(reason=answer.reason, matched=answer.matched)  # type: ignore[arg-type]
        if nothing:
            end = End(reason="length")
        end.prompt_tokens, end.completion_tokens = len(message.prompt) // 4, made
        end.cached_tokens = 2
        self._deliver(
            Delta(
                id=message.id,
                events=parser.finish() if parser else [],
                end=end,
                logprobs=self._scores(message, [72]) if nothing else None,
                prompt_logprobs=prompt_scores,
            )
        )

    def _scores(self, message: Generate, ids: list[int]) -> TokenLogprobs | None:
        return self._score(message, ids, [-0.5] * len(ids)) if message.logprobs is not None else None

    def _prompt_scores(self, message: Generate) -> TokenLogprobs | None:
        if message.logprobs is None or message.logprobs.start < 0:
            return None
        ids = unpack_ids(message.prompt).tolist()
        start = message.logprobs.start
        return self._score(message, ids[start:], [None, *[-1.5] * (len(ids) - 1)][start:])

    def _score(self, message: Generate, ids: list[int], logprobs: list[float | None]) -> TokenLogprobs:
        tokenizer, spec = self.engine_client.tokenizer, message.logprobs
        assert tokenizer is not None
        assert spec is not None
        text = message.text is not None and message.text.logprob_text
        top = [[(each, -0.5 - rank) for rank in range(spec.top)] if score is not None else []
               for each, score in zip(ids, logprobs, strict=True)]  # fmt: skip
        return TokenLogprobs(
            token_ids=ids,
            logprobs=logprobs,
            top=top if spec.top else [],
            text=[tokenizer.token_text(each) for each in ids] if text else [],
            chosen=[[(wanted, -1.0) for wanted in spec.token_ids] for _ in ids] if spec.token_ids else [],
            top_text=[[tokenizer.token_text(each) + "'" * rank for rank, (each, _) in enumerate(row)] for row in top]
            if text and spec.top
            else [],
        )


def _parser(message: Generate) -> ResponseParser | None:
    spec = message.text
    if spec is None or not (spec.reasoning_parser or spec.tool_parser):
        return None
    numbers = iter(range(10**6))
    return ResponseParser.of(spec, new_id=lambda *_: f"call_{next(numbers)}")


class FakePulse:
    """A heartbeat that says what it is told."""

    def __init__(self) -> None:
        self.beat = Beat(steps=1, age_s=0.1, state=State.READY, num_running=1, num_waiting=2, pid=0)

    def read(self) -> Beat:
        return self.beat


class FakeServer:
    """A whole HTTP server in a thread. `url` works while the context lasts."""

    def __init__(
        self,
        script: Script,
        *,
        template: str | None = CHATML,
        served: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        **given: Any,
    ):
        """`facts`: what the engine says about its model, besides its sizes."""
        self.config = load_config(given, environ={}).config
        self.pulse = FakePulse()
        self.url = ""
        self.engine: FakeEngine
        self.service: Service
        self._script = script
        self._template = template
        self._served = served or {}
        self._facts = facts or {}
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop

    def __enter__(self) -> FakeServer:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(lambda: self._server.stop(now=True))
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        tokenizer = None if self.config.model.skip_tokenizer_init else byte_tokenizer(self._template)
        facts = {"context_length": CONTEXT, "vocab_size": 258, "eos_ids": [EOS], "max_running_requests": 4,
                 "architecture": "FakeForCausalLM", **self._facts}  # fmt: skip
        admission = make_admission(self.config, facts)
        truncate = self.config.server.allow_auto_truncate
        engine_client = EngineClient.from_facts(
            Endpoints("/nonexistent"), facts, tokenizer, gate=admission, truncate=truncate
        )
        self.engine = FakeEngine(engine_client, self._script)
        engine_client._replicas = Replicas([self.engine], [], "prefix")  # type: ignore[list-item]
        served = ServedModel(
            name="fake", aliases=frozenset({"default", "org/fake"}), tokenizer=tokenizer, context_length=CONTEXT,
            facts=facts, **self._served,
        )  # fmt: skip
        self.service = Service(self.config, served, engine_client, self.pulse, admission)  # type: ignore[arg-type]
        front = Front()
        front.open(make_app(self.service))
        sock = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._server = HttpServer(front, [sock], client_timeout_s=self.config.server.client_timeout_s)
        running = asyncio.ensure_future(self._server.run())
        await self._server.started()
        self._ready.set()
        await running
        self.engine.close()


@contextlib.contextmanager
def serving(script: Script | Answer | None = None, **given: Any) -> Iterator[FakeServer]:
    """A running server whose engine follows `script` (or always gives the same answer)."""
    if script is None:
        script = Answer()
    fixed = script
    follow: Script = (lambda *_: fixed) if isinstance(fixed, Answer) else fixed
    with FakeServer(follow, **given) as server:
        yield server
