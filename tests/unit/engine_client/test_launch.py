"""Processes start, are watched and end, with an engine that computes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from bough.config.concerns import Config, LogConfig, ModelConfig
from bough.core.errors import BoughError, ConfigError, Unavailable
from bough.ipc import EngineStatus, read_status
from bough.launch import ServerProcesses, start
from bough.observability.health import Pulse, State
from tests.unit.engine_client.conftest import FAKE
from tests.waiting import gone, until

QUIET = Config(log=LogConfig(log_level="error"))


@pytest.fixture
def server() -> ServerProcesses:
    running = start(QUIET, programs=FAKE)
    running.wait_ready(timeout_s=60)
    return running


def test_start_ready_stop_leaves_nothing(server: ServerProcesses) -> None:
    directory = Path(server.endpoints.directory)
    pids = server.pids
    assert set(pids) == {"engine", "detokenizer"}
    assert server.facts["context_length"] == 256
    assert server.failed() is None
    pulse = Pulse(server.endpoints.heartbeat)
    assert until(lambda: pulse.read().state is State.READY, 30)
    assert pulse.read().pid == pids["engine"]
    assert until(lambda: pulse.read().age_s < 1, 30)
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 30
    assert all(gone(pid, 0.5) for pid in pids.values())
    assert not directory.exists()
    server.stop()


def test_progress_is_told_in_order() -> None:
    heard: list[EngineStatus] = []
    with start(QUIET, programs=FAKE) as running:
        running.wait_ready(heard.append, timeout_s=60)
    phases = [status.phase for status in heard]
    assert phases[-1] == "ready"
    assert phases == sorted(phases, key=["starting", "loading", "ready"].index)


@pytest.mark.parametrize("name", ["engine", "detokenizer"])
def test_a_killed_process_takes_the_others_along_and_is_named(server: ServerProcesses, name: str) -> None:
    heard: list[BoughError] = []
    server.on_failure(heard.append)
    pids = server.pids
    os.kill(pids[name], signal.SIGKILL)
    assert until(lambda: server.failed() is not None, 30)
    error = server.failed()
    assert error is not None
    assert name in error.what
    assert "SIGKILL" in error.what
    assert all(gone(pid, 30) for pid in pids.values())
    assert read_status(server.endpoints).phase == "failed"
    server.stop()
    assert until(lambda: bool(heard), 30)
    assert [each.what for each in heard] == [error.what]
    late: list[BoughError] = []
    server.on_failure(late.append)
    assert late == heard


@pytest.mark.parametrize(
    ("mode", "kind", "what"),
    [
        ("fail", ConfigError, "made of cheese"),
        ("bug", BoughError, "ZeroDivisionError: by zero"),
        ("crash", BoughError, "SIGSEGV"),
    ],
)
def test_a_failed_start_says_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mode: str, kind: type[BoughError], what: str
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", mode)
    with start(QUIET, programs=FAKE) as running:
        with pytest.raises(BoughError, match=what) as caught:
            running.wait_ready(timeout_s=60)
        assert type(caught.value) is kind
        assert running.failed() is caught.value
    assert not Path(running.endpoints.directory).exists()
    if mode == "fail":
        assert caught.value.fix == "unset FAKE_ENGINE"
        assert "Traceback" not in capfd.readouterr().err


def test_a_start_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "loading")
    with start(QUIET, programs=FAKE) as running:
        with pytest.raises(Unavailable, match="not ready within"):
            running.wait_ready(timeout_s=1.5)
        pids = running.pids
        started = time.monotonic()
    assert time.monotonic() - started < 30
    assert all(gone(pid, 0.5) for pid in pids.values())


def test_an_unknown_model_fails_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        start(Config(model=ModelConfig(model=str(tmp_path / "nowhere"))), programs=FAKE)


def test_stopping_waits_for_requests_and_a_second_call_hurries(server: ServerProcesses) -> None:
    from bough.core.messages import Generate, pack_ids
    from bough.core.sampling import SamplingParams
    from bough.ipc import Outbox

    outbox = Outbox(server.endpoints.engine)
    outbox.send(Generate(id=1, rid="slow", prompt=pack_ids([7, 9]), sampling=SamplingParams()))
    pulse = Pulse(server.endpoints.heartbeat)
    assert until(lambda: pulse.read().num_running == 1, 30)
    started = time.monotonic()
    first = threading.Thread(target=server.stop, args=(60.0,))
    first.start()
    time.sleep(0.5)
    assert first.is_alive(), "the slow request should be waited for"
    server.stop(0.0)
    first.join(30)
    assert time.monotonic() - started < 30, "the first call's patience is a minute"
    assert all(gone(pid, 0.5) for pid in server.pids.values())
    outbox.close(0)


OWNER = """
import sys, time, threading
from bough.config.concerns import Config, LogConfig
from bough.launch import start
from tests.unit.engine_client.conftest import FAKE
from tests.waiting import gone, until

def main():
    running = start(Config(log=LogConfig(log_level="error")), programs=FAKE)
    running.wait_ready(timeout_s=60)
    print(running.endpoints.directory, *running.pids.values(), flush=True)
    {ending}

if __name__ == "__main__":
    {call}
"""


def own(ending: str, call: str = "main()") -> tuple[subprocess.Popen[str], Path, list[int]]:
    """Another Python process that owns a server."""
    program = OWNER.format(ending=ending, call=call)
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, process_group=0)
    assert owner.stdout is not None
    directory, *pids = owner.stdout.readline().split()
    return owner, Path(directory), [int(pid) for pid in pids]


@pytest.mark.parametrize(
    ("call", "what"),
    [("main()", "death signal"), ("t = threading.Thread(target=main); t.start(); t.join()", "lifeline alone")],
)
def test_children_end_with_a_killed_parent(call: str, what: str) -> None:
    owner, directory, pids = own("time.sleep(600)", call)
    owner.kill()
    owner.wait()
    assert all(gone(pid, 30) for pid in pids), what
    assert until(lambda: not directory.exists(), 30)


def test_ctrl_c_leaves_nothing() -> None:
    owner, directory, pids = own("time.sleep(600)")
    os.killpg(owner.pid, signal.SIGINT)
    assert owner.wait(60) != 0
    assert all(gone(pid, 30) for pid in pids)
    assert not directory.exists()


def test_a_parent_that_just_ends_leaves_nothing() -> None:
    owner, directory, pids = own("pass")
    assert owner.wait(60) == 0
    assert all(gone(pid, 30) for pid in pids)
    assert not directory.exists()


@pytest.mark.long
def test_a_fork_of_the_parent_does_not_end_the_server() -> None:
    owner, directory, pids = own("import os; os.fork() or sys.exit(0); os.wait(); time.sleep(600)")
    time.sleep(0.5)
    assert directory.exists()
    assert all(psutil.pid_exists(pid) for pid in pids)
    owner.kill()
    owner.wait()
    assert all(gone(pid, 30) for pid in pids)
