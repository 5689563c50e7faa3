"""`bough profile`: records some steps of a running server with the torch profiler, and says what took the time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from bough.cli.remote import Remote, add_arguments
from bough.core.errors import BoughError, NotFound


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bough profile",
        description="Records a running server's steps. The trace is a file on the server, for chrome://tracing or Perfetto.",
        epilog="The server must have been started with --admin-api-key, and be busy: an idle one has no steps.",
    )
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=50, help="steps to record (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="wait for them at most (%(default)s)")
    parser.add_argument("--name", default="", help="a directory for the trace, below the server's --profile-dir")
    arguments = parser.parse_args(list(argv))
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
    told = remote.post("/stop_profile")
    print(f"{told['num_steps']} steps recorded in {told['file']}\n")
    print(f"{'microseconds':>14}  {'calls':>7}  name")
    for row in told["top"]:
        print(f"{row['microseconds']:>14,.0f}  {row['calls']:>7}  {row['name']}")
    return 0


def _steps(remote: Remote) -> int:
    info = remote.get("/server_info")
    steps: int = info["internal_states"][0]["counters"]["steps"]
    return steps
