"""Log switches and reloads that reach every process of a server: the process that gets one passes it on to all others.

Each process listens on a datagram socket in the server's private directory, so nobody polls; the last change of the log is
kept there too, for processes that start later. What can't be read is dropped.
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
    """What to change; what is not given stays as it is."""

    log_level: LogLevel | None = None
    log_requests: bool | None = None


class Reload(msgspec.Struct, tag="reload"):
    """Everything that a process reads from files is to be read again."""


class Heard(msgspec.Struct, kw_only=True):
    """A process has changed."""

    process: str
    log_level: str


Changed = Callable[[LogSwitch], None]
Switch = LogSwitch | Reload


class LogListener:
    """One process's ear. `answer` handles what has come and never waits; `follow` does so in a thread, until the end."""

    def __init__(
        self,
        directory: Path,
        process: str,
        changed: Changed | None = None,
        reload: Callable[[], object] | None = None,
    ) -> None:
        """`changed` hears of a switch once this process's log level has changed; at once, if one was made before. `reload`
        is called when files are to be read again, and raises nothing."""
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
        """For event loops: call it when the socket can be read."""
        with contextlib.suppress(OSError):
            self._hear(*self._socket.recvfrom(_MOST_BYTES, socket.MSG_DONTWAIT))

    def follow(self) -> None:
        """For processes without an event loop: listens in the background."""
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
            heard = msgspec.json.encode(Heard(process=self._process, log_level=log_level()))
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
    """Every process that listens in `directory` makes the change. Returns the names of those that did within a second."""
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
    """No other process tells anybody meanwhile: what comes last comes last everywhere."""
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _send(mouth: socket.socket, directory: Path, switch: Switch) -> int:
    """How many it was sent to."""
    told = 0
    for path in directory.glob("l[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            mouth.sendto(msgspec.json.encode(switch), socket.MSG_DONTWAIT, str(path))
            told += 1
    return told


def _heard(mouth: socket.socket, waiting: int) -> set[str]:
    names: set[str] = set()
    give_up_s = time.monotonic() + _WAIT_S
    while len(names) < waiting and (left_s := give_up_s - time.monotonic()) > 0:
        mouth.settimeout(left_s)
        try:
            names.add(msgspec.json.decode(mouth.recv(_MOST_BYTES), type=Heard).process)
        except TimeoutError:
            break
        except msgspec.MsgspecError:
            continue
    return names


def _keep(directory: Path, switch: LogSwitch) -> None:
    """Adds the change to those made before."""
    kept = directory / _KEPT
    merged = LogSwitch()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        merged = msgspec.json.decode(kept.read_bytes(), type=LogSwitch)
    changes = {name: value for name, value in msgspec.structs.asdict(switch).items() if value is not None}
    write_whole(kept, msgspec.json.encode(msgspec.structs.replace(merged, **changes)))
