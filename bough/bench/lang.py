"""The language against the plain OpenAI client: the same work on the same server, in one run.

    bough bench lang                                      # starts a server with the default model
    bough bench lang --base-url http://127.0.0.1:30000 --check
    bough bench lang --only tree-of-thought,judge

Five programs: `fork-join` (one context, several branches, their texts together, one answer over all), `tree-of-thought`
(thoughts about one context, rated, the best kept), `judge` (remarks from several sides, a verdict on each),
`few-shot-choices` (questions behind the same examples, answered by the likeliest of given choices) and `few-shot`
(answered in the model's words). The plain side sends everything at once with asyncio. Reported for both: wall time, prompt
tokens computed, and the share found in the cache. Turns alternate, each on an empty cache; medians are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import bough.lang as lang
from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.bench.http_stream import StreamingClient
from bough.bench.lang_programs import LangSizes, Language, PlainClient, Side, Texts, make_texts
from bough.bench.load import run_async
from bough.config.command_line import CommandParser
from bough.core.errors import BoughError, ConfigError

Json = dict[str, Any]


class LangWorkload(Protocol):
    """One of the programs, for either side."""

    def __call__(self, side: Side, texts: Texts, sizes: LangSizes) -> list[str]: ...


WORK: dict[str, LangWorkload] = {
    "fork-join": lambda side, texts, sizes: side.fork_join(texts, sizes),
    "tree-of-thought": lambda side, texts, sizes: side.tree_of_thought(texts, sizes),
    "judge": lambda side, texts, sizes: side.judge(texts, sizes),
    "few-shot-choices": lambda side, texts, sizes: side.few_shot_choices(texts, sizes),
    "few-shot": lambda side, texts, sizes: side.few_shot(texts, sizes),
}
MIN_PREFILL_RATIO = {**dict.fromkeys(WORK, 2.0), "few-shot": 0.95}
"""Minimum ratio of the prompt tokens that the plain client and the language have computed. The server shares a common
prefix of requests that arrive together for any client: in `few-shot` there is nothing more to save."""
NOISE = 0.05
"""Relative measurement error of a run."""


class Server:
    """The server's other calls: emptying its cache, and reading how much it computed."""

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


def compare(server: Server, sizes: LangSizes, *, repeat: int, seed: int, only: Sequence[str] = ()) -> dict[str, Json]:
    """Every program on both sides; `repeat` turns each, on an empty cache, one before them not counted."""
    texts = make_texts(sizes, seed)
    language = Language(server.url, server.key)
    sides: dict[str, Side] = {"language": language, "plain": PlainClient(server.url, server.key, server.model())}
    report = {}
    for name, work in WORK.items():
        if name in only or not only:
            report[name] = _turns(server, sides, partial(work, texts=texts, sizes=sizes), repeat)
    if "fork-join" in report:
        report["fork-join"]["joins"] = dict(language.joins)
    return report


def _turns(server: Server, sides: dict[str, Side], work: Callable[[Side], list[str]], repeat: int) -> Json:
    taken: dict[str, list[Json]] = {name: [] for name in sides}
    answers: dict[str, list[str]] = {}
    for turn in range(repeat + 1):
        for name in sorted(sides, reverse=bool(turn % 2)):
            run, answers[name] = _turn(server, sides[name], work)
            if turn:
                taken[name].append(run)
    report: Json = {name: _median(runs) for name, runs in taken.items()}
    by_turn = zip(taken["plain"], taken["language"], strict=True)
    return {
        **report,
        "time_ratio": statistics.median(plain["seconds"] / ours["seconds"] for plain, ours in by_turn),
        "prefill_ratio": report["plain"]["computed"] / max(1, report["language"]["computed"]),
        "equal_answers": sum(a == b for a, b in zip(*answers.values(), strict=True)),
        "answers": len(answers["plain"]),
    }


def _turn(server: Server, side: Side, work: Callable[[Side], list[str]]) -> tuple[Json, list[str]]:
    server.flush()
    computed, cached = server.counters()
    began = time.perf_counter()
    answers = work(side)
    seconds = time.perf_counter() - began
    computed_after, cached_after = server.counters()
    return {"seconds": seconds, "computed": computed_after - computed, "cached": cached_after - cached}, answers


