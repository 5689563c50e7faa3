from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from bough.config.cache_directory import cache_directory
from bough.core.errors import ConfigError
from bough.platform import Device, cpu_dtype, detect
from bough.platform.disk_cache import recall, remember
from bough.platform.facts import torch_cuda_version
from bough.platform.huge_pages import prefer_huge_pages
from bough.platform.processor import cgroup_cpu_quota, find_compiler, memory_bytes, processor, usable_cpus


def test_cpu_facts_agree_with_others() -> None:
    facts = detect("cpu")
    assert facts.kind == "cpu"
    assert facts.capability is None
    assert 1 <= facts.physical_cores <= (psutil.cpu_count(logical=True) or 1)
    assert facts.total_bytes <= psutil.virtual_memory().total
    assert 0 < facts.free_bytes <= facts.total_bytes
    capability = torch.backends.cpu.get_cpu_capability()
    assert ("avx2" in facts.isa_flags) == any(name in capability for name in ("AVX2", "AVX512"))


def test_affinity_limits_the_cores() -> None:
    before = os.sched_getaffinity(0)
    processor.cache_clear()
    try:
        os.sched_setaffinity(0, {min(before)})
        assert processor().physical_cores == 1
    finally:
        os.sched_setaffinity(0, before)
        processor.cache_clear()


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (2.0, 2), (3.5, 3), (0.5, 1), (64.0, 8)])
def test_who_may_keep_cpus_busy_is_bounded_by_the_quota_too(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr("bough.platform.processor.allowed_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr("bough.platform.processor.cgroup_cpu_quota", lambda: quota)
    assert usable_cpus() == expected


def test_cuda_asked_for_without_one_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError) as caught:
        detect("cuda")
    assert "--device cpu" in caught.value.fix
    assert detect("auto").kind == "cpu"


def test_torch_build_is_read_without_importing_it() -> None:
    assert torch_cuda_version() == torch.version.cuda


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/b/cpu.max": "150000 100000"}, 1.5),
        ({"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ({"a/b/cpu.max": "max 100000"}, None),
        ({}, None),
    ],
)
def test_quota_of_version_2(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    (tmp_path / "self").write_text("0::/a/b\n")
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    assert cgroup_cpu_quota(tmp_path / "fs", tmp_path / "self") == expected


def test_quota_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("4:memory:/x\n3:cpu,cpuacct:/job\n")
    folder = tmp_path / "fs" / "cpu,cpuacct" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cpu_quota(tmp_path / "fs", tmp_path / "self") == 2.0
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cgroup_cpu_quota(tmp_path / "fs", tmp_path / "self") is None


def test_memory_is_plausible() -> None:
    total, free = memory_bytes()
    assert 0 < free <= total


def test_compiler_follows_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "my-c++"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert find_compiler() == str(mine)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_compiler() is None


def test_disk_cache_survives_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert recall("answers", "k") is None
    remember("answers", "k", [1, 2])
    remember("answers", "other", "x")
    assert recall("answers", "k") == [1, 2]
    (cache_directory() / "answers.json").write_text("{ not json")
    assert recall("answers", "k") is None
    remember("answers", "k", 3)
    assert recall("answers", "k") == 3
    assert [p.name for p in cache_directory().iterdir()] == ["answers.json"]


def test_dtype_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cpu_dtype.fastest_dtype()
    assert first in ("float32", "bfloat16")
    for way in ("measure", "measure_apart"):
        monkeypatch.setattr(cpu_dtype, way, lambda: pytest.fail("measured twice"))
    assert cpu_dtype.fastest_dtype() == first


def test_cpu_device_has_the_same_names_and_waits_for_nothing() -> None:
    device = Device("cpu")
    event, stream = device.event(), device.stream()
    with stream.current():
        event.record()
    assert event.done()
    stream.wait()
    device.synchronize()
    buffer = device.host_buffer(100)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (100,)
    assert not buffer.is_pinned()
    free, total = device.free_bytes()
    assert 0 < free <= total


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no huge pages here")
def test_huge_pages_back_the_memory_they_are_asked_for() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("huge pages are switched off")
    before = _huge_kib()
    room = torch.empty(64 * 1024 * 1024, dtype=torch.uint8)
    assert prefer_huge_pages(room.data_ptr(), room.numel())
    room.fill_(1)
    if _huge_kib() - before < 16 * 1024:
        pytest.skip("the system has no huge pages left")
    assert not prefer_huge_pages(room.data_ptr(), 4096)


def _huge_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
