"""Every part from the engine client to the detokenizer in one process, turned by hand: what a client sees of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from in_process import InProcess, Setup
from tiny import make_tiny
from tokenizers import AddedToken, Tokenizer as Library, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from bough.config.hf import open_checkpoint
from bough.core.grammar import Compiled, CompileFailed, Matcher
from bough.core.messages import Abort, Delta, Reply, StopAt, ToDetokenizer, ToEngine, unpack_ids
from bough.core.sampling import GrammarSpec
from bough.core.step import Launched, Mask, Outcome, Runner, Step
from bough.detokenizer.process import Answers
from bough.engine_client.client import EngineClient
from bough.engine_client.native import NativeAnswer, native_batch
from bough.engine_client.replicas import Replicas
from bough.engine_client.request import Request
from bough.engine_client.stream import DeltaStream, merge
from bough.grammar import Grammars, Settings, Vocabulary
from bough.grammar.matcher import TokenMatcher
from bough.grammar.queue import _Ready
from bough.layers.batch import Model
from bough.models.load import build_model
from bough.tokenizer import Tokenizer, load_tokenizer

VOCAB = 331
"""A few ids more than the tokenizer has."""
EOS = 2
_CORPUS = (
    'the answer is {"name": "Ann", "age": 12, "tags": ["red", "green"]} and the other one is not known. '
    "true false null certainly unknown 0123456789 naïve café 日本語 the end of the story is the beginning\n"
)


def save_tokenizer(folder: Path) -> None:
    """A byte-level vocabulary of 320 ids with a few dozen merges, as a checkpoint has it."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True) for text in ("<pad>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator([_CORPUS] * 4, trainer)
    library.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclass
class Family:
    """One architecture: the checkpoint, what transformers computes with it, and what this project does."""

    name: str
    theirs: PreTrainedModel
    ours: Model
    tokenizer: Tokenizer
    library: Library


def make_family(case: str, folder: Path) -> Family:
    theirs = make_tiny(case, folder, vocab_size=VOCAB)
    save_tokenizer(folder)
    ours = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    return Family(
        case, theirs, ours, load_tokenizer(str(folder)), Library.from_file(str(folder / "tokenizer.json"))
    )  # fmt: skip


class PatientGrammars:
    """A queue of grammars whose answers come after a fixed number of polls: what happens does not depend on the clock."""

    def __init__(self, grammars: Grammars, polls: int = 1) -> None:
        self.inner = grammars
        self.polls = polls
        self._ready: list[tuple[int, Compiled | CompileFailed]] = []

    def submit(self, request_id: int, spec: GrammarSpec) -> None:
        self.inner.submit(request_id, spec)
        give_up_s = time.monotonic() + 60
        while not (found := self.inner.poll()):
            assert time.monotonic() < give_up_s, "a grammar is never compiled"
            time.sleep(0.001)
        self._ready += [(self.polls, answer) for answer in found]

    def poll(self) -> list[Compiled | CompileFailed]:
        self._ready = [(left - 1, answer) for left, answer in self._ready]
        out = [answer for left, answer in self._ready if left < 0]
        self._ready = [(left, answer) for left, answer in self._ready if left >= 0]
        return out

    def fresh(self, spec: GrammarSpec) -> Matcher:
        """A matcher of a grammar that has been compiled, without what others have found out about its places."""
        ready, tools = self.inner._known((spec.kind, spec.source)), self.inner._tools
        assert isinstance(ready, _Ready)
        assert tools is not None
        return TokenMatcher(ready.automaton.matcher(), tools.vocabulary)

    def cancel(self, request_id: int) -> None:
        self._ready = [(left, answer) for left, answer in self._ready if answer.id != request_id]

    def look(self, matchers: Sequence[Matcher]) -> None:
        self.inner.look(matchers)


def grammars_for(tokenizer: Tokenizer, backend: str = "xgrammar") -> Grammars:
    settings = Settings(backend=backend)  # type: ignore[arg-type]
    return Grammars(settings, lambda: Vocabulary(tokenizer, VOCAB, tokenizer.eos_ids))


