"""`bough profile`: records some steps of a running server with the torch profiler, and says what took the time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bough.cli.remote import Remote, add_arguments
from bough.config.command_line import CommandParser
from bough.core.errors import BoughError, NotFound


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough profile",
        description="Records a running server's steps. The trace is a file on the server, for chrome://tracing or Perfetto.",
        epilog="The server must have been started with --admin-api-key, and be busy: an idle one has no steps.",
    )
    add_arguments(made)
    made.add_argument("--steps", type=int, default=50, metavar="N", help="steps to record (%(default)s)")
    made.add_argument("--seconds", type=float, default=30.0, metavar="S", help="wait for them at most (%(default)s)")
    made.add_argument("--name", default="", help="a directory for the trace, below the server's --profile-dir")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    remote = Remote(arguments.url, arguments.api_key, timeout_s=60.0)
    before = _steps(remote)
    try:
        remote.post("/start_profile", num_steps=arguments.steps, output_dir=arguments.name)
    except BoughError as error:
        if error.what.startswith("there is no"):
            raise NotFound(
                what="this server has no admin routes", why="it was started without --admin-api-key", fix="add it"
            ) from error
        raise
    print(f"recording {arguments.steps} steps ...")
    give_up = time.monotonic() + arguments.seconds
    while _steps(remote) - before < arguments.steps and time.monotonic() < give_up:
        time.sleep(0.2)
    summary = remote.post("/stop_profile")
    if summary["num_steps"] == 0:
        raise BoughError(
            what="no step was recorded", why="the server was idle", fix="send it requests while `bough profile` runs"
        )
    print(f"{summary['num_steps']} steps recorded in {summary['file']}\n")
    print(f"{'microseconds':>14}  {'calls':>7}  name")
    for row in summary["top"]:
        print(f"{row['microseconds']:>14,.0f}  {row['calls']:>7}  {row['name']}")
    return 0


def _steps(remote: Remote) -> int:
    info = remote.get("/server_info")
    steps: int = info["internal_states"][0]["counters"]["steps"]
    return steps
