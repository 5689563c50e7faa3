import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bough.config.concerns import LogConfig
from bough.observability.json_lines import JsonPipe, JsonText, as_json
from bough.observability.log import set_up_logging


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    root, ours = logging.getLogger(), logging.getLogger("bough")
    before = (list(root.handlers), root.level, ours.level)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_json_lines_carry_the_process_and_extra_fields(lines: io.StringIO) -> None:
    set_up_logging("engine", LogConfig(log_format="json"), lines)
    logging.getLogger("bough.engine").info("step %d", 3, extra={"rows": 5})
    entry = json.loads(lines.getvalue())
    assert entry["process"] == "engine"
    assert entry["level"] == "info"
    assert entry["message"] == "step 3"
    assert entry["rows"] == 5
    assert entry["time"].endswith("Z")


def test_json_keeps_a_traceback_on_one_line(lines: io.StringIO) -> None:
    set_up_logging("detok", LogConfig(log_format="json"), lines)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("bough").exception("failed")
    assert lines.getvalue().count("\n") == 1
    assert "ValueError: broken" in json.loads(lines.getvalue())["traceback"]


def test_text_lines_and_levels(lines: io.StringIO) -> None:
    set_up_logging("api", LogConfig(log_level="warning"), lines)
    logging.getLogger("bough.engine_client").info("hidden")
    logging.getLogger("bough.engine_client").warning("shown", extra={"rid": "x"})
    text = lines.getvalue()
    assert "hidden" not in text
    assert "warning" in text
    assert "api" in text
    assert text.rstrip().endswith("shown  rid=x")


def test_setting_up_twice_prints_once(lines: io.StringIO) -> None:
    set_up_logging("api", LogConfig(), lines)
    set_up_logging("api", LogConfig(log_format="json"), lines)
    logging.getLogger("bough").info("once")
    assert lines.getvalue().count("once") == 1


def test_a_huge_message_is_cut(lines: io.StringIO) -> None:
    set_up_logging("api", LogConfig(), lines)
    logging.getLogger("bough").info("x" * 1_000_000)
    assert len(lines.getvalue()) < 20_000


def test_a_line_on_a_terminal_clears_the_progress_bar(lines: io.StringIO) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    set_up_logging("engine", LogConfig(), screen)
    logging.getLogger("bough").info("hello")
    assert screen.getvalue().startswith("\r\x1b[K")
    set_up_logging("engine", LogConfig(), lines)
    logging.getLogger("bough").info("hello")
    assert "\x1b" not in lines.getvalue()


@pytest.mark.parametrize(
    "sent", ["x\n12:00:00.000 error   engine forged", "a\r\x1b[2Kforged", "b\x9b31mred", "c\u2028forged", "d\x85forged"]
)
def test_nothing_that_clients_send_begins_a_line(lines: io.StringIO, sent: str) -> None:
    set_up_logging("api", LogConfig(), lines)
    logger = logging.getLogger("bough.entrypoints")
    logger.info("request", extra={"rid": sent})
    logger.warning("%s failed", sent)
    logger.info("request ended", extra={"rid": sent})
    shown = lines.getvalue()
    assert not any(ord(each) < 32 and each != "\n" for each in shown)
    assert not set(shown) & {"\x85", "\x9b", "\u2028"}
    starts = [line for line in shown.splitlines() if line[:1].isdigit()]
    assert len(starts) == 3, "one for each record"
    assert all(" api " in line for line in starts)


def test_a_traceback_is_indented(lines: io.StringIO) -> None:
    set_up_logging("api", LogConfig(), lines)
    try:
        raise ValueError("broken\n12:00:00.000 error   engine forged")
    except ValueError:
        logging.getLogger("bough").exception("failed")
    first, *others = lines.getvalue().rstrip("\n").split("\n")
    assert first.endswith("failed")
    assert all(line.startswith("    ") for line in others)
    assert any("ValueError: broken" in line for line in others)


def test_what_is_no_json_becomes_json() -> None:
    kept = b'{"time": "now", "message": "as it is"}\n'
    assert as_json("engine", kept) == kept
    for line in (b"[W] native code speaks\n", b"{not json}\n", b"\xff\xfe\n", b'{"a": 1} {"b": 2}\n'):
        told = json.loads(as_json("engine", line))
        assert told["process"] == "engine"
        assert told["message"] == line.strip().decode(errors="replace")
    assert as_json("engine", b"  \n") == b""


def test_a_child_that_prints_what_it_likes() -> None:
    reading, writing = os.pipe()
    pipe = JsonPipe("engine", writing)
    program = (
        "import sys, os; print('hello'); sys.stderr.write('no line break'); sys.stderr.flush(); os.write(1, b'\\nx')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=pipe.fileno(), stderr=pipe.fileno()) as child:
        pipe.handed_over()
        assert child.wait(60) == 0
    pipe.join(60)
    os.close(writing)
    with os.fdopen(reading, "rb") as out:
        told = [json.loads(line) for line in out]
    assert {each["process"] for each in told} == {"engine"}
    assert sorted(each["message"] for each in told) == ["hello", "no line break", "x"]


def test_progress_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    print("loading ...", file=JsonText("api0"), flush=True)
    assert json.loads(capsys.readouterr().err)["message"] == "loading ..."
