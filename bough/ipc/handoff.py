"""Files of the private directory: what a process is started with, how far the engine has come, why a process failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from bough.config.concerns import Config
from bough.config.hf import Checkpoint, pack_checkpoint, unpack_checkpoint
from bough.core import errors
from bough.core.errors import BoughError, ConfigError
from bough.ipc.endpoints import Endpoints
from bough.platform.whole_file import write_whole

_LAUNCH: Final = "launch.json"
_CHECKPOINT: Final = "checkpoint.msgpack"

Phase = Literal["starting", "loading", "ready", "draining", "failed"]


class Launch(Struct, frozen=True, kw_only=True):
    """What every process of a server is started with."""

    config: Config
    directory: str
    """Of this process's engine, where there are several..."""
    home: str = ""
    """...and of the server; empty: the same."""
    replica: int = 0
    """Number of the engine, where there are several..."""
    scheduler: int = 0
    """...and of the scheduler that this process works for: an engine with replicas of attention has as many."""
    meeting_directory: str = ""
    """Where the engine's ranks on this machine meet; empty: in `directory`."""
    parent_pid: int
    lifeline_fd: int = -1
    """Read end of a pipe that closes when the parent ends; -1: none."""
    die_with_parent_thread: bool = False
    """The starting thread lives as long as the parent, so that the kernel's death signal may be used."""
    listen_fds: tuple[int, ...] = ()
    """Listening sockets that API workers inherit."""
    num_api_workers: int = 1
    generation: int = 0
    """Number of this start of the group of ranks, by which messages from ranks of an earlier start are recognised."""

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(self.directory)

    @property
    def server(self) -> Endpoints:
        """Of the whole server: the detokenizer, the API workers, and what all engines share."""
        return Endpoints(self.home or self.directory)

    @property
    def meeting(self) -> str:
        """Where this machine's ranks meet the others."""
        parallel = self.config.parallel
        place = Endpoints(self.meeting_directory or self.directory)
        return place.meeting if parallel.node_rank == 0 else parallel.dist_init_addr

    @property
    def detokenizes(self) -> bool:
        """There is a detokenizer. Without a tokenizer there is nothing to do for it but to tell API workers apart."""
        return not self.config.model.skip_tokenizer_init or self.num_api_workers > 1


class EngineStatus(Struct, kw_only=True, omit_defaults=True):
    """How far the engine has come. Written by rank 0 until it is ready, and by the launcher when it ends."""

    phase: Phase
    detail: str = ""
    """What it is doing, for a progress line."""
    progress: float = 0.0
    """Done part of the start, 0 to 1."""
    done_bytes: int = 0
    total_bytes: int = 0
    """Where the phase reads: how much it has read, and how much there is."""
    facts: dict[str, Any] = {}
    """When ready: at least `context_length`, `vocab_size`, `kv_tokens`; also `model`, `decisions`, `memory`."""
    error: str = ""
    """When failed: the cause in one sentence."""


class ErrorReport(Struct, kw_only=True, omit_defaults=True):
    """Why a process failed."""

    kind: str
    what: str
    why: str = ""
    fix: str = ""
    traceback: str = ""
    """At log level debug only."""


def save_launch(launch: Launch) -> None:
    write_whole(launch.endpoints.path(_LAUNCH), msgspec.json.encode(launch))


def load_launch(directory: str) -> Launch:
    """Reads what the launcher left in `directory`."""
    try:
        return msgspec.json.decode(Path(directory, _LAUNCH).read_bytes(), type=Launch)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            what=f"there is no launch file in {directory!r}",
            why=str(error),
            fix="start the server with `bough serve`; its processes are not meant to be started by hand",
        ) from error


def write_checkpoint(endpoints: Endpoints, checkpoint: Checkpoint) -> None:
    """Leaves what was read of the checkpoint for every other process, so that none reads it again."""
    write_whole(endpoints.path(_CHECKPOINT), pack_checkpoint(checkpoint))


def read_checkpoint(endpoints: Endpoints) -> Checkpoint:
    """The checkpoint that the launcher opened."""
    return unpack_checkpoint(endpoints.path(_CHECKPOINT).read_bytes())


def write_status(endpoints: Endpoints, status: EngineStatus) -> None:
    """Replaces the status at once: a reader sees the old one or the new one."""
    write_whole(endpoints.status, msgspec.json.encode(status))


def read_status(endpoints: Endpoints) -> EngineStatus:
    """The latest status; `starting` before there is one."""
    try:
        return msgspec.json.decode(endpoints.status.read_bytes(), type=EngineStatus)
    except FileNotFoundError:
        return EngineStatus(phase="starting")


def write_quarantine(endpoints: Endpoints, prints: frozenset[int]) -> None:
    """Tells the engine which requests not to take."""
    write_whole(endpoints.quarantine, msgspec.json.encode(sorted(prints)))


def read_quarantine(endpoints: Endpoints) -> frozenset[int]:
    try:
        return msgspec.json.decode(endpoints.quarantine.read_bytes(), type=frozenset[int])
    except FileNotFoundError:
        return frozenset()


def write_error(endpoints: Endpoints, name: str, error: BaseException, traceback: str = "") -> None:
    if isinstance(error, BoughError):
        report = ErrorReport(kind=type(error).__name__, what=error.what, why=error.why, fix=error.fix)
    else:
        report = ErrorReport(
            kind="BoughError",
            what=f"the {name} process failed: {type(error).__name__}: {error}",
            fix="start again with --log-level debug to see where",
        )
    report.traceback = traceback
    write_whole(endpoints.error(name), msgspec.json.encode(report))


def read_error(endpoints: Endpoints, name: str) -> BoughError | None:
    """The error that the process `name` left, as the type it had."""
    try:
        report = msgspec.json.decode(endpoints.error(name).read_bytes(), type=ErrorReport)
    except (OSError, msgspec.MsgspecError):
        return None
    kind = vars(errors).get(report.kind)
    if not (isinstance(kind, type) and issubclass(kind, BoughError)):
        kind = BoughError
    error = kind(what=report.what, why=report.why, fix=report.fix)
    if report.traceback:
        error.add_note(report.traceback)
    return error
