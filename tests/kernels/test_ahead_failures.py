"""Compilers that print, hang or can't do a job keep no launch waiting."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.kernels import ahead, ahead_compiler

pytest.importorskip("triton")

JOB = ahead.CudaJob("nothing.cu", "sm_90a", {})
PRINTS = """
import os
os.write(1, b"a banner\\n99 is no job\\n")
"""
ANSWERS = """
import os
from bough.kernels import ahead_compiler
ahead_compiler._import = lambda: os.write(1, b"printed")
ahead_compiler._Server.run = lambda self: self._say(3, b"no such  file")
ahead_compiler.main()
"""


def test_what_is_printed_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(PRINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    compilers = ahead.Compilers(1)
    compilers.ask("it", JOB, urgent=True)
    compilers.wait("it")
    compilers.finish()
    compilers._reader.join(60)
    assert (compilers.failed, compilers.pending) == (1, 0)


def test_answers_have_a_descriptor_of_their_own() -> None:
    """What compilers print goes where errors go."""
    done = subprocess.run([sys.executable, "-c", ANSWERS, "1"], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"3 no such file\n")
    assert done.stderr.endswith(b"printed")


def test_compilers_that_hang_are_ended() -> None:
    compilers = ahead.Compilers(1, most_waited_s=0.5)
    os.kill(compilers._process.pid, signal.SIGSTOP)
    compilers.ask("it", JOB, urgent=True)
    compilers.ask("another", JOB, urgent=False)
    compilers.wait("it")
    compilers.wait("another")
    compilers._reader.join(60)
    assert (compilers.failed, compilers.pending) == (2, 0)
    assert compilers._process.returncode == -signal.SIGKILL


def test_a_job_that_can_not_be_read_fails_alone() -> None:
    theirs, ours = os.pipe()
    server = ahead_compiler._Server(1, ours)
    missing = {"function": ["bough.kernels.norm.triton", "no_such_function"]}
    fields = {
        "tuple": ["bough.a", "b", {"dict": []}, {"dict": [[0, missing]]}, {"dict": []}, {"tuple": []}, {"dict": []}]
    }
    server._note(json.dumps([7, True, "TritonJob", fields]).encode())
    server._note(ahead.encode(ahead.Ask(8, JOB, urgent=True)))
    assert [number for _, number in server._urgent] == [8]
    os.close(ours)
    with os.fdopen(theirs, "rb") as answers:
        assert answers.read().startswith(b"7 ")


def test_no_kept_form_is_launched_in_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    from bough.kernels import launching

    asked: list[Any] = []
    ran: list[Any] = []
    launcher = launching.Launcher(_Kernel(asked))
    monkeypatch.setattr(launching, "has_pdl", lambda _: False)
    monkeypatch.setattr(launching, "current_stream", lambda _: 0)
    x = torch.zeros(16)
    key = (x.device, 4, (1,), (2, False), x.dtype)
    launcher._forms[key] = (lambda *given: ran.append(given), None, None, None)
    launcher.launch((1, 1), (x,), (1,), (), (2,), 4)
    assert (len(ran), len(asked)) == (1, 0)
    monkeypatch.setattr(launching, "is_rehearsing", lambda: True)
    launcher.launch((1, 1), (x,), (1,), (), (2,), 4)
    assert (len(ran), len(asked)) == (1, 1)


class _Kernel:
    """In place of a function with `triton.jit`."""

    def __init__(self, asked: list[Any]) -> None:
        self._asked = asked

    def __getitem__(self, grid: object) -> Any:
        return lambda *given, **_: self._asked.append(given)
