"""A log file that several processes write to, that is rotated by size, and that can be renamed at any time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from bough.core.errors import ConfigError


class LogFile(logging.Handler):
    """Appends lines. If another process, or `logrotate`, has renamed the file, the next line opens a new one."""

    def __init__(self, path: str, *, max_bytes: int, backups: int) -> None:
        """Above `max_bytes` (0: no limit) the file is renamed to PATH.1, PATH.1 to PATH.2 and so on, up to `backups`.
        Raises `ConfigError` if it cannot be opened."""
        super().__init__()
        self._path = Path(path).expanduser().absolute()
        self._max_bytes = max_bytes
        self._backups = backups
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                what=f"the log file {self._path} can't be written",
                why=error.strerror or str(error),
                fix="name another with --log-file, or make its directory writable",
                param="log_file",
            ) from error

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
            self._follow()
            os.write(
                self._file, line
            )  # one write to a file opened for appending: lines of several processes do not mix
            if self._max_bytes and os.fstat(self._file).st_size > self._max_bytes:
                self._turn_over()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
        super().close()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _follow(self) -> None:
        """Opens the path again if it no longer names this file."""
        try:
            there = os.stat(self._path)
            here = os.fstat(self._file)
            if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
                return
        except FileNotFoundError:
            pass
        fresh = self._open()
        os.close(self._file)
        self._file = fresh

    def _turn_over(self) -> None:
        """Rotates the file; the other processes then open the new one. Checks again under a lock, because another
        process may have rotated it meanwhile."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            there, here = os.stat(self._path), os.fstat(self._file)
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or here.st_size <= self._max_bytes:
                return
            for number in range(self._backups - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._numbered(number), self._numbered(number + 1))
            if self._backups:
                os.replace(self._path, self._numbered(1))
            else:
                os.unlink(self._path)
        except FileNotFoundError:
            pass
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._follow()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
