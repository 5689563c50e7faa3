"""`bough replay FILE ...`: sends requests recorded by `--dump-dir` again, at the recorded rate or faster."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.cli.remote import Remote, add_arguments
from bough.config.command_line import CommandParser
from bough.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Line:
    """One recorded request."""

    time: float
    path: str
    status: int
    seconds: float
    body: dict[str, Any]


@dataclass(slots=True)
class ReplayResult:
    """Results of a replay."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Requests whose status has changed."""
    wall_s: float = 0.0


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough replay",
        description="Sends recorded requests again and compares how they went. Exit status 1: some status has changed.",
    )
    made.add_argument("files", metavar="FILE", nargs="+", help="a file that --dump-dir wrote, or its directory")
    add_arguments(made)
    made.add_argument("--speed", type=float, default=1.0, metavar="X",
                      help="1: as recorded; 10: ten times as fast; 0: at once")  # fmt: skip
    made.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="maximum number of concurrent requests (%(default)s)"
    )
    made.add_argument("--limit", type=int, default=0, metavar="N", help="send the first N requests only")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    lines = sorted(read(arguments.files), key=lambda line: line.time)
    lines = lines[: arguments.limit or None]
    if not lines:
        raise ConfigError(what="nothing was recorded there", fix="start the server with --dump-dir DIRECTORY")
    key = Remote(arguments.url, arguments.api_key).key
    outcome = asyncio.run(replay(lines, arguments.url, key, speed=arguments.speed, at_once=arguments.concurrency))
    print(report(lines, outcome))
    return 1 if outcome.changed else 0


def read(files: Sequence[str]) -> Iterator[Line]:
    """Every line of the files, or of the files in the directories. Raises `ConfigError`."""
    for name in files:
        path = Path(name).expanduser()
        found = sorted(path.glob("requests-*.jsonl")) if path.is_dir() else [path]
        for file in found:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    what=f"can't read {file}", why=str(error), fix="name a file that --dump-dir wrote"
                ) from error
            for number, line in enumerate(text.splitlines(), 1):
                yield _line(line, f"{file}:{number}")


def _line(text: str, where: str) -> Line:
    try:
        record = json.loads(text)
        return Line(
            time=float(record["time"]),
            path=str(record["path"]),
            status=int(record["status"]),
            seconds=float(record["seconds"]),
            body=dict(record["body"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            what=f"{where} is no recorded request",
            why=f"{type(error).__name__}: {error}",
            fix="name a file that a server with --dump-dir wrote",
        ) from error


async def replay(lines: Sequence[Line], url: str, key: str, *, speed: float, at_once: int) -> ReplayResult:
    """Sends every line once."""
    import httpx

    outcome = ReplayResult()
    gate = asyncio.Semaphore(max(1, at_once))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)

    async def one(client: httpx.AsyncClient, line: Line) -> None:
        async with gate:
            began = time.monotonic()
            try:
                status = (await client.post(line.path, json=line.body)).status_code
            except httpx.HTTPError:
                status = 0
            outcome.statuses[status] += 1
            outcome.seconds.append(time.monotonic() - began)
            if status != line.status and line.status:
                outcome.changed.append(f"{line.path}: {line.status} then, {status or 'no answer'} now")

    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:
        began = time.monotonic()
        tasks = []
        for line in lines:
            if speed > 0:
                due = (line.time - lines[0].time) / speed
                await asyncio.sleep(max(0.0, due - (time.monotonic() - began)))
            tasks.append(asyncio.create_task(one(client, line)))
        await asyncio.gather(*tasks)
        outcome.wall_s = time.monotonic() - began
    return outcome


def report(lines: Sequence[Line], outcome: ReplayResult) -> str:
    """The report as text."""
    then, now = sorted(line.seconds for line in lines), sorted(outcome.seconds)
    rows = [
        f"{len(lines)} requests in {outcome.wall_s:.1f} s",
        "status   " + ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(outcome.statuses.items())),
        f"{'':9}{'recorded':>12}{'now':>12}",
    ]
    for name, at in (("median", 0.5), ("p99", 0.99)):
        rows.append(f"{name:<9}{_at(then, at):>10.3f} s{_at(now, at):>10.3f} s")
    rows.append(f"{'mean':<9}{statistics.fmean(then):>10.3f} s{statistics.fmean(now):>10.3f} s")
    if outcome.changed:
        rows.append(f"{len(outcome.changed)} went another way than when they were recorded:")
        rows += [f"  {each}" for each in outcome.changed[:10]]
    return "\n".join(rows)


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]
