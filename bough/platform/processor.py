"""The CPU: model, instruction sets, physical cores this process may use, memory. Reads files, imports nothing heavy."""

from __future__ import annotations

import math
import os
import platform as python_platform
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NAMED_FLAGS = (
    "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "avx_vnni", "avx512f", "avx512bw", "avx512cd", "avx512dq",
    "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd",
    "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Instruction sets that some decision depends on, in Linux's spelling."""

_CORES_TO_SPARE = 4
"""With fewer cores, a thread that polls takes the core of the thread that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """One machine's CPU as this process may use it."""

    model: str
    vendor: str
    flags: frozenset[str]
    """Those of `NAMED_FLAGS` that the kernel reports."""
    physical_cores: int
    """Distinct cores in the affinity mask, no more than the control group's quota."""
    logical_cpus: int

    @property
    def arch(self) -> str:
        """The widest instruction set that kernels are written for."""
        if {"amx_tile", "amx_bf16"} <= self.flags:
            return "amx"
        if {"avx512f", "avx512bw", "avx512vl"} <= self.flags:
            return "avx512_vnni" if "avx512_vnni" in self.flags else "avx512"
        if {"avx2", "fma"} <= self.flags:
            return "avx2"
        return "neon" if "asimd" in self.flags else python_platform.machine()


@cache
def processor() -> CpuFacts:
    """Facts about this CPU. Read once."""
    fields = _cpuinfo(Path("/proc/cpuinfo"))
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    allowed = allowed_cpus()
    quota = cgroup_cpu_quota()
    cores = _physical(allowed)
    if quota is not None:
        cores = max(1, min(cores, math.ceil(quota)))
    return CpuFacts(
        model=fields.get("model name") or fields.get("CPU part") or python_platform.processor() or "unknown CPU",
        vendor=fields.get("vendor_id") or fields.get("CPU implementer") or "",
        flags=flags & frozenset(NAMED_FLAGS),
        physical_cores=cores,
        logical_cpus=len(allowed),
    )


def fingerprint() -> str:
    """Identifies this CPU in caches on disk: what was measured or compiled on another one doesn't hold here."""
    cpu = processor()
    family = _cpuinfo(Path("/proc/cpuinfo"))
    numbers = ".".join(family.get(name, "") for name in ("cpu family", "model", "stepping"))
    return f"{cpu.vendor} {cpu.model} {numbers} {' '.join(sorted(cpu.flags))}"


def allowed_cpus() -> frozenset[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """Logical CPUs that this process may keep busy at once: allowed ones, no more than the control group's quota."""
    quota = cgroup_cpu_quota()
    allowed = len(allowed_cpus())
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def can_wait_busily() -> bool:
    """Whether a core can be spared for a wait that is soon over. Not for processes whose cores compute the model."""
    return usable_cpus() >= _CORES_TO_SPARE


def cgroup_cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")
) -> float | None:
    """CPUs that the control group grants (version 2 or 1), or None if there is no limit."""
    quotas = [q for folder in _cgroup_folders(root, self_cgroup, "cpu") if (q := _quota(folder)) is not None]
    return min(quotas, default=None)


def memory_bytes() -> tuple[int, int]:
    """(total, available) memory in bytes, within the control group's limit."""
    fields = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
        total, free = fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", 0))
    except (OSError, KeyError, ValueError, IndexError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for folder in _cgroup_folders(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if limit is not None and limit < total:
            total, free = limit, min(free, max(0, limit - used))
    return total, free


def find_compiler() -> str | None:
    """Path of a C++ compiler that kernels can be built with: `$CXX`, g++, clang++ or c++."""
    names = [name for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name]
    return next((path for path in map(shutil.which, names) if path), None)


def _cpuinfo(path: Path) -> dict[str, str]:
    """The fields of the first processor."""
    fields: dict[str, str] = {}
    try:
        text = path.read_text()
    except OSError:
        return fields
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def _physical(cpus: frozenset[int]) -> int:
    """How many distinct cores these logical CPUs are."""
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add((topology / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def _cgroup_folders(root: Path, self_cgroup: Path, controller: str) -> list[Path]:
    """The control group of this process for one controller, and its parents up to the root."""
    folders: list[Path] = []
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        here = base / inside.lstrip("/")
        while True:
            folders.append(here)
            if here == base or base not in here.parents:
                break
            here = here.parent
    return folders


def _quota(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    limit_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return limit_us / period_us if limit_us and limit_us > 0 and period_us else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
