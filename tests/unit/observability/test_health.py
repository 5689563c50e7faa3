import math
import os
import subprocess
import sys
import time
from pathlib import Path

from bough.observability.health import Beat, Heartbeat, Pulse, State


def test_a_reader_sees_the_last_beat(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "beat")
    before = pulse.read()
    assert before.age_s == math.inf
    assert before.state is State.STARTING
    heart = Heartbeat(tmp_path / "beat")
    heart.beat(7, State.READY, 3, 4)
    heart.beat(8, State.DRAINING, 2, 1)
    beat = pulse.read()
    assert (beat.steps, beat.state, beat.num_running, beat.num_waiting) == (8, State.DRAINING, 2, 1)
    assert beat.pid == os.getpid()
    assert 0 <= beat.age_s < 30


def test_age_grows_when_the_writer_stops(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path / "beat")
    heart.beat(1, State.READY)
    time.sleep(0.05)
    assert 0.05 <= Pulse(tmp_path / "beat").read().age_s < 30


def test_another_process_reads_whole_beats(tmp_path: Path) -> None:
    """A writer in another process beats with all numbers equal: no reading may mix two beats."""
    path = tmp_path / "beat"
    program = (
        "import sys; from pathlib import Path; from bough.observability.health import Heartbeat, State\n"
        "heart, enough, i = Heartbeat(Path(sys.argv[1])), Path(sys.argv[2]), 0\n"
        "while i % 1000 or not enough.exists(): i += 1; heart.beat(i, State.READY, i, i)\n"
        "print(i)\n"
    )
    enough = tmp_path / "enough"
    writer = subprocess.Popen([sys.executable, "-c", program, path, enough], stdout=subprocess.PIPE, text=True)
    pulse, seen = Pulse(path), set()
    while len(seen) < 30:
        beat = pulse.read()
        assert beat.steps == beat.num_running == beat.num_waiting
        seen.add(beat.steps)
        assert writer.poll() is None
    enough.touch()
    assert pulse.read().steps <= int(writer.communicate(timeout=60)[0]) == pulse.read().steps


def test_reading_is_cheap(tmp_path: Path) -> None:
    heart, pulse = Heartbeat(tmp_path / "beat"), Pulse(tmp_path / "beat")

    def best_us(call: object) -> float:
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times) * 1e6

    assert best_us(pulse.read) < 50
    assert best_us(lambda: heart.beat(1, State.READY)) < 50
    assert isinstance(pulse.read(), Beat)
