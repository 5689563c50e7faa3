"""Random mixed workloads for a whole engine, each from one number, and the judgement of everything they bring about."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from by_the_book import Book, Pages, Params, fits
from in_process import Setup
from whole_engine import EOS, VOCAB, Asked, Family, Fault, PatientGrammars, WholeEngine

from bough.core.errors import BoughError
from bough.core.grammar import Matcher
from bough.core.messages import FlushCache, Pause, Resume
from bough.core.sampling import GrammarSpec
from bough.engine_client.sampling import parse_sampling
from bough.grammar import Grammars

SCHEMAS = [
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"enum": ["the answer", "the other one", 12]},
    {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["red", "green", "naïve"]}, "maxItems": 2},
            "note": {"type": "string", "maxLength": 5},
            "of": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"const": "the end"}}}]},
        },
        "required": ["note"],
    },
    {"type": "number", "minimum": -3.5, "maximum": 120},
]
REGEXES = ["The answer is [a-f]{2,5}, certainly[.!]", "(ab|cd)+x?", "[0-9]{1,3}-[0-9]{2} the end", "a{3}",
           "(the |then |there ){1,4}end", ".{0,6}", "[^a-z]{2}(true|truth|false)"]  # fmt: skip
CHOICES = [["the first of them", "the second", "the"], ["yes", "no"], ["naïve café", "naïve"]]
WORDS = ["the", "answer", "is", "not", "known", "café", "日本", "story", "12", "{", "true", "end", "\n"]


@dataclass
class Event:
    """Something that happens before a turn."""

    turn: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Workload:
    """A way of running the engine and what its clients do. Plain values: it can be printed, cut down and run again."""

    seed: int
    setup: Setup
    lag: int
    grammar_backend: str
    events: list[Event]
    faults: dict[int, Fault] = field(default_factory=dict)
    """By the number of the launch."""


def make_setup(rng: random.Random) -> Setup:
    page_size = rng.choice([1, 2, 3, 4, 5, 8, 16])
    context = rng.choice([64, 96, 128])
    num_slots = rng.choice([1, 2, 3, 5, 8, 20])
    whole = num_slots * -(-context // page_size) + 1
    tokens = rng.choice([0, 16, 40, 64, 100, 160])
    num_pages = 0 if tokens == 0 else min(whole, -(-tokens // page_size) + 1)
    return Setup(
        page_size=page_size,
        chunk_tokens=rng.choice([3, 7, 16, 64, 512]),
        overlap=rng.random() < 0.7,
        radix_cache=rng.random() < 0.85,
        attention=rng.choice(["torch", "torch", "cpu"]),
        shared_spans=rng.random() < 0.5,
        num_pages=num_pages,
        context_length=context,
        policy=rng.choice(["fcfs", "auto", "lpm", "dfs-weight", "lof", "shortest-prefill-first"]),
        num_slots=num_slots,
        priority=rng.random() < 0.3,
        eviction=rng.choice(["lru", "lfu", "fifo", "mru", "priority"]),
        conservativeness=rng.choice([1.0, 0.3, 0.05]),
        drafts=rng.choice(["none", "ngram", "ngram", "adaptive"]),
    )


class Maker:
    """Draws requests that share prefixes."""

    def __init__(self, rng: random.Random, family: Family, setup: Setup) -> None:
        self.rng = rng
        self.encode = lambda text: family.library.encode(text, add_special_tokens=False).ids
        pages = Pages.of(setup, setup.num_pages or 10**6)
        self.room = min(pages.context_length, pages.capacity)
        self.roots = [self._ids(rng.randint(1, rng.choice([self.room // 2, self.room]))) for _ in range(3)]

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def prompt(self) -> list[int] | str:
        rng = self.rng
        if rng.random() < 0.2:
            text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 8)))
            if len(self.encode(text)) <= self.room:
                return text
        root = rng.choice(self.roots)
        ids = root[: rng.randint(0, len(root))] + self._ids(rng.choice([0, 0, 1, 2, 5]))
        ids = ids[: self.room - rng.choice([0, 1, 1])] or self._ids(1)
        if rng.random() < 0.4:
            self.roots[rng.randrange(3)] = ids
        return ids

    def request(self) -> dict[str, Any]:
        rng, prompt = self.rng, self.prompt()
        params = self._params(prompt)
        fields: dict[str, Any] = {"sampling_params": params, "stream": rng.random() < 0.6}
        fields["text" if isinstance(prompt, str) else "input_ids"] = prompt
        if rng.random() < 0.35:
            fields |= self._scores(prompt)
        if rng.random() < 0.12:
            fields["return_hidden_states"] = rng.choice([True, "last"])
        if rng.random() < 0.08 and not params.keys() & {"allowed_token_ids", "min_new_tokens", "bad_words"}:
            fields["thinking"] = self._thinking(prompt, params)
        if rng.random() < 0.3:
            fields["priority"] = rng.choice([-20, 0, 5, 30])
        if rng.random() < 0.15:
            fields["cache_salt"] = rng.choice(["x", "y"])
        if rng.random() < 0.15:
            fields["rid"] = f"r{rng.randrange(10**9)}"
        return fields

    def kept(self) -> dict[str, Any]:
        """A prompt that is only computed, under a name."""
        ids = self._ids(self.rng.randint(1, self.room // 2))
        params = {"max_new_tokens": 0, "temperature": 0.0}
        return {"input_ids": ids, "sampling_params": params, "rid": f"k{self.rng.randrange(10**9)}"}

    def _thinking(self, prompt: list[int] | str, params: dict[str, Any]) -> dict[str, Any]:
        """A mark that may have begun in the prompt, and that nothing else ends."""
        rng, stops = self.rng, params.get("stop_token_ids", [])
        mark = [token for token in self._ids(rng.choice([1, 2, 4])) if token not in stops] or [3 + (3 in stops)]
        if not isinstance(prompt, str) and rng.random() < 0.3:
            mark[0] = prompt[-1] if prompt[-1] not in stops else mark[0]
        return {"end": mark, "budget": rng.choice([-1, 0, 1, 3, 8])}

    def _scores(self, prompt: list[int] | str) -> dict[str, Any]:
        rng = self.rng
        fields: dict[str, Any] = {"return_logprob": True}
        if rng.random() < 0.5:
            fields["logprob_start_len"] = rng.choice([0, 0, 1, 2, rng.randint(0, len(prompt) + 1)])
        if rng.random() < 0.4:
            fields["top_logprobs_num"] = rng.choice([1, 3, 5])
        if rng.random() < 0.3:
            fields["token_ids_logprob"] = rng.sample(range(VOCAB), rng.randint(1, 3))
        if rng.random() < 0.25:
            fields["processed_logprobs"] = True
        return fields

    def _params(self, prompt: list[int] | str) -> dict[str, Any]:
        rng = self.rng
        length = len(prompt) if not isinstance(prompt, str) else len(self.encode(prompt))
        room = max(0, self.room - length)
        params: dict[str, Any] = {"max_new_tokens": min(room, rng.choice([0, 1, 2, 5, 9, 16, 24, 40, 60]))}
        if rng.random() < 0.75:
            params["temperature"] = 0.0
        else:
            params["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.7])
            if rng.random() < 0.8:
                params["sampling_seed"] = rng.choice([0, 7, -3, 2**63 - 1, rng.randrange(2**40)])
            if rng.random() < 0.4:
                params["top_k"] = rng.choice([1, 2, 10, 400])
            if rng.random() < 0.4:
                params["top_p"] = rng.choice([0.2, 0.7, 0.95])
            if rng.random() < 0.3:
                params["min_p"] = rng.choice([0.05, 0.3])
        if rng.random() < 0.15:
            params["n"] = rng.choice([2, 3])
        if rng.random() < 0.3:
            params["ignore_eos"] = True
        for name, values in (
            ("frequency_penalty", [0.5, -0.4, 2.0]),
            ("presence_penalty", [0.7, -0.3]),
            ("repetition_penalty", [1.3, 0.8, 2.0]),
        ):
            if rng.random() < 0.12:
                params[name] = rng.choice(values)
        if rng.random() < 0.12:
            params["logit_bias"] = {
                str(token): rng.choice([-100.0, -2.0, 1.5, 3.0])
                for token in {EOS, *rng.sample(range(VOCAB), 3)}
            }  # fmt: skip
        if rng.random() < 0.06:
            params["allowed_token_ids"] = rng.sample(range(3, VOCAB), 40)
        if rng.random() < 0.08:
            params["bad_words"] = rng.sample(["the", "a", "e", "the answer is", "known. true"], 2)
        self._ends(params)
        if rng.random() < 0.18 and "allowed_token_ids" not in params and "min_new_tokens" not in params:
            kind = rng.choice(["json_schema", "regex", "choice"])
            if kind == "json_schema":
                params[kind] = json.dumps(rng.choice(SCHEMAS))
            else:
                params[kind] = rng.choice(REGEXES if kind == "regex" else CHOICES)
            params.pop("bad_words", None)
        return params

    def _ends(self, params: dict[str, Any]) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.sample(range(3, VOCAB), rng.choice([1, 4, 20]))
        if rng.random() < 0.15:
            params["min_new_tokens"] = rng.randint(0, min(6, params["max_new_tokens"]))
        if rng.random() < 0.25:
            letters = rng.sample("etaoinshrdlu0123 {}\n.", rng.choice([1, 2, 5]))
            params["stop"] = [*letters, *rng.sample(["th", "an", "\ufffd", "the e"], 1)]
        if rng.random() < 0.12:
            params["stop_regex"] = [rng.choice(["[a-f][0-9]", "[A-Z]", "e.", "[0-9]+x?"])]
        if rng.random() < 0.15:
            params["no_stop_trim"] = True
        if rng.random() < 0.15:
            params["skip_special_tokens"] = False
        if rng.random() < 0.15:
            params["stream_interval"] = rng.choice([2, 5])


def make_workload(seed: int, family: Family) -> Workload:
    rng = random.Random(seed)
    setup = make_setup(rng)
    maker = Maker(rng, family, setup)
    events, turn = [], 0
    for _ in range(rng.choice([3, 6, 10, 16])):
        turn += rng.choice([0, 0, 0, 1, 2, 5, 12])
        chance = rng.random()
        if chance < 0.8:
            events.append(Event(turn, "ask", maker.request()))
        elif chance < 0.86:
            events.append(Event(turn, rng.choice(["abort", "give_up"]), {"which": rng.randrange(10**6)}))
        elif chance < 0.9:
            events.append(Event(turn, "flush"))
        elif chance < 0.94:
            mode = rng.choice(["retract", "retract", "in_place"])
            events.append(Event(turn, "pause", {"mode": mode}))
            turn += rng.randint(0, 4)
            events.append(Event(turn, "resume"))
        elif chance < 0.955:
            kept = maker.kept()
            events.append(Event(turn, "ask", kept))
            for _ in range(rng.choice([1, 2])):
                turn += rng.choice([0, 2, 6])
                events.append(Event(turn, "ask", _following(rng, kept, maker.request())))
        elif chance < 0.975:
            events.append(Event(turn, "again", {"which": rng.randrange(10**6)}))
        else:
            where = {"which": rng.randrange(10**6), "offset": rng.choice([0, 0, 1, -1, 3])}
            events.append(Event(turn, "go on", where | {"ask": maker.request()}))
    backend = rng.choice(["xgrammar", "xgrammar", "llguidance"])
    return Workload(seed, setup, rng.choice([0, 0, 1, 3]), backend, events, _faults(rng))


def _following(rng: random.Random, kept: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The request, but its prompt goes on from the kept one."""
    prompt = kept["input_ids"] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([0, 1, 3]))]
    fields = {name: value for name, value in request.items() if name not in ("text", "cache_salt", "rid")}
    params = {**request["sampling_params"], "max_new_tokens": min(8, request["sampling_params"]["max_new_tokens"])}
    params["min_new_tokens"] = min(params.get("min_new_tokens", 0), params["max_new_tokens"])
    return {**fields, "input_ids": prompt, "sampling_params": params, "follows": kept["rid"]}


