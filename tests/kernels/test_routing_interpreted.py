"""Routing in one launch, by Triton's interpreter, in a process where it is switched on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CASES = Path(__file__).with_name("routing_cases.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # an interpreter is slow, more so on a busy machine
def test_routing_agrees_with_its_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(CASES), "41"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 0
