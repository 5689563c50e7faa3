"""Kernels that come compiled with the package: which build a CPU gets, and that it needs no compiler."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from bough.kernels.cpu_build import library
from bough.platform import prebuilt
from bough.platform.prebuilt import VARIANTS, prebuilt_kernels
from bough.platform.processor import NAMED_FLAGS, find_compiler, processor
from tests.kernels.test_cpu_build import ROOT, run_apart

ZEN2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
SKYLAKE_SP = ZEN2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ICE_LAKE = SKYLAKE_SP | {"avx512_vnni"}
SAPPHIRE_RAPIDS = ICE_LAKE | {"avx512_bf16", "amx_tile"}


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (frozenset({"avx"}), None),
        (ZEN2 - {"fma"}, None),
        (ZEN2, "avx2"),
        (ZEN2 | {"avx512f"}, "avx2"),
        (SKYLAKE_SP, "avx512"),
        (ICE_LAKE, "avx512_vnni"),
        (SAPPHIRE_RAPIDS, "avx512_vnni_bf16"),
    ],
)
def test_a_cpu_gets_the_best_build_it_can_run(
    flags: frozenset[str], chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    assert prebuilt_kernels(flags) is None, "a source tree has none"
    for variant in VARIANTS:
        (tmp_path / variant.file_name).touch()
    assert prebuilt_kernels(flags) == (tmp_path / f"bough_cpu_{chosen}.so" if chosen else None)


def test_every_flag_that_a_build_needs_is_read() -> None:
    assert all(variant.needs <= set(NAMED_FLAGS) for variant in VARIANTS)


@pytest.mark.skipif(library() is None or prebuilt_kernels(processor().flags) is not None, reason="no compiler")
@pytest.mark.long
def test_no_compiler_is_needed_where_a_build_came_with_the_package(tmp_path: Path) -> None:
    built = library()
    assert built is not None
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    for variant in VARIANTS:
        shutil.copy(built._name, folder / variant.file_name)
    before = f"from pathlib import Path; from bough.platform import prebuilt; prebuilt.FOLDER = Path({str(folder)!r})\n"
    assert run_apart(tmp_path, before, PATH=str(tmp_path), CXX="") == ["kernels"]
    for path in folder.iterdir():
        path.write_bytes(b"")
    warning, other, used = run_apart(tmp_path, before, PATH=str(tmp_path), CXX="")
    assert "came with the package can't be used" in warning
    assert "no C++ compiler" in other
    assert used == "torch"


# -- the wheel ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("prebuilt_hook", ROOT / "deploy" / "prebuilt_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(find_compiler() is None or shutil.which("readelf") is None, reason="no compiler")
def test_a_library_that_needs_too_much_is_no_part_of_a_wheel(hook: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "one.cpp"
    source.write_text(
        '#include <omp.h>\n#include <stdlib.h>\nextern "C" int one() { return omp_get_max_threads() + rand(); }\n'
    )
    plain, linked = tmp_path / "plain.so", tmp_path / "linked.so"
    compile_ = [str(find_compiler()), "-shared", "-fPIC", str(source), "-o"]
    subprocess.run([*compile_, str(plain)], check=True)
    subprocess.run([*compile_, str(linked), "-fopenmp"], check=True)
    hook.check_portable(plain)
    with pytest.raises(RuntimeError, match=r"linked\.so needs libgomp"):
        hook.check_portable(linked)
    hook.MOST["GLIBC"] = (2, 1)
    with pytest.raises(RuntimeError, match=r"needs GLIBC_2\.\d"):
        hook.check_portable(plain)


@pytest.mark.long
@pytest.mark.skipif(find_compiler() is None, reason="no compiler")
def test_wheels_and_sdist_hold_what_they_should(tmp_path: Path) -> None:
    pytest.importorskip("build")
    subprocess.run([sys.executable, str(ROOT / "deploy" / "build_wheels.py"), "--out", str(tmp_path)], check=True)
    (pure,) = tmp_path.glob("bough-*-py3-none-any.whl")
    (compiled,) = tmp_path.glob("bough-*-py3-none-manylinux_2_34_x86_64.whl")
    (sdist,) = tmp_path.glob("bough-*.tar.gz")
    names = set(zipfile.ZipFile(pure).namelist())
    kernels = {f"bough/kernels/cpu_build/prebuilt/{variant.file_name}" for variant in VARIANTS}
    assert set(zipfile.ZipFile(compiled).namelist()) - names == kernels | {
        name for name in zipfile.ZipFile(compiled).namelist() if ".dist-info/" in name and name not in names
    }
    assert {
        "bough/py.typed",
        "bough/kernels/cpu_build/src/simd.h",
        "bough/entrypoints/http/ui/static/index.html",
    } <= names
    assert not any(re.match(r"(tests|docs|deploy)/", name) for name in names)
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(sdist, unpacked)
    (root,) = unpacked.iterdir()
    assert (root / "tests").is_dir()
    assert (root / "deploy" / "prebuilt_kernels.py").exists()
