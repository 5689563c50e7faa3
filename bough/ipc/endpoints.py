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
"""Maximum length of a Unix socket's path in bytes (sun_path without its final zero)."""
_LONGEST_NAME = len("/r255/meeting")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Names of everything in the private directory. Each socket is bound by its reader and connected to by its writers."""

    directory: str

    def replicas(self, count: int) -> list[Endpoints]:
        """The endpoints of each engine: one directory per engine if there are several."""
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
        """Read by an API worker: `ToApi` from the detokenizer, or from rank 0 if there is no detokenizer."""
        return str(self.path(f"api.{worker}"))

    def peer(self, worker: int) -> str:
        """Socket on which an API worker accepts requests that other workers forward (HTTP)."""
        return str(self.path(f"peer.{worker}"))

    def rank(self, rank: int) -> str:
        """Read by a worker rank: encoded steps from rank 0, where they can't go through a ring in shared memory."""
        return str(self.path(f"rank.{rank}"))

    @property
    def meeting(self) -> str:
        """Socket of the launcher's `StoreServer`, through which the ranks on this machine find each other."""
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
        """Fingerprints of requests that were running in two crashes."""
        return self.path("quarantine.json")

    @property
    def rates(self) -> Path:
        """Rates of requests and tokens per key, shared by the API workers."""
        return self.path("rates")

    def board(self, name: str) -> Path:
        """Metrics of the process `name`."""
        return self.path(f"{name}.board")

    def error(self, name: str) -> Path:
        return self.path(f"error.{name}.json")

    def fault(self, name: str) -> Path:
        """File for the native stack of a process that crashes."""
        return self.path(f"fault.{name}.txt")

    def path(self, name: str) -> Path:
        return Path(self.directory) / name


class PrivateDirectory:
    """A directory of mode 0700 that exists as long as this object. If its owner was killed, `sweep` removes it
    later."""

    def __init__(self) -> None:
        root = _short_root()
        sweep(root)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            os.close(self._lock)  # another server removed it before it was locked

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
    """Removes directories whose owner is gone (their lock is free) and returns their number. Directories of other users
    are skipped."""
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
    """The first usable directory in which socket paths fit the kernel's limit."""
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
