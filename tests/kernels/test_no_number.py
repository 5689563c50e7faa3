"""Logits that are no numbers, as of a damaged checkpoint, lead to some token, and not to memory behind a table."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CHILD = """
import torch
from bough.kernels.sampling import triton

logits = torch.randn(3, 2200)
logits[1] = float("nan")
rows = torch.ones(3)
best = triton.argmax(logits)
drawn = [
    triton.sample(logits, warmth * rows, top_k * torch.ones(3, dtype=torch.int32), top_p * rows, 0 * rows,
                  torch.arange(3), torch.arange(3))
    for warmth, top_k, top_p in ((0.0, 2200, 1.0), (0.8, 2200, 1.0), (0.8, 20, 0.9))
]
for found in (best, *drawn):
    assert ((0 <= found) & (found < 2200)).all(), found
assert best[::2].equal(logits.argmax(-1)[::2])
"""


def test_every_token_is_in_the_vocabulary() -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CHILD], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