def _faults(rng: random.Random) -> dict[int, Fault]:
    """Seldom; never three in a row, after which an engine gives up."""
    faults: dict[int, Fault] = {}
    if rng.random() < 0.15:
        for launch in range(rng.randint(1, 5), 200, rng.choice([3, 17, 60])):
            where = rng.choice(["launch", "after launch", "sample", "wait"])
            faults[launch] = (where, rng.choice(["memory", "memory", "bug"]))  # type: ignore[assignment]
    return faults


@dataclass
class Result:
    """What a workload was like, for those who count."""

    answers: int = 0
    features: Counter[str] = field(default_factory=Counter)


def run(workload: Workload, family: Family, book: Book, grammars: dict[str, Grammars]) -> Result:
    """Runs a workload and checks every answer against the book, and the account of pages at the end."""
    queue = grammars[workload.grammar_backend]
    engine = WholeEngine(family, workload.setup, grammars=queue, lag=workload.lag, faults=workload.faults)
    result = Result()
    try:
        _drive(workload, engine, result)
        engine.settle_down()
        _judge(workload, engine, book, result)
        engine.check_quiet()
    finally:
        engine.close()
    return result


def _drive(workload: Workload, engine: WholeEngine, result: Result) -> None:
    now = 0
    for event in workload.events:
        while now < event.turn:
            engine.turn()
            now += 1
        live = [asked for asked in engine.asked if not asked.done]
        match event.kind:
            case "ask":
                _ask(engine, event.fields, result)
            case "again" if engine.asked:
                past = engine.asked[event.fields["which"] % len(engine.asked)]
                _ask(engine, {name: value for name, value in past.fields.items() if name != "rid"}, result)
            case "go on":
                _go_on(engine, event.fields, result)
            case "abort" if live:
                engine.abort(live[event.fields["which"] % len(live)])
            case "give_up" if live:
                engine.give_up(live[event.fields["which"] % len(live)])
            case "flush":
                engine.call(FlushCache)
            case "pause":
                engine.call(lambda call, mode=event.fields["mode"]: Pause(call, mode))
            case "resume":
                engine.call(Resume)
            case _:
                pass
        result.features[event.kind] += 1


