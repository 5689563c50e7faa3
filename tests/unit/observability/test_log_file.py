"""The log file: it turns over at its size, follows a file that was moved, and several processes share it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from bough.config.concerns import LogConfig
from bough.core.errors import ConfigError
from bough.observability.log import set_up_logging
from bough.observability.log_file import LogFile


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text})


def test_it_turns_over_and_keeps_a_few(tmp_path: Path) -> None:
    handler = LogFile(str(tmp_path / "logs" / "bough.log"), max_bytes=50, backups=2)
    for number in range(40):
        handler.emit(record(f"line {number:02d}"))
    handler.close()
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["bough.log", "bough.log.1", "bough.log.2"]
    kept = [line for name in reversed(files) for line in (tmp_path / "logs" / name).read_text().splitlines()]
    assert kept == [f"line {number:02d}" for number in range(40 - len(kept), 40)]
    assert all((tmp_path / "logs" / name).stat().st_size <= 58 for name in files)


def test_a_file_that_was_moved_is_left(tmp_path: Path) -> None:
    handler = LogFile(str(tmp_path / "a.log"), max_bytes=0, backups=0)
    handler.emit(record("before"))
    (tmp_path / "a.log").rename(tmp_path / "a.log.old")
    handler.emit(record("after"))
    handler.close()
    assert (tmp_path / "a.log.old").read_text() == "before\n"
    assert (tmp_path / "a.log").read_text() == "after\n"


_WRITER = """
import logging, sys
from bough.observability.log_file import LogFile
handler = LogFile(sys.argv[1], max_bytes=2000, backups=1000)
for number in range(300):
    handler.emit(logging.makeLogRecord({"msg": f"{sys.argv[2]} {number} " + "x" * (number % 40)}))
"""


def test_processes_share_it_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    expected = [f"{name} {number} " + "x" * (number % 40) for name in "abc" for number in range(300)]
    assert sorted(lines) == sorted(expected)
    assert len(list(tmp_path.iterdir())) > 5


def test_logging_goes_there_and_a_bad_path_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.log"
    try:
        set_up_logging("api0", LogConfig(log_file=str(path)))
        logging.getLogger("bough.test").info("hello")
    finally:
        set_up_logging("api0", LogConfig())
    assert path.read_text().endswith("api0   hello\n")
    assert "hello" not in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        LogFile(str(tmp_path / "file" / "a.log"), max_bytes=0, backups=0)