@dataclass
class Asked:
    """One answer that a client waits for."""

    fields: Mapping[str, Any]
    request: Request
    stream: DeltaStream
    deltas: list[Delta] = field(default_factory=list)
    given_up: bool = False
    aborted: bool = False

    @property
    def whole(self) -> Delta:
        return merge(self.deltas)

    def as_json(self, *, incremental: bool = False) -> list[dict[str, Any]]:
        """What `/generate` would send, one object a delta."""
        native = NativeAnswer(self.stream, self.request, incremental=incremental)
        return [native.add(delta) for delta in self.deltas]

    @property
    def done(self) -> bool:
        return self.given_up or (bool(self.deltas) and self.deltas[-1].end is not None)

    @property
    def complete(self) -> bool:
        """It has ended by itself, and its client knows all of it."""
        return self.done and not self.given_up and not self.cut

    @property
    def cut(self) -> bool:
        """It was aborted, or failed, before its own end."""
        end = self.whole.end
        return end is not None and end.reason in ("abort", "error")

    @property
    def prompt(self) -> list[int]:
        return [int(token) for token in self.stream.prompt]

    @property
    def output(self) -> list[int]:
        return [int(token) for token in unpack_ids(self.whole.tokens)] if self.deltas else []


class _Wire:
    """The channels: the loop's inbox and outbox, the engine client's outbox. The detokenizer's stops take `lag` turns."""

    closed = False

    def __init__(self, tokenizer: Tokenizer, lag: int) -> None:
        self.incoming: list[ToEngine] = []
        self.late: deque[list[StopAt]] = deque([[] for _ in range(lag)])
        self.answers = Answers(tokenizer)
        self.news: list[Delta] = []
        self.replies: list[Reply] = []

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, message: Any) -> None:
        """From the engine, or (`Generate`, `Abort`) from the engine client."""
        if isinstance(message, ToDetokenizer):
            self.answers.handle(message)
        else:
            self.incoming.append(message)

    def send_all(self, messages: Sequence[ToEngine]) -> None:
        self.incoming += messages

    def pump(self) -> None:
        home, stops = self.answers.take()
        self.late.append(stops)
        self.incoming += self.late.popleft()
        for message in home.get(0, []):
            if isinstance(message, Reply):
                self.replies.append(message)
            else:
                self.news += message.deltas


def _reasoning(request: Request, thinking: Mapping[str, Any] | None) -> Request:
    """The request of a model that reasons up to `end`, for `budget` tokens at most; a constraint holds from there on."""
    if thinking is None:
        return request
    sampling = request.sampling
    if sampling.grammar is not None:
        later = msgspec.structs.replace(sampling.grammar, after_reasoning=True)
        sampling = msgspec.structs.replace(sampling, grammar=later)
    return msgspec.structs.replace(
        request,
        sampling=sampling,
        reasoning_end=tuple(thinking["end"]),
        reasoning_forced=True,
        thinking_budget=thinking["budget"],
    )


Fault = tuple[Literal["launch", "after launch", "sample", "wait"], Literal["memory", "bug"]]
"""Where a step fails, and of what."""


class _Faulty:
    """A runner, some of whose launches go wrong."""

    def __init__(self, inner: Runner, faults: Mapping[int, Fault]) -> None:
        self.inner = inner
        self.faults = faults
        self.count = -1

    def launch(self, step: Step) -> Launched:
        self.count += 1
        where, what = self.faults.get(self.count, ("", ""))
        if where == "launch":
            raise _fault(what)
        launched = self.inner.launch(step)
        if where == "after launch":
            raise _fault(what)
        return _FaultyStep(launched, where, what) if where else launched

    def clear(self) -> None:
        self.inner.clear()


class _FaultyStep:
    def __init__(self, inner: Launched, where: str, what: str) -> None:
        self.inner = inner
        self.where = where
        self.what = what

    @property
    def step(self) -> Step:
        return self.inner.step

    @property
    def needs_masks(self) -> bool:
        return self.inner.needs_masks

    def sample(self, masks: Mask) -> None:
        if self.where == "sample":
            raise _fault(self.what)
        self.inner.sample(masks)

    def wait(self) -> Outcome:
        outcome = self.inner.wait()
        if self.where == "wait":
            raise _fault(self.what)
        return outcome


def _fault(what: str) -> Exception:
    return torch.OutOfMemoryError("made up") if what == "memory" else RuntimeError("made up")


