import io
import json
import logging
from collections.abc import Iterator

import pytest

from bough.config.concerns import LogConfig
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
    logging.getLogger("bough.intake").info("hidden")
    logging.getLogger("bough.intake").warning("shown", extra={"rid": "x"})
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
