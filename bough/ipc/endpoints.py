"""The private directory of one running server: its sockets and files, and how it is made and removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bough.core.errors import ConfigError

_PREFIX = "bough-"
_LONGEST_SOCKET_PATH = 107
"""Bytes that a Unix socket's path may have (sun_path without its final zero)."""
_LONGEST_NAME = len("/r255/meeting")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Names of everything in the private directory. Each socket is bound by its reader and connected to by its writers."""

    directory: str

    def replicas(self, count: int) -> list[Endpoints]:
        """Those of each engine: directories of their own, where there are several."""
        return [self] if count == 1 else [Endpoints(str(self.path(f"r{number}"))) for number in range(count)]

    @property
    def engine(self) -> str:
        """Read by rank 0: `ToEngine` from API workers and the detokenizer."""
        return str(self.path("engine"))

    @property
    def detokenizer(self) -> str:
        """Read by the detokenizer: `ToDetokenizer` from rank 0."""
        return str(self.path("detok"))

    def api(self, worker: int) -> str:
        """Read by an API worker: `ToApi` from the detokenizer, or from rank 0 where there is none."""
        return str(self.path(f"api.{worker}"))

    def peer(self, worker: int) -> str:
        """Where an API worker takes requests that the others pass on to it (HTTP)."""
        return str(self.path(f"peer.{worker}"))

    def rank(self, rank: int) -> str:
        """Read by a worker rank: encoded steps from rank 0, where they can't go through a ring in shared memory."""
        return str(self.path(f"rank.{rank}"))

    @property
    def meeting(self) -> str:
        """Where ranks on this machine meet: the launcher's `StoreServer` listens there."""
        return str(self.path("meeting"))

    @property
    def heartbeat(self) -> Path:
        return self.path("heartbeat")

    def beat(self, name: str) -> Path:
        """The heartbeat of another process than the engine: the detokenizer, or an API worker."""
        return self.path(f"heartbeat.{name}")

    @property
    def status(self) -> Path:
        return self.path("status.json")

    @property
    def flight(self) -> Path:
        """The engine's last steps: shapes and ids."""
        return self.path("flight")

    @property
    def quarantine(self) -> Path:
        """Fingerprints of requests that the engine has died of."""
        return self.path("quarantine.json")

    @property
    def rates(self) -> Path:
        """What the API workers know together of how fast clients send."""
        return self.path("rates")

    def board(self, name: str) -> Path:
        """The numbers that the process `name` counts."""
        return self.path(f"{name}.board")

    def error(self, name: str) -> Path:
        return self.path(f"error.{name}.json")

    def fault(self, name: str) -> Path:
        """Where a dying process's native stack goes."""
        return self.path(f"fault.{name}.txt")

    def path(self, name: str) -> Path:
        return Path(self.directory) / name


class PrivateDirectory:
    """A directory of mode 0700 that exists as long as this object does, and is swept up later if its owner was killed."""

    def __init__(self) -> None:
        root = _short_root()
        sweep(root)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            os.close(self._lock)  # a server that starts at the same time has swept it up before it was locked

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(str(self.path))

    def remove(self) -> None:
        """Removes the directory; may be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(root: Path) -> int:
    """Removes directories whose owner is gone (their lock is free), and returns how many. Other users' are left alone."""
    removed = 0
    for directory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                removed += 1
            finally:
                os.close(lock)
    return removed


def _short_root() -> Path:
    """The first usable directory in which sockets' paths stay within the kernel's limit."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    for candidate in filter(None, candidates):
        sample = f"{candidate}/{_PREFIX}12345678"
        if len(os.fsencode(sample)) + _LONGEST_NAME <= _LONGEST_SOCKET_PATH and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise ConfigError(
        what="there is no directory for the server's sockets",
        why=f"none of {', '.join(filter(None, candidates))} is writable with a path short enough for a Unix socket",
        fix="set TMPDIR to a writable directory with a short path",
    )
