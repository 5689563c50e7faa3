"""Log lines, as text or JSON, with the name of the process that writes them. Prompts and answers are never logged.

Data of clients may get into a line: control characters are escaped and continuation lines are indented, so that nothing
from a client looks like a separate log line.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO

from bough.config.concerns import LogConfig, LogLevel
from bough.observability.log_file import LogFile

_LEVELS: dict[LogLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_LONGEST_LINE = 16_384
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every record; others were given as `extra`."""
_CONTROLS = {
    code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if code not in (ord("\n"), ord("\t"))
} | {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}
"""Characters that move a terminal's cursor or start a line, and their replacements."""


def set_up_logging(process: str, config: LogConfig, stream: TextIO | None = None) -> None:
    """Sends bough's log lines, and other libraries' from level warning up, to `stream` (--log-file, or stderr).

    Replaces an earlier setup.
    """
    target = stream or sys.stderr
    handler: logging.Handler = logging.StreamHandler(target)
    if stream is None and config.log_file:
        handler = LogFile(config.log_file, max_bytes=config.log_file_max_bytes, backups=config.log_file_backups)
    text = TextFormatter(process, on_terminal=target.isatty() and not isinstance(handler, LogFile))
    handler.setFormatter(JsonFormatter(process) if config.log_format == "json" else text)
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, TextFormatter | JsonFormatter):
            root.removeHandler(old)
            if isinstance(old, LogFile):
                old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_log_level(config.log_level)
    logging.captureWarnings(True)
    if config.log_format == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda failed: _log_uncaught(
            failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback
        )


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Logs an error that ends a thread or the process."""
    if not issubclass(kind, SystemExit | KeyboardInterrupt):
        logging.getLogger("bough").critical("an error was not handled: %s", error, exc_info=(kind, error, trace))


def set_log_level(level: LogLevel) -> None:
    """Sets the minimum level of bough's messages in this process."""
    logging.getLogger("bough").setLevel(_LEVELS[level])


def log_level() -> LogLevel:
    """The level that `set_log_level` chose."""
    chosen = logging.getLogger("bough").getEffectiveLevel()
    return next((name for name, level in _LEVELS.items() if level >= chosen), "error")


class TextFormatter(logging.Formatter):
    """`12:30:01.250 info  engine  message  key=value`"""

    def __init__(self, process: str, *, on_terminal: bool = False) -> None:
        """`on_terminal`: each line first clears the remains of a progress bar."""
        super().__init__()
        self._process = process
        self._clear = "\r\x1b[K" if on_terminal else ""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():<7} {self._process:<6} {_message(record)}"
        extra = "".join(f"  {key}={_one_line(value)}" for key, value in _extra(record).items())
        text = (line + extra + _trace(self, record)).translate(_CONTROLS).replace("\n", "\n    ")
        return self._clear + _cut(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, process, logger, message, and the record's extra fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _cut(_message(record)),
        }
        fields.update({key: value for key, value in _extra(record).items() if key not in fields})
        trace = _trace(self, record)
        if trace:
            fields["traceback"] = trace.strip()
        return json.dumps(fields, ensure_ascii=False, default=str)


def _message(record: logging.LogRecord) -> str:
    return record.getMessage()


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _one_line(value: object) -> str:
    return str(value).replace("\n", "\\n")


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " ... (cut)"
