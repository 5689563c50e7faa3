"""Kernels are found by rehearsing their launches and compiled in other processes, for a device that isn't there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.kernels import ahead, ahead_compiler
from bough.kernels.zeroed import Zeroed

pytest.importorskip("triton")

CHILD = """
import json, sys, time
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Hopper())
from bough.kernels import ahead, ahead_compiler
from bough.kernels.norm.triton import _norm_kernel, rms_norm

ahead.start(2)
x, weight = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
original = JITFunction.run
with ahead.Rehearsal(urgent=True):
    for _ in range(2):
        y = rms_norm(x, weight, 1e-6)
    rms_norm(x.float(), weight.float(), 1e-6)
assert JITFunction.run is original and not ahead.is_rehearsing()
compilers = ahead.compilers()
asked = compilers.asked
kept = len(_norm_kernel.device_caches[0][0])
ended = []
ahead.finish(lambda: ended.append(True))

listened = []
import triton
triton.knobs.compilation.listener = lambda **said: listened.append(said["cache_hit"])
kernel = _norm_kernel
real = ahead._compile
# A launch that is not rehearsed waits for its kernel and finds it compiled.
def launch():
    try:
        rms_norm(x, weight, 1e-6)
    except Exception as error:  # there is no device to launch it on
        pass
launch()
compilers._reader.join(120)
print(json.dumps(dict(asked=asked, kept=kept, hits=listened, failed=compilers.failed, pending=ahead.pending(),
                      ended=ended, zero=bool((y == 0).all()))))
"""


def test_kernels_of_a_rehearsal_are_compiled_elsewhere(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    variables.pop("TRITON_INTERPRET", None)
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    done = subprocess.run([sys.executable, script], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {
        "asked": 2, "kept": 0, "hits": [True], "failed": 0, "pending": 0, "ended": [True], "zero": True
    }  # fmt: skip
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2


def test_a_job_that_fails_is_not_waited_for() -> None:
    compilers = ahead.Compilers(1)
    job = ahead.TritonJob("bough.kernels.norm.triton", "no_such_kernel", {}, {}, {}, ("cuda", 90, 32), {})
    compilers.ask("it", job, urgent=False)
    called: list[bool] = []
    compilers.finish(lambda: called.append(True))
    compilers.wait("it")
    compilers.wait("never asked for")
    compilers._reader.join(60)
    assert (compilers.failed, compilers.pending, called) == (1, 0, [])


def test_what_takes_long_begins_first_and_what_is_awaited_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    server = ahead_compiler._Server(2)
    monkeypatch.setattr(server, "_begin", lambda number, niceness: begun.append((number, niceness)))
    long, short = tmp_path / "long.cu", tmp_path / "short.cu"
    long.write_bytes(b" " * 40_000)
    short.write_bytes(b" " * 9_000)
    triton = ahead.TritonJob("bough.a", "b", {}, {}, {}, ("cuda", 90, 32), {})
    jobs = [ahead.CudaJob(str(short), "sm_90a", {}), triton, ahead.CudaJob(str(long), "sm_90a", {})]
    for number, job in enumerate([*jobs, *jobs]):
        server._note(ahead.encode(ahead.Ask(number, job, urgent=number < 3)))
    for awaited in (4, 0, 99):
        server._note(ahead.encode(ahead.Ask(awaited, None, urgent=True)))
    server._start_some()
    assert begun == [(4, 0), (0, 0), (2, 0), (1, 0), (3, 10), (5, 10)]


def test_compilers_that_end_are_not_waited_for() -> None:
    compilers = ahead.Compilers(1)
    compilers._process.kill()
    job = ahead.CudaJob("nothing.cu", "sm_90a", {})
    for key in range(3):
        compilers.ask(key, job, urgent=True)
        compilers.wait(key)
    assert compilers.pending == 0


def test_a_job_arrives_as_it_was() -> None:
    from triton import language

    from bough.kernels.packed_linear.decode import _as_weight

    given = {
        (0,): language.bfloat16, (1,): language.constexpr((2, "a")), (2,): _as_weight, (3,): None, (4,): 1.5, (5,): True,
    }  # fmt: skip
    attributes = {(0,): [["tt.divisibility", 16]]}
    job = ahead.TritonJob("bough.a", "b", {"x": "*bf16"}, given, attributes, ("cuda", 90, 32), {"libs": (("a", "b"),)})
    sent = ahead.Ask(3, job, True)
    got = ahead.decode(ahead.encode(sent))
    assert str(got) == str(sent)
    assert got.job is not None
    assert got.job == job._replace(constants=got.job.constants)
    assert got.job.constants[2,] is _as_weight
    for other in (ahead.Ask(4, ahead.CudaJob("a.cu", "sm_90a", {"D": 1}), False), ahead.Ask(-1, None, False)):
        assert ahead.decode(ahead.encode(other)) == other
    with pytest.raises(TypeError, match="object"):
        ahead.encode(ahead.Ask(5, job._replace(options={"a": object()}), True))


def test_new_tensors_are_zero() -> None:
    with torch.inference_mode():
        torch.full((1 << 16,), 7)
        with Zeroed():
            made: list[Any] = [torch.empty(1 << 16, dtype=torch.int64), torch.empty_strided((8, 8), (8, 1))]
            made += [
                torch.empty_like(made[0]),
                made[0].new_empty(100),
                torch.empty((3, 4)).new_empty_strided((2, 2), (2, 1)),
            ]
            kept = torch.full((4,), 3)
        assert all(int(each.count_nonzero()) == 0 for each in made)
        assert kept.tolist() == [3] * 4
