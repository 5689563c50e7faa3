"""The Triton kernels on the CPU, by Triton's interpreter, in processes where it is switched on."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]


GROUPS = [
    "norm,rows,activation,rotary",
    "linear,lora,moe,grouping",
    "packed,packed_moe,gguf",
    "attention,shared,tail,latent,sparse,rope,segments",
    "sampling,masks,pages,start,end,tree,chain,plan,states",
]


@pytest.mark.timeout(900)  # an interpreter is slow, more so on a busy machine
@pytest.mark.parametrize("ops", [",".join(GROUPS[:3]), ",".join(GROUPS[3:])])
def test_agree_with_their_references(ops: str) -> None:
    """Every kernel, each shape, dtype and option at least once."""
    agree(ops, "each")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ops", GROUPS)
def test_agree_in_every_combination(ops: str) -> None:
    agree(ops, "all")


def agree(ops: str, amount: str) -> None:
    seed = zlib.crc32(ops.encode()) % 2**31
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(HERE)))
    command = [sys.executable, "-W", "ignore", "-m", "triton_cases", ops, str(seed), amount]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(ops.split(","))
    assert min(int(line.split()[0]) for line in done.stdout.splitlines()) > 0
