"""The language against the plain OpenAI client: the same work on the same server, in one run.

    bough bench lang                                      # starts a server with the default model
    bough bench lang --base-url http://127.0.0.1:30000

Two workloads: `fork-join` (one context, several branches, their texts together, one answer over all) and `few-shot` (many
questions behind the same examples). The plain side sends everything at once with asyncio. Told for both: wall time, prompt
tokens computed, and the share found in the cache. Turns alternate, each on an empty cache; medians are told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import bough.lang as lang
from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.bench.http_stream import StreamingClient
from bough.bench.load import run_async
from bough.bench.prompts import Vocabulary
from bough.core.errors import BoughError, ConfigError

Json = dict[str, Any]
MIN_PREFILL_RATIO = {"fork-join": 2.0, "few-shot": 0.95}
"""Prompt tokens that the plain client computes for one of the language's. Requests that arrive together and begin alike
share their beginning on the server, whoever sends them; what only the language saves is computing branches again."""
NOISE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work there is. Lengths are tokens, more or less."""

    programs: int = 2
    branches: int = 16
    context_len: int = 256
    output_len: int = 64
    """Of each branch, and of the answer over all of them."""
    questions: int = 32
    examples_len: int = 768
    answer_len: int = 16
    own_len: int = 16
    """Of each branch's tip and of each question."""


class Server:
    """What is asked of the server beside generating: emptying its cache, and counting what it computed."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def flush(self) -> None:
        run_async(self._call("POST", "/flush_cache"))

    def counters(self) -> tuple[int, int]:
        """Prompt tokens computed and found in the cache, since the server's start. Raises `ConfigError`."""
        info = run_async(self._call("GET", "/server_info"))
        states = info.get("internal_states") if isinstance(info, dict) else None
        counters = states[0].get("counters") if states else (info.get("engine") or {}).get("counters")
        if not counters:
            raise ConfigError(
                what=f"{self.url} does not count its prompt tokens",
                why="/server_info of a bough server does",
                fix="name one with --base-url, or leave it out to have one started",
            )
        return int(counters["prompt_tokens"]), int(counters["cached_tokens"])

    def model(self) -> str:
        return str(run_async(self._call("GET", "/v1/models"))["data"][0]["id"])

    async def _call(self, method: str, path: str) -> Any:
        client = StreamingClient(self.url, self._headers)
        try:
            return await client.call(method, path)
        finally:
            client.close()


class Side(Protocol):
    """One way to do the work; both return the texts generated last, in order."""

    def fork_join(self, contexts: Sequence[str], tips: Sequence[str], new: int) -> list[str]: ...

    def few_shot(self, examples: str, questions: Sequence[str], new: int) -> list[str]: ...


JOINED = "\n\nTaken together, "


@lang.function
def _fork_join(s, context, tips, new):  # type: ignore[no-untyped-def]
    s += context
    branches = s.fork(len(tips))
    for branch, tip in zip(branches, tips, strict=True):
        branch += "\n\n" + tip + lang.gen("part", max_tokens=new)
    branches.join("concate_and_append")
    s += JOINED + lang.gen("whole", max_tokens=new)


@lang.function
def _few_shot(s, examples, question, new):  # type: ignore[no-untyped-def]
    s += examples
    s += "\n\n" + question + lang.gen("answer", max_tokens=new)


class Language:
    """The work as programs."""

    def __init__(self, server: Server) -> None:
        self.backend = lang.RuntimeEndpoint(server.url, api_key=server.key or None)
        self.joins: Counter[str] = Counter()
        """How branches were joined: by KV, or by text."""

    def fork_join(self, contexts: Sequence[str], tips: Sequence[str], new: int) -> list[str]:
        batch = [{"context": context, "tips": list(tips), "new": new} for context in contexts]
        states = _fork_join.run_batch(batch, backend=self.backend, temperature=0.0, ignore_eos=True)
        self.joins.update(state.get_meta_info("join")["kind"] for state in states)
        return [str(state["whole"]) for state in states]

    def few_shot(self, examples: str, questions: Sequence[str], new: int) -> list[str]:
        batch = [{"examples": examples, "question": question, "new": new} for question in questions]
        states = _few_shot.run_batch(batch, backend=self.backend, temperature=0.0, ignore_eos=True)
        return [str(state["answer"]) for state in states]


