"""Why a server has failed: which of its processes failed first, in an error that says what, why and what to do."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bough
from bough.config.concerns import Config
from bough.core.errors import BoughError
from bough.ipc import read_error
from bough.ipc.group import Group
from bough.launch.children import Child, how_it_ended
from bough.observability.crash import write_bundle
from bough.observability.flight import RecordedStep

_log = logging.getLogger(__name__)

STOPPED_S = 2.0
"""A rank that is stopped for this long is ended."""


def stopped(name: str) -> BoughError:
    """Of a rank that was ended because a signal had stopped it."""
    return BoughError(
        what=f"the {name} process was stopped (SIGSTOP) for {STOPPED_S:g} s and was ended",
        why="all other ranks wait for it",
        fix="start again, with --supervise to have that done",
    )


def stuck(name: str, timeout_s: float) -> BoughError:
    """Of a process that was ended because its heartbeat had not changed for `timeout_s`."""
    return BoughError(
        what=f"the {name} had not moved for {timeout_s:g} s and was ended",
        why="a step hangs, or the machine was stopped",
        fix="a larger --watchdog-timeout allows for slower steps; --safe-mode turns off custom kernels",
    )


def find_cause(dead: Child | None, children: Sequence[Child], group: Group | None) -> BoughError:
    """What failed first: a process that was killed, then what another machine reports, then the error of the process
    that left one first; if there is none, how `dead` ended."""
    killed = [child for child in children if not child.alive and child.process.returncode < 0]
    if killed and not killed[0].endpoints.error(killed[0].name).exists():
        return how_it_ended(killed[0])
    broken = None if group is None else group.look()
    if broken is not None:
        return broken
    reports = []
    for number, child in enumerate(children):
        with contextlib.suppress(OSError):
            reports.append((child.endpoints.error(child.name).stat().st_mtime_ns, number))
    for _, number in sorted(reports):
        error = read_error(children[number].endpoints, children[number].name)
        if error is not None:
            return error
    assert dead is not None, "the group or a process has failed"
    return how_it_ended(dead)


def write_crash_bundle(
    config: Config,
    facts: Mapping[str, Any],
    dead: Child | None,
    children: Sequence[Child],
    error: BoughError,
    steps: list[RecordedStep],
) -> None:
    """Writes what is known of a crash to `--crash-dir`: the error, the last steps, and the stacks of all processes."""
    stacks = {}
    for child in children:
        with contextlib.suppress(OSError):
            stacks[child.name] = child.endpoints.fault(child.name).read_text(errors="replace")
    try:
        path = write_bundle(
            Path(config.log.crash_dir).expanduser(), process=dead.name if dead else "", error=error, steps=steps,
            config=config, facts=facts, stacks=stacks, version=bough.__version__,
        )  # fmt: skip
        _log.error("what is known of the crash is in %s", path)
    except OSError as problem:
        _log.error("the crash bundle could not be written: %s", problem)