def _median(runs: Sequence[Json]) -> Json:
    summary: Json = {name: statistics.median(run[name] for run in runs) for name in ("seconds", "computed", "cached")}
    summary["hit_rate"] = summary["cached"] / max(1, summary["cached"] + summary["computed"])
    summary["spread_s"] = max(run["seconds"] for run in runs) - min(run["seconds"] for run in runs)
    return summary


def show(report: dict[str, Json]) -> str:
    lines = [f"{'':<18}{'':<10}{'seconds':>9}{'prompt tokens computed':>24}{'cached':>9}"]
    for name, facts in report.items():
        for side in ("language", "plain"):
            row = facts[side]
            lines.append(
                f"{name if side == 'language' else '':<18}{side:<10}{row['seconds']:>9.2f}{row['computed']:>24,.0f}"
                f"{100 * row['hit_rate']:>8.1f}%"
            )
        lines.append(
            f"{'':<18}plain / language: time {facts['time_ratio']:.2f}, prompt tokens computed "
            f"{facts['prefill_ratio']:.2f}; {facts['equal_answers']} of {facts['answers']} answers equal"
        )
        if "joins" in facts:
            kinds = ", ".join(f"{count} by {kind}" for kind, count in facts["joins"].items())
            lines.append(f"{'':<18}joins: {kinds} (joined by KV, branches do not see each other, so answers differ)")
    return "\n".join(lines)


def shortfalls(report: dict[str, Json]) -> list[str]:
    """Cases in which the language is slower, or does not compute fewer prompt tokens."""
    found = []
    for name, facts in report.items():
        if facts["time_ratio"] < 1 - NOISE:
            found.append(f"{name}: slower than the plain client ({facts['time_ratio']:.2f} of its speed)")
        if facts["prefill_ratio"] < MIN_PREFILL_RATIO[name]:
            found.append(f"{name}: the plain client computes {facts['prefill_ratio']:.2f} times the prompt tokens")
    return found


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench lang",
        usage="bough bench lang [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--base-url", "--url", default="", metavar="URL", help="a bough server; default: start one")
    made.add_argument("--api-key", default="", metavar="KEY")
    for name, default in ((f.name, f.default) for f in LangSizes.__dataclass_fields__.values()):
        made.add_argument(
            "--" + name.replace("_", "-"), type=int, default=default, metavar="N", help=f"(default: {default})"
        )
    made.add_argument("--only", default="", metavar="NAMES", help=f"some of {', '.join(WORK)}, with commas between")
    made.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    made.add_argument("--seed", type=int, default=1, help="seed of the texts (default: 1)")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    made.add_argument("--check", action="store_true",
                      help="fail unless the language is as fast, and computes half as much where it can save")  # fmt: skip
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
    only = [name for name in options.only.split(",") if name]
    for name in only:
        if name not in WORK:
            raise ConfigError(
                what=f"--only names {name!r}", why=f"there are: {', '.join(WORK)}", fix="name some of these"
            )
    sizes = LangSizes(**{name: max(1, vars(options)[name]) for name in LangSizes.__dataclass_fields__})
    if options.base_url and settings:
        raise ConfigError(what="--base-url names a server that runs already", why=f"{', '.join(settings)} can't be set")
    if options.base_url:
        url = options.base_url.rstrip("/").removesuffix("/v1")
        report = compare(Server(url, options.api_key), sizes, repeat=options.repeat, seed=options.seed, only=only)
    else:
        with _started(settings) as runtime:
            server = Server(runtime.url, options.api_key)
            report = compare(server, sizes, repeat=options.repeat, seed=options.seed, only=only)
    print(json.dumps(report, indent=2) if options.json else show(report))
    if options.check and shortfalls(report):
        raise BoughError(what="; ".join(shortfalls(report)), why="the language promises not to be slower")


if __name__ == "__main__":
    main()
