"""Routing in one launch, by Triton's interpreter, in a process where it is switched on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.moe import Choosing, routing

CASES = Path(__file__).with_name("routing_cases.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # an interpreter is slow, more so on a busy machine
def test_routing_agrees_with_its_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(CASES), "41"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 0


@pytest.mark.parametrize(
    ("tokens", "experts", "router", "served", "on_tensor_cores"),
    [
        (0, 64, torch.float32, False, False),
        (16, 64, torch.float32, True, False),
        (17, 64, torch.float32, True, True),
        (512, 64, torch.float32, True, True),
        (513, 64, torch.float32, False, False),
        (32, 128, torch.bfloat16, True, False),
        (33, 128, torch.bfloat16, True, True),
        (64, 128, torch.bfloat16, True, True),
        (65, 128, torch.bfloat16, False, False),
        (32, 32, torch.float32, True, False),
        (33, 32, torch.bfloat16, False, False),
        (33, 513, torch.bfloat16, False, True),
    ],
)
def test_whom_one_launch_serves(
    tokens: int, experts: int, router: torch.dtype, served: bool, on_tensor_cores: bool
) -> None:
    given = torch.zeros(tokens, 8, dtype=torch.bfloat16), torch.zeros(experts, 8, dtype=router)
    assert routing.suits(*given, Choosing(2, True)) is served
    assert routing.takes_tensor_cores(*given) is on_tensor_cores
    assert not routing.takes_tensor_cores(given[0].float(), given[1])
