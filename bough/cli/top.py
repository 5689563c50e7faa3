"""`bough top`: shows a running server in the terminal: running and waiting requests, memory and speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bough.cli.remote import Remote, add_arguments
from bough.config.command_line import CommandParser
from bough.core.errors import Forbidden

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDE = 100
"""Minimum terminal width for long bars and ids. Everything fits into 80 columns."""
_BAR, _LONG_BAR = 12, 24
_ID, _LONG_ID = 12, 34


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough top",
        description="Watches a running server. Ctrl-C ends it.",
        epilog="The list of requests needs the admin key where the server has one.",
    )
    add_arguments(made)
    made.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (%(default)s)")
    made.add_argument("--once", action="store_true", help="print the current state once and exit")
    made.add_argument("--rows", type=int, default=20, metavar="N", help="requests shown at most (%(default)s)")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    watcher = Watcher(Remote(arguments.url, arguments.api_key, timeout_s=5.0), arguments.rows)
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if arguments.once:
        console.print(watcher.look(console.width))
        return 0
    with Live(watcher.look(console.width), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(max(0.1, arguments.interval))
            live.update(watcher.look(console.width), refresh=True)


class Watcher:
    """Queries the server and renders the result."""

    def __init__(self, remote: Remote, most_rows: int) -> None:
        self._remote = remote
        self._most_rows = most_rows
        self._sections = "core,memory,queues,requests"

    def look(self, width: int) -> RenderableType:
        """The current view for a terminal of `width` columns. Raises `BoughError` if the server does not answer."""
        try:
            report = self._remote.get("/v1/loads", include=self._sections)
        except Forbidden:
            self._sections = "core,memory,queues"
            report = self._remote.get("/v1/loads", include=self._sections)
        return picture(report, url=self._remote.url, most_rows=self._most_rows, width=width)


def picture(report: dict[str, Any], *, url: str, most_rows: int, width: int = 120) -> RenderableType:
    """The answer of /v1/loads, drawn for a terminal of `width` columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    load = report["loads"][0]
    state = "paused" if load["paused"] else "running" if load["num_running_reqs"] else "idle"
    style = "bold green" if state == "running" else "bold"
    head = Text.assemble(
        ("bough top", "bold"), f"  {report['model']}  {url}  {report['version']}  ", (state, style), overflow="fold"
    )
    length = _LONG_BAR if width >= _WIDE else _BAR
    numbers = Table.grid(padding=(0, 2))
    for _ in range(3):
        numbers.add_column(justify="left", no_wrap=True)
    numbers.add_column(justify="left")  # on a narrow terminal this column wraps and no other is cut
    most = load["max_running_requests"]
    tokens = f"{load['num_used_tokens']:,} of {load['max_total_num_tokens']:,} tokens"
    queues, totals = load["queues"], load["totals"]
    step_ms = 1e3 * load["decode_step_seconds"]
    for name, value, drawn, more in (
        ("running", f"{load['num_running_reqs']} of {most}", load["utilization"], f"{queues['prefilling']} in prefill"),
        ("queued", load["num_waiting_reqs"], None,
         f"{load['num_waiting_tokens']:,} prompt tokens, {queues['refused']} refused so far"),
        ("KV", f"{100 * load['token_usage']:.1f} %", load["token_usage"], tokens),
        ("cache", f"{100 * load['cache_hit_rate']:.1f} %", load["cache_hit_rate"],
         f"{load['num_cached_tokens']:,} tokens kept"),
        ("speed", f"{load['gen_throughput']:,.0f} tok/s", None,
         f"{load['prompt_throughput']:,.0f} prompt tok/s, {step_ms:.1f} ms a decode step"),
        ("so far", f"{totals['requests']:,} requests", None,
         f"{totals['generation_tokens']:,} tokens, {totals['retractions']} retracted, {totals['oom']} out of memory"),
        *_drafts(load.get("speculative", {})),
    ):  # fmt: skip
        numbers.add_row(name, str(value), bar(drawn, length) if drawn is not None else "", more)
    parts: list[RenderableType] = [head, Text(), numbers]
    if "requests" in report:
        parts += [Text(), requests_table(report["requests"], most_rows, width)]
    return Group(*parts)


def _drafts(counts: dict[str, Any]) -> list[tuple[str, str, float | None, str]]:
    """The line about speculative decoding, if there were drafts."""
    if not counts.get("draft_tokens"):
        return []
    rate = counts["accepted_tokens"] / counts["draft_tokens"]
    more = f"{counts['accepted_tokens']:,} of {counts['draft_tokens']:,} drafts right so far"
    return [("drafts", f"{counts['accept_length']:.2f} tok/step", rate, more)]


def bar(share: float, length: int) -> str:
    """A bar of `length` characters, filled to a share between 0 and 1."""
    filled = round(length * min(max(share, 0.0), 1.0))
    return "█" * filled + "░" * (length - filled)


def requests_table(rows: list[dict[str, Any]], most: int, width: int) -> RenderableType:
    """Requests one by one, at most `most` of them."""
    from rich.table import Table

    id_length = _LONG_ID if width >= _WIDE else _ID
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("request", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "cached", "shared", "out", "limit", "s", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:most]:
        pace = row["output_tokens"] / row["seconds"] if row["seconds"] > 0 else 0.0
        table.add_row(
            str(row.get("rid") or "-")[:id_length], row["phase"], f"{row['prompt_tokens']:,}", f"{row['cached_tokens']:,}",
            f"{row['shared_tokens']:,}", f"{row['output_tokens']:,}", f"{row['output_limit']:,}", f"{row['seconds']:.1f}",
            f"{pace:.1f}",
        )  # fmt: skip
    if len(rows) > most:
        table.add_row(f"+ {len(rows) - most} more", *[""] * 8)
    return table