def _ask(engine: WholeEngine, fields: dict[str, Any], result: Result) -> None:
    try:
        engine.ask(**fields)
    except BoughError as error:
        raise AssertionError(f"refused: {error.sentence()}: {fields}") from error
    result.features.update(fields["sampling_params"].keys())
    result.features.update(name for name in fields if name != "sampling_params")


def _go_on(engine: WholeEngine, where: dict[str, Any], result: Result) -> None:
    """A session's next request: after one that has ended, or the first."""
    sessions = engine.engine_client.sessions
    if not len(sessions):
        sessions.open("s")
    past = [each for each in engine.asked if "session_params" in each.fields and each.complete]
    fields = {**where["ask"], "rid": f"s{len(engine.asked)}", "session_params": {"id": "s"}}
    fields["sampling_params"] = {**fields["sampling_params"], "n": 1}
    before: list[int] = []
    if past:
        last = past[where["which"] % len(past)]
        before = last.prompt + last.output
        fields["session_params"]["rid"] = last.stream.rid
        offset = where["offset"]
        if offset and -len(before) < offset <= len(before):
            fields["session_params"]["offset"] = offset
            before = before[:offset]
    own = fields.get("input_ids") or engine.family.library.encode(fields["text"], add_special_tokens=False).ids
    prompt = before + own
    capacity = engine.parts.loop.limits.capacity_tokens
    room = min(engine.parts.limits.context_length, capacity) - len(prompt)
    if room < 0:
        return
    most = min(fields["sampling_params"]["max_new_tokens"], room)
    fields["sampling_params"]["max_new_tokens"] = most
    least = fields["sampling_params"].get("min_new_tokens", 0)
    fields["sampling_params"]["min_new_tokens"] = min(least, most)
    _ask(engine, fields, result)
    assert engine.asked[-1].prompt == prompt, "the session goes on from something else"


