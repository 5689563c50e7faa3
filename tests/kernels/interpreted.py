"""Runs cases of Triton kernels on the CPU, by Triton's interpreter, in a process where it is switched on."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]


def agree(ops: str, amount: str) -> None:
    """Kernels agree with their references: see `triton_cases`. Raises AssertionError."""
    seed = zlib.crc32(ops.encode()) % 2**31
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(HERE)))
    command = [sys.executable, "-W", "ignore", "-m", "triton_cases", ops, str(seed), amount]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(ops.split(","))
    assert min(int(line.split()[0]) for line in done.stdout.splitlines()) > 0
