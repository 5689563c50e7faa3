"""A log file that several processes write to, that turns over by itself, and that may be moved away at any time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from bough.core.errors import ConfigError


class LogFile(logging.Handler):
    """Appends lines. A file that another process, or `logrotate`, has moved is opened anew at the next line."""

    def __init__(self, path: str, *, max_bytes: int, backups: int) -> None:
        """Beyond `max_bytes` (0: never) the file becomes PATH.1, that PATH.2, up to `backups`. Raises `ConfigError` if it
        can't be opened."""
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
            os.write(self._file, line)  # one write of a file opened to append: lines of processes don't mix
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
        """One process moves the file; the others follow. Under a lock, and looked at again: another may have done it."""
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
