"""`bough top`: a running server, live in the terminal: what runs, what waits, how full the memory is, how fast it goes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bough.cli.remote import Remote, add_arguments
from bough.core.errors import Forbidden

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 24


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bough top",
        description="Watches a running server. Ctrl-C ends it.",
        epilog="The list of requests needs the admin key where the server has one.",
    )
    add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (%(default)s)")
    parser.add_argument("--once", action="store_true", help="look once, print, and end")
    parser.add_argument("--rows", type=int, default=20, help="requests shown at most (%(default)s)")
    arguments = parser.parse_args(list(argv))
    watcher = Watcher(Remote(arguments.url, arguments.api_key, timeout_s=5.0), arguments.rows)
    from rich.console import Console
    from rich.live import Live

    if arguments.once:
        Console().print(watcher.look())
        return 0
    with Live(watcher.look(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(max(0.1, arguments.interval))
            live.update(watcher.look(), refresh=True)


class Watcher:
    """Asks the server and draws what it says."""

    def __init__(self, remote: Remote, most_rows: int) -> None:
        self._remote = remote
        self._most_rows = most_rows
        self._sections = "core,memory,queues,requests"

    def look(self) -> RenderableType:
        """One picture. Raises `BoughError` where the server does not answer."""
        try:
            told = self._remote.get("/v1/loads", include=self._sections)
        except Forbidden:
            self._sections = "core,memory,queues"
            told = self._remote.get("/v1/loads", include=self._sections)
        return picture(told, url=self._remote.url, most_rows=self._most_rows)


def picture(told: dict[str, Any], *, url: str, most_rows: int) -> RenderableType:
    """The answer of /v1/loads, drawn."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    load = told["loads"][0]
    state = "paused" if load["paused"] else "running" if load["num_running_reqs"] else "idle"
    style = "bold green" if state == "running" else "bold"
    head = Text.assemble(
        ("bough top", "bold"), f"  {told['model']}  {url}  {told['version']}  ", (state, style), overflow="fold"
    )
    numbers = Table.grid(padding=(0, 2))
    for _ in range(3):
        numbers.add_column(justify="left", no_wrap=True)
    numbers.add_column(justify="left")  # where there is little room, this one wraps and no other is cut
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
    ):  # fmt: skip
        numbers.add_row(name, str(value), bar(drawn) if drawn is not None else "", more)
    parts: list[RenderableType] = [head, Text(), numbers]
    if "requests" in told:
        parts += [Text(), requests_table(told["requests"], most_rows)]
    return Group(*parts)


def bar(share: float) -> str:
    filled = round(_BAR * min(max(share, 0.0), 1.0))
    return "█" * filled + "░" * (_BAR - filled)


def requests_table(rows: list[dict[str, Any]], most: int) -> RenderableType:
    """Requests one by one."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("request", "phase"):
        table.add_column(name, no_wrap=True, max_width=34)
    for name in ("prompt", "cached", "shared", "out", "limit", "seconds", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:most]:
        pace = row["output_tokens"] / row["seconds"] if row["seconds"] > 0 else 0.0
        table.add_row(
            str(row.get("rid") or "-")[:34], row["phase"], f"{row['prompt_tokens']:,}", f"{row['cached_tokens']:,}",
            f"{row['shared_tokens']:,}", f"{row['output_tokens']:,}", f"{row['output_limit']:,}", f"{row['seconds']:.1f}",
            f"{pace:.1f}",
        )  # fmt: skip
    if len(rows) > most:
        table.add_row(f"and {len(rows) - most} more", *[""] * 8)
    return table