def _judge(workload: Workload, engine: WholeEngine, book: Book, result: Result) -> None:
    pages = Pages.of(workload.setup, engine.parts.limits.num_pages)
    result.features["retractions"] += engine.parts.queues.counters.retractions
    result.features["failed steps"] += engine.parts.queues.counters.failed_steps
    result.features["forced tokens"] += engine.parts.queues.counters.forced_tokens
    for name, value in asdict(workload.setup).items():
        result.features[f"{name}={value}"] += 1
    for asked in engine.asked:
        if asked.given_up:
            continue
        params = Params(**asked.fields["sampling_params"])
        matcher = _matcher(engine, asked) if params.constrained else None
        try:
            book.check(asked, asked.stream.index, pages, matcher, may_fail=bool(workload.faults))
            end = asked.whole.end
            assert end is not None
            result.features["cached_tokens > 0"] += end.cached_tokens > 0
            result.features[f"end {end.reason} {type(end.matched).__name__}"] += 1
            ends_early = params.stop or params.stop_regex or params.stop_token_ids or "thinking" in asked.fields
            if params.constrained and not ends_early:
                whole = end.reason == "stop"
                assert fits(params, asked.whole.text, whole=whole), f"{asked.whole.text!r} does not fit"
        except AssertionError as error:
            said = f"{error}\nrequest: {asked.fields}\nprompt: {asked.prompt}\noutput: {asked.output}\n"
            raise AssertionError(f"{said}end: {asked.whole.end}") from error
        result.answers += 1


def _matcher(engine: WholeEngine, asked: Asked) -> Matcher:
    """A fresh matcher for the request's grammar, which shares nothing with others' but the automaton."""
    spec: GrammarSpec | None = parse_sampling(asked.fields["sampling_params"]).params.grammar
    queue = engine.parts.queues.grammars
    assert spec is not None
    assert isinstance(queue, PatientGrammars)
    return queue.fresh(spec)
