"""One process of a server: how it is started, how it is ended, and what is known of how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bough.config.check import is_loopback
from bough.config.concerns import Config
from bough.core.errors import BoughError
from bough.ipc import Endpoints
from bough.ipc.link import split_address
from bough.observability.json_lines import JsonPipe

KILL_AFTER_S = 2.0
"""From SIGTERM to SIGKILL."""
_LAST_LINES_S = 0.5
"""Time for the last lines of a child's log, once it has ended."""


@dataclass(frozen=True, slots=True)
class Programs:
    """What the children run, as arguments of the interpreter; the private directory follows."""

    engine: tuple[str, ...] = ("-m", "bough.engine")
    detokenizer: tuple[str, ...] = ("-m", "bough.detokenizer")
    api: tuple[str, ...] = ("-m", "bough.entrypoints.http")


class Child:
    """A process of ours. `replica`: the engine that it is part of, if it is; `endpoints`: where it leaves word."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        endpoints: Endpoints,
        replica: int | None = None,
        pipe: JsonPipe | None = None,
    ) -> None:
        """`pipe`: where it writes its log, if that is not this process's stderr."""
        self.name = name
        self.process = process
        self.endpoints = endpoints
        self.replica = replica
        self.pipe = pipe

    @property
    def is_first_rank(self) -> bool:
        return self.name.startswith("engine")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """To the process and whatever it started."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def spawn(
    name: str,
    arguments: Sequence[str],
    config: Config,
    endpoints: Endpoints,
    *,
    inherited: Sequence[int],
    replica: int | None = None,
) -> Child:
    """Starts a child in a process group of its own. `inherited`: file descriptors that stay open in it."""
    pipe = JsonPipe(name) if config.log.log_format == "json" else None
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2 if pipe is None else pipe.fileno(),
            stderr=None if pipe is None else pipe.fileno(),
            pass_fds=inherited,
            process_group=0,
            env=_environment(config),
        )
    finally:
        if pipe is not None:
            pipe.handed_over()
    return Child(name, process, endpoints, replica, pipe)


def _environment(config: Config) -> dict[str, str]:
    """This process's, with the package findable whatever the working directory."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    parallel = config.parallel
    if parallel.nnodes > 1 and is_loopback(split_address(parallel.dist_init_addr)[0]):
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen where the host's name leads
    return found


def end(children: Sequence[Child], deadline_s: Callable[[], float]) -> None:
    """Waits until the deadline (which may move), then asks, then kills."""
    try:
        while any(child.alive for child in children) and time.monotonic() < deadline_s():
            time.sleep(0.01)
        for child in children:
            child.signal(signal.SIGTERM)
        wait(children, KILL_AFTER_S)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
            child.process.wait()
            if child.pipe is not None:
                child.pipe.join(_LAST_LINES_S)


def wait(children: Sequence[Child], patience_s: float) -> None:
    """Returns when all have ended, or after `patience_s`."""
    give_up_s = time.monotonic() + patience_s
    while any(child.alive for child in children) and time.monotonic() < give_up_s:
        time.sleep(0.01)


def how_it_ended(dead: Child) -> BoughError:
    """An error that says with which status or signal a child ended."""
    code = dead.process.returncode
    name = f"the {dead.name} process"
    if code is None or code >= 0:
        return BoughError(
            what=f"{name} ended with status {code}",
            why="it left no reason behind",
            fix="see the lines above; start again with --log-level debug for more",
        )
    try:
        signal_name = signal.Signals(-code).name
    except ValueError:
        signal_name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return BoughError(
            what=f"{name} was killed (SIGKILL)",
            why="a user or a program killed it, or the system ran out of memory (see `dmesg`)",
            fix="if memory was short, use a smaller --mem-fraction-static, --context-length or model",
        )
    stack = ""
    with contextlib.suppress(OSError):
        stack = dead.endpoints.fault(dead.name).read_text(errors="replace")[:4000]
    error = BoughError(
        what=f"{name} crashed ({signal_name})",
        why="native code failed" + (f": {stack.splitlines()[0]}" if stack else ""),
        fix="try --safe-mode, which turns off custom kernels, graphs and overlap, and report the crash",
    )
    if stack:
        error.add_note(stack)
    return error
