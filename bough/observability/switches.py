"""Changes of log settings, and reloads, for all processes of a server: the process that receives one forwards it to the
others.

Each process listens on a datagram socket in the server's private directory, so that none has to poll. The last log
settings are also kept there, for processes that start later. Invalid messages are dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from bough.config.concerns import LogLevel
from bough.observability.log import log_level, set_log_level
from bough.platform.whole_file import write_whole

_MOST_BYTES = 4096
_WAIT_S = 1.0
_KEPT = "logging.json"
_telling = threading.Lock()


class LogSwitch(msgspec.Struct, kw_only=True, omit_defaults=True, tag="log"):
    """Log settings to change; None: unchanged."""

    log_level: LogLevel | None = None
    log_requests: bool | None = None


class Reload(msgspec.Struct, tag="reload"):
    """Asks a process to reload all its files."""


class SwitchDone(msgspec.Struct, kw_only=True):
    """Confirms that a process has made the change."""

    process: str
    log_level: str


Changed = Callable[[LogSwitch], None]
Switch = LogSwitch | Reload


class LogListener:
    """The receiver of one process. `answer` handles what has arrived and never waits; `follow` does this in a
    thread."""

    def __init__(
        self,
        directory: Path,
        process: str,
        changed: Changed | None = None,
        reload: Callable[[], object] | None = None,
    ) -> None:
        """`changed` is called after this process's log level was changed; immediately, if it was changed before.
        `reload` is called to reload files, and must not raise."""
        self._process = process
        self._changed = changed
        self._reload = reload
        self._path = directory / f"l{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._socket.bind(str(self._path))
        with contextlib.suppress(OSError):
            self._apply((directory / _KEPT).read_bytes())

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> None:
        """Handles waiting messages. For event loops: call it when the socket is readable."""
        with contextlib.suppress(OSError):
            self._hear(*self._socket.recvfrom(_MOST_BYTES, socket.MSG_DONTWAIT))

    def follow(self) -> None:
        """Handles messages in a background thread. For processes without an event loop."""
        threading.Thread(target=self._listen, name="log-switches", daemon=True).start()

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _listen(self) -> None:
        while True:
            try:
                self._hear(*self._socket.recvfrom(_MOST_BYTES))
            except OSError:
                return

    def _hear(self, data: bytes, sender: str | None) -> None:
        if self._apply(data) and sender:
            heard = msgspec.json.encode(SwitchDone(process=self._process, log_level=log_level()))
            with contextlib.suppress(OSError):
                self._socket.sendto(heard, socket.MSG_DONTWAIT, sender)

    def _apply(self, data: bytes) -> bool:
        try:
            switch = msgspec.json.decode(data, type=Switch)
        except msgspec.MsgspecError:
            return False
        if isinstance(switch, Reload):
            if self._reload is not None:
                self._reload()
            return True
        if switch.log_level is not None:
            set_log_level(switch.log_level)
        if self._changed is not None:
            self._changed(switch)
        return True


def tell_all(directory: Path, switch: Switch) -> list[str]:
    """Sends the change to all processes that listen in `directory`. Returns the names of those that confirm within a
    second."""
    with _telling, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        own = directory / f"t{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            own.unlink()
        mouth.bind(str(own))
        try:
            with _alone(directory):
                if isinstance(switch, LogSwitch):
                    _keep(directory, switch)
                waiting = _send(mouth, directory, switch)
            return sorted(_heard(mouth, waiting))
        finally:
            own.unlink()


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Holds a lock, so that changes reach all processes in the same order."""
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _send(mouth: socket.socket, directory: Path, switch: Switch) -> int:
    """Returns the number of processes that it was sent to."""
    count = 0
    for path in directory.glob("l[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            mouth.sendto(msgspec.json.encode(switch), socket.MSG_DONTWAIT, str(path))
            count += 1
    return count


def _heard(mouth: socket.socket, waiting: int) -> set[str]:
    names: set[str] = set()
    give_up_s = time.monotonic() + _WAIT_S
    while len(names) < waiting and (left_s := give_up_s - time.monotonic()) > 0:
        mouth.settimeout(left_s)
        try:
            names.add(msgspec.json.decode(mouth.recv(_MOST_BYTES), type=SwitchDone).process)
        except TimeoutError:
            break
        except msgspec.MsgspecError:
            continue
    return names


def _keep(directory: Path, switch: LogSwitch) -> None:
    """Merges the change into the kept settings."""
    kept = directory / _KEPT
    merged = LogSwitch()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        merged = msgspec.json.decode(kept.read_bytes(), type=LogSwitch)
    changes = {name: value for name, value in msgspec.structs.asdict(switch).items() if value is not None}
    write_whole(kept, msgspec.json.encode(msgspec.structs.replace(merged, **changes)))
