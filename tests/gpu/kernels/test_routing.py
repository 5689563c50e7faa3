"""A router's product and choice in one launch, at the widths of models."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = ROOT / "tests" / "kernels" / "routing_cases.py"
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_routing_agrees_with_its_reference(part: int) -> None:
    seed = str(random.SystemRandom().randrange(2**31))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(CASES), seed, str(part), str(PARTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 0