class PlainClient:
    """The work as a Python programmer writes it without the language: OpenAI's client and asyncio."""

    def __init__(self, server: Server) -> None:
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise ConfigError(
                what="bench lang compares with the openai client", why="it is not installed", fix="pip install openai"
            ) from error
        self._client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key or "none", max_retries=0)
        self._runner = asyncio.Runner()
        self._model = server.model()

    def fork_join(self, contexts: Sequence[str], tips: Sequence[str], new: int) -> list[str]:
        async def one(context: str) -> str:
            parts = await asyncio.gather(*(self._complete(f"{context}\n\n{tip}", new) for tip in tips))
            branches = "".join(f"\n\n{tip}{part}" for tip, part in zip(tips, parts, strict=True))
            return await self._complete(context + branches + JOINED, new)

        return self._gather([one(context) for context in contexts])

    def few_shot(self, examples: str, questions: Sequence[str], new: int) -> list[str]:
        return self._gather([self._complete(f"{examples}\n\n{question}", new) for question in questions])

    def _gather(self, work: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
        async def run() -> list[str]:
            return list(await asyncio.gather(*work))

        return self._runner.run(run())

    async def _complete(self, text: str, new: int) -> str:
        reply = await self._client.completions.create(
            model=self._model, prompt=text, max_tokens=new, temperature=0.0, extra_body={"ignore_eos": True}
        )
        return reply.choices[0].text


def texts(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Contexts, tips, examples and questions of about the wanted lengths."""
    rng = random.Random(seed)
    words = Vocabulary(tokenizer=None)
    return {
        "contexts": [words.random_text(sizes.context_len, rng) for _ in range(sizes.programs)],
        "tips": [f"Tip {n + 1}: {words.random_text(sizes.own_len, rng)}:" for n in range(sizes.branches)],
        "examples": words.random_text(sizes.examples_len, rng),
        "questions": [f"Q: {words.random_text(sizes.own_len, rng)}? A:" for _ in range(sizes.questions)],
    }


def compare(server: Server, sizes: Sizes, *, repeat: int, seed: int) -> dict[str, Json]:
    """Both workloads on both sides; `repeat` turns each, on an empty cache, one before them not counted."""
    made = texts(sizes, seed)
    language = Language(server)
    sides: dict[str, Side] = {"language": language, "plain": PlainClient(server)}
    workloads: dict[str, Callable[[Side], list[str]]] = {
        "fork-join": lambda side: side.fork_join(made["contexts"], made["tips"], sizes.output_len),
        "few-shot": lambda side: side.few_shot(made["examples"], made["questions"], sizes.answer_len),
    }
    report = {name: _turns(server, sides, work, repeat) for name, work in workloads.items()}
    report["fork-join"]["joins"] = dict(language.joins)
    return report


def _turns(server: Server, sides: dict[str, Side], work: Callable[[Side], list[str]], repeat: int) -> Json:
    taken: dict[str, list[Json]] = {name: [] for name in sides}
    answers: dict[str, list[str]] = {}
    for turn in range(repeat + 1):
        for name, side in sides.items():
            server.flush()
            computed, cached = server.counters()
            began = time.perf_counter()
            answers[name] = work(side)
            seconds = time.perf_counter() - began
            computed_after, cached_after = server.counters()
            if turn:
                taken[name].append(
                    {"seconds": seconds, "computed": computed_after - computed, "cached": cached_after - cached}
                )
    report: Json = {name: _median(runs) for name, runs in taken.items()}
    ours, plain = report["language"], report["plain"]
    equal = sum(a == b for a, b in zip(*answers.values(), strict=True))
    return {
        **report,
        "time_ratio": plain["seconds"] / ours["seconds"],
        "prefill_ratio": plain["computed"] / max(1, ours["computed"]),
        "equal_answers": equal,
        "answers": len(answers["plain"]),
    }


def _median(runs: Sequence[Json]) -> Json:
    told: Json = {name: statistics.median(run[name] for run in runs) for name in ("seconds", "computed", "cached")}
    told["hit_rate"] = told["cached"] / max(1, told["cached"] + told["computed"])
    told["spread_s"] = max(run["seconds"] for run in runs) - min(run["seconds"] for run in runs)
    return told


def show(report: dict[str, Json]) -> str:
    lines = [f"{'':<12}{'':<10}{'seconds':>9}{'prompt tokens computed':>24}{'cached':>9}"]
    for name, facts in report.items():
        for side in ("language", "plain"):
            row = facts[side]
            lines.append(
                f"{name if side == 'language' else '':<12}{side:<10}{row['seconds']:>9.2f}{row['computed']:>24,.0f}"
                f"{100 * row['hit_rate']:>8.1f}%"
            )
        lines.append(
            f"{'':<12}plain / language: time {facts['time_ratio']:.2f}, prompt tokens computed "
            f"{facts['prefill_ratio']:.2f}; {facts['equal_answers']} of {facts['answers']} answers equal"
        )
        if "joins" in facts:
            kinds = ", ".join(f"{count} by {kind}" for kind, count in facts["joins"].items())
            lines.append(f"{'':<12}joins: {kinds} (joined by KV, branches do not see each other, so answers differ)")
    return "\n".join(lines)


def shortfalls(report: dict[str, Json]) -> list[str]:
    """Where the language does not keep its promise: not slower, and fewer prompt tokens computed."""
    found = []
    for name, facts in report.items():
        if facts["time_ratio"] < 1 - NOISE:
            found.append(f"{name}: slower than the plain client ({facts['time_ratio']:.2f} of its speed)")
        if facts["prefill_ratio"] < MIN_PREFILL_RATIO[name]:
            found.append(f"{name}: the plain client computes {facts['prefill_ratio']:.2f} times the prompt tokens")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="bough bench lang",
        usage="bough bench lang [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--base-url", default="", metavar="URL", help="a bough server; default: start one")
    made.add_argument("--api-key", default="", metavar="KEY")
    for name, default in ((f.name, f.default) for f in Sizes.__dataclass_fields__.values()):
        made.add_argument(
            "--" + name.replace("_", "-"), type=int, default=default, metavar="N", help=f"(default: {default})"
        )
    made.add_argument("--repeat", type=int, default=3, metavar="N", help="turns of each (default: 3)")
    made.add_argument("--seed", type=int, default=1, help="of the texts (default: 1)")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    made.add_argument("--check", action="store_true",
                      help="fail unless the language is as fast, and computes half as much where it joins")  # fmt: skip
    return made


@contextlib.contextmanager
def _started(settings: Json) -> Iterator[lang.Runtime]:
    """A server of our own. What it prints goes to standard error: standard output is for the numbers."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        given: Json = {f"no_{name}" if value is False else name: value or True for name, value in settings.items()}
        runtime = lang.Runtime(**given)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    with runtime:
        yield runtime


def main() -> None:
    options, settings = parse_with_settings(parser(), sys.argv[1:])
    sizes = Sizes(**{name: max(1, vars(options)[name]) for name in Sizes.__dataclass_fields__})
    if options.base_url and settings:
        raise ConfigError(what="--base-url names a server that runs already", why=f"{', '.join(settings)} can't be set")
    if options.base_url:
        url = options.base_url.rstrip("/").removesuffix("/v1")
        report = compare(Server(url, options.api_key), sizes, repeat=options.repeat, seed=options.seed)
    else:
        with _started(settings) as runtime:
            server = Server(runtime.url, options.api_key)
            report = compare(server, sizes, repeat=options.repeat, seed=options.seed)
    print(json.dumps(report, indent=2) if options.json else show(report))
    if options.check and shortfalls(report):
        raise BoughError(what="; ".join(shortfalls(report)), why="the language promises not to be slower")


if __name__ == "__main__":
    main()
