"""What is left of an engine that died: the steps that never came back, and whose they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from bough.observability.flight import NUM_RECORDS, FlightRecorder, read_flight, suspects


def note(recorder: FlightRecorder, index: int, requests: list[int]) -> None:
    count = len(requests)
    recorder.note(
        index, float(index), num_tokens=3 * count, num_decodes=count, constrained=0,
        requests=np.array(requests, np.int64), prints=np.array(requests, np.uint64) + np.uint64(2**63),
        num_query=np.full(count, 3, np.int32), context=np.arange(count, dtype=np.int32),
    )  # fmt: skip


def test_unsettled_steps_name_their_requests(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 8)
    for index in range(5):
        note(recorder, index, [index, index + 1])
        recorder.settled(index - 2)
    steps = read_flight(tmp_path / "flight")
    assert [step.index for step in steps] == [0, 1, 2, 3, 4]
    assert [step.settled for step in steps] == [True, True, True, False, False]
    assert suspects(steps) == {2**63 + 3, 2**63 + 4, 2**63 + 5}
    assert steps[4].requests == (4, 5)
    assert steps[4].context == (0, 1)
    assert (tmp_path / "flight").stat().st_mode & 0o777 == 0o600


def test_only_the_last_steps_are_kept(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 2)
    for index in range(3 * NUM_RECORDS + 5):
        note(recorder, index, [index])
    steps = read_flight(tmp_path / "flight")
    assert [step.index for step in steps] == list(range(2 * NUM_RECORDS + 5, 3 * NUM_RECORDS + 5))


def test_a_killed_writer_leaves_its_record(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from bough.observability.flight import FlightRecorder\n"
        "r = FlightRecorder(Path(sys.argv[1]), 4)\n"
        "one = np.ones(1, np.int32)\n"
        "for i in range(10):\n"
        "    r.note(i, 0.0, num_tokens=1, num_decodes=1, constrained=0, requests=one.astype('i8') * i,\n"
        "           prints=one.astype('u8') * i, num_query=one, context=one)\n"
        "    if i < 9: r.settled(i)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "flight")], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert suspects(read_flight(tmp_path / "flight")) == {9}


def test_no_record_is_no_suspicion(tmp_path: Path) -> None:
    assert read_flight(tmp_path / "none") == []
    (tmp_path / "short").write_bytes(b"abc")
    assert read_flight(tmp_path / "short") == []
    (tmp_path / "foreign").write_bytes(b"\0" * 4096)
    assert read_flight(tmp_path / "foreign") == []