class WholeEngine:
    """`ask` as a client of `Engine.generate` would; `turn` lets everything go on by one turn of the loop."""

    def __init__(
        self,
        family: Family,
        setup: Setup,
        *,
        grammars: Grammars | None = None,
        lag: int = 0,
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        self.family = family
        self.parts = InProcess(family.ours, VOCAB, setup)
        self.wire = _Wire(family.tokenizer, lag)
        self.parts.loop.inbox = self.parts.loop.outbox = self.wire
        if faults:
            self.parts.loop.runner = _Faulty(self.parts.loop.runner, faults)
        if grammars is not None:
            self.parts.queues.grammars = PatientGrammars(grammars)
        self.aio = asyncio.new_event_loop()
        self.engine_client = EngineClient(
            None,  # type: ignore[arg-type]
            tokenizer=family.tokenizer,
            context_length=setup.context_length,
            vocab_size=VOCAB,
        )
        self.engine_client._replicas = Replicas([self.wire], [], "prefix")  # type: ignore[list-item]
        self.asked: list[Asked] = []
        self._by_id: dict[int, Asked] = {}
        self._call = 10**9

    def close(self) -> None:
        if self.engine_client.tokenizers is not None:
            self.engine_client.tokenizers.close()
        self.aio.close()

    def ask(self, **fields: Any) -> list[Asked]:
        """Raises what the engine client refuses. `thinking` is what a chat template and a parser would add to the request,
        `follows` names a request without output that it goes on from."""
        native = {name: value for name, value in fields.items() if name not in ("thinking", "follows")}
        requests = [_reasoning(each, fields.get("thinking")) for each in native_batch(native).requests]
        requests = [msgspec.structs.replace(each, follows=fields.get("follows", "")) for each in requests]
        made = []
        streams_of = self.aio.run_until_complete(self.engine_client.submit_batch(requests))
        for request, streams in zip(requests, streams_of, strict=True):
            made += [Asked(fields, request, stream) for stream in streams]
        for each in made:
            self.asked.append(each)
            self._by_id[each.stream.id] = each
        return made

    def give_up(self, asked: Asked) -> None:
        """The client goes away."""
        if not asked.done:
            asked.given_up = True
            asked.stream.abort()

    def abort(self, asked: Asked) -> None:
        """The request is ended by its name; its client is told."""
        if not asked.done:
            asked.aborted = True
            self.wire.incoming.append(Abort(asked.stream.id, "aborted by request"))

    def call(self, make: Any) -> int:
        """Sends a control message; its reply will be in `wire.replies`."""
        self._call += 1
        self.wire.incoming.append(make(self._call))
        return self._call

    def turn(self) -> None:
        self.parts.loop.turn()
        self.wire.pump()
        news, self.wire.news = self.wire.news, []
        for delta in news:
            asked = self._by_id.get(delta.id)
            if asked is not None and not asked.given_up:
                assert not asked.done, "news after the end"
                asked.deltas.append(delta)
        self.engine_client._hear(news)

    def settle_down(self, most_turns: int = 4000) -> None:
        """Until everything that was asked has ended and nothing is in flight."""
        for _ in range(most_turns):
            quiet = self.parts.queues.idle and not self.parts.loop._in_flight and not self.wire.incoming
            if quiet and not any(self.wire.late) and all(each.done for each in self.asked):
                break
            self.turn()
        else:
            stuck = [each.stream.rid for each in self.asked if not each.done]
            raise AssertionError(f"no end after {most_turns} turns: {stuck}, {self.parts.loop.control.info()}")
        self.turn()

    def check_quiet(self) -> None:
        """With nothing running, all pages are free or cached, and a flush leaves them all free."""
        cache = self.parts.cache
        assert cache.num_repairs == 0, "the page account had to be repaired"
        assert cache.num_held == cache.num_kept
        assert cache.pool.num_free + cache.tree.num_cached + cache.num_kept == cache.total
        assert cache.tree.num_evictable == cache.tree.num_cached
        assert self.parts.queues.slots.num_free == self.parts.limits.num_slots
        assert not self.parts.queues.gates
        assert not self.parts.queues.forced
        assert not self.parts.queues.void
        assert not self.parts.queues.reporting
        assert not len(self.wire.answers)
        cache.flush()
        assert cache.pool.num_free == cache.total
