"""Building the kernels: for other instruction sets, without a compiler, with one that fails, several at once."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bough.kernels.attention import cpu as attention
from bough.kernels.cpu_build import compiler, compiling, shared_library
from bough.kernels.cpu_build.compiler import Recipe, build, find_recipe
from bough.kernels.cpu_build.compiling import BuildFailed
from bough.kernels.cpu_build.shared_library import library, load_for
from bough.kernels.norm import cpu as norm
from bough.kernels.packed_linear import cpu as packed
from bough.kernels.rotary import cpu as rotary
from bough.kernels.sampling import cpu as sampling
from bough.platform.processor import find_compiler
from tests.kernels import (
    test_cpu_attention,
    test_cpu_packed_linear,
    test_cpu_same_bits,
    test_cpu_sampling,
    test_cpu_small_ops,
)

ROOT = Path(__file__).parents[2]
USES_KERNELS = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from bough.kernels.cpu_build import library
from bough.kernels import packed_linear as packed
from bough.kernels.norm import rms_norm
weight = packed.pack("F32", torch.eye(32).view(torch.uint8), 32)
x = torch.arange(64.0).view(2, 32)
assert torch.equal(packed.packed_linear(x, weight), x)
assert torch.allclose(rms_norm(torch.ones(2, 32), torch.ones(32), 0.0), torch.ones(2, 32))
library()
print("kernels" if library() else "torch")
"""


def run_apart(tmp_path: Path, before: str = "", **variables: str) -> list[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", before + USES_KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    return done.stdout.splitlines()


def test_without_a_compiler_torch_computes(tmp_path: Path) -> None:
    warning, used = run_apart(tmp_path, PATH=str(tmp_path), CXX="")
    assert warning.startswith("WARNING")
    assert "no C++ compiler" in warning
    assert used == "torch"


def test_a_compiler_that_fails_is_one_warning(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'simd.h:1: error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    warning, used = run_apart(tmp_path, CXX=str(broken))
    assert "out of luck" in warning
    assert used == "torch"
    assert list((tmp_path / "bough" / "kernels").iterdir()) == [], "a failed build leaves nothing behind"


@pytest.mark.skipif(find_compiler() is None or platform.machine() != "x86_64", reason="no compiler")
def test_only_compilers_that_know_them_get_flags_for_copies(tmp_path: Path) -> None:
    real = str(find_compiler())
    knows = (
        subprocess.run([real, *compiling.COPIES, "-E", "-x", "c++", os.devnull], capture_output=True).returncode == 0
    )
    assert compiling.copy_flags(real, ("-march=x86-64-v3",)) == (compiling.COPIES if knows else ())
    assert compiling.copy_flags(real, ("-march=x86-64-v4",)) == ()
    older = tmp_path / "older-c++"
    older.write_text(f'#!/bin/sh\ncase "$*" in *-mmove-max*) exit 1;; esac\nexec {real} "$@"\n')
    older.chmod(0o755)
    assert compiling.copy_flags(str(older), ("-march=x86-64-v3",)) == ()
    assert compiling.copy_flags(str(tmp_path / "none"), ()) == ()


@pytest.mark.skipif(library() is None, reason="no compiler")
def test_a_library_is_built_once_and_named_by_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "SOURCES", sources)
    recipe = find_recipe()
    first = build(recipe)
    before = first.stat().st_mtime_ns
    assert build(recipe) == first
    assert first.stat().st_mtime_ns == before
    assert build(Recipe(recipe.compiler, ("-O1",))) != first
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    second = build(recipe)
    assert second != first
    assert {path.suffix for path in first.parent.iterdir()} == {".so"}
    (sources / "one.cpp").write_text("this is not C++\n")
    with pytest.raises(BuildFailed, match="error"):
        build(recipe)


@pytest.mark.skipif(library() is None, reason="no compiler")
def test_threads_build_once_and_what_is_broken_or_abandoned_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, folder = tmp_path / "src", tmp_path / "cache" / "bough" / "kernels"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setattr(shared_library, "load", lambda path: ctypes.CDLL(str(path)))
    commands: list[list[str]] = []
    run = compiling.run
    monkeypatch.setattr(compiling, "run", lambda command: (commands.append(command), run(command)))
    abandoned, busy = folder / ".build-old", folder / ".build-new"
    for each in (abandoned, busy):
        each.mkdir(parents=True)
    os.utime(abandoned, (time.time() - 3600,) * 2)
    library.cache_clear()
    try:
        with ThreadPoolExecutor(4) as threads:
            found = [each.result() for each in [threads.submit(library) for _ in range(4)]]
        assert all(each is not None and each.one() == 1 for each in found)
        assert len(commands) == 2, "compiled and linked once"
        (built,) = folder.glob("*.so")
        assert set(folder.iterdir()) == {built, busy}
        (sources / "one.cpp").write_text("int nothing;\n")
        build(find_recipe()).write_bytes(b"")
        library.cache_clear()
        assert library() is not None
        assert len(commands) == 6, "an empty library is built again"
    finally:
        library.cache_clear()


def test_forbidden_kernels_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_library, "_forbidden", True)
    library.cache_clear()
    try:
        assert library() is None
        assert not packed.available()
        assert not attention.available()
    finally:
        library.cache_clear()


@pytest.mark.long
@pytest.mark.skipif(library() is None or platform.machine() != "x86_64", reason="no compiler for these")
@pytest.mark.parametrize("machine", ["x86-64-v3", "x86-64"])
def test_other_instruction_sets_compute_the_same(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine == "x86-64-v3" and "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("this machine can't run it")
    other = load_for((f"-march={machine}",))
    for module in (attention, norm, packed, rotary, sampling):
        monkeypatch.setattr(module, "library", lambda: other)
    for kind in test_cpu_packed_linear.KINDS:
        test_cpu_packed_linear.test_dequantised_values_are_ggufs(packed, kind)
        for tokens in (1, 3, 9, 40):
            test_cpu_packed_linear.test_exact_products_are_float32s(packed, kind, tokens)
            if kind not in test_cpu_packed_linear.PLAIN:
                test_cpu_packed_linear.test_fast_products_are_those_of_rounded_activations(kind, tokens)
    spec = test_cpu_attention.Spec()
    for rows in test_cpu_attention.SHAPES.values():
        test_cpu_attention.check(test_cpu_attention.make_case(rows, spec), spec, attention.CpuAttention)
    for kind in ("Q4_1", "Q6_K", "F16"):
        for exact in (True, False):
            test_cpu_same_bits.test_products(kind, exact, 37, 768)
    for layer in ("plain", "both", "many heads"):
        test_cpu_same_bits.test_attention(test_cpu_same_bits.LAYERS[layer], torch.float32)
        test_cpu_same_bits.test_attention(test_cpu_same_bits.LAYERS[layer], torch.bfloat16)
    case = test_cpu_attention.make_case([(1, 150), (1, 140)], spec, share=128, cache_dtype=torch.bfloat16)
    test_cpu_attention.check(case, spec, attention.CpuAttention)
    for dtype in test_cpu_small_ops.DTYPES:
        test_cpu_small_ops.test_norms(dtype, (3, 100), 1.0)
        test_cpu_small_ops.test_rotary(dtype, False, 64, 64, 5)
    for filters in test_cpu_sampling.FILTERS.values():
        test_cpu_sampling.test_draws_are_the_references(1000, 0.7, filters, 4.0)
