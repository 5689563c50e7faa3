"""Environment variables that must be set before torch is imported.

Some virtual machines advertise AMX but do not let a process use its tile registers: the first bf16 matrix product of
torch then kills the process with SIGILL. A child process tries one, once per CPU and torch version; if it dies, the
instruction set is limited. That takes as long as importing torch does: where a GPU computes, it is limited untried.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping

from bough.platform.disk_cache import recall, remember
from bough.platform.processor import CpuFacts, fingerprint, processor

log = logging.getLogger("bough.platform")

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"

IDLE_SPINS = "5000"
"""Value of GOMP_SPINCOUNT: an idle thread of torch's pool spins for about 0.1 ms instead of several. bough's kernels
have their own threads, which would compete with spinning ones for the cores."""

PROBE = """
import torch
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for rows in (1, 64):
        (torch.ones(rows, 128, dtype=dtype) @ torch.ones(128, 128, dtype=dtype)).sum()
"""
"""What the child runs: the matrix products that oneDNN gives to AMX."""

PROBE_TIMEOUT_S = 60.0


def prepare_environment(
    *,
    threads: int | None = None,
    environment: MutableMapping[str, str] | None = None,
    on_gpu: Callable[[], bool] | None = None,
) -> list[str]:
    """Sets what torch and OpenMP read when they load. To be called before torch is imported; imports no torch itself.

    `threads`: number of OpenMP threads (None: one per physical core that this process may use). `on_gpu`: whether matrix
    products are computed on a GPU, where a child process isn't waited for; asked only where one would be started. Returns a
    sentence for each variable that it set; variables that the user set are not changed.
    """
    variables = os.environ if environment is None else environment
    said = []
    cpu = processor()
    if "OMP_NUM_THREADS" not in variables:
        count = cpu.physical_cores if threads is None else threads
        variables["OMP_NUM_THREADS"] = str(count)
        said.append(f"OMP_NUM_THREADS={count}: {'one a physical core' if threads is None else 'as configured'}")
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & variables.keys():
        variables["GOMP_SPINCOUNT"] = IDLE_SPINS
        said.append(f"GOMP_SPINCOUNT={IDLE_SPINS}: torch's idle threads leave the cores to others soon")
    if ISA_VARIABLE not in variables:
        known = known_isa_cap(cpu)
        untried = known is None and on_gpu is not None and on_gpu()
        if untried or (needs_isa_cap(cpu) if known is None else known):
            variables[ISA_VARIABLE] = ISA_WITHOUT_AMX
            why = "were not tried, and a GPU computes" if untried else "kill the process on this machine"
            said.append(f"{ISA_VARIABLE}={ISA_WITHOUT_AMX}: matrix products with AMX {why}")
    if "torch" in sys.modules and said and environment is None:
        log.warning("torch was imported before its environment was prepared: %s comes too late", "; ".join(said))
    return said


def needs_isa_cap(cpu: CpuFacts, run_probe: Callable[[bool], bool] | None = None) -> bool:
    """Whether torch's matrix products crash on this machine unless the instruction set is limited. Cached on disk.

    `run_probe(capped)` returns whether a child process survives the products.
    """
    known = known_isa_cap(cpu)
    if known is not None:
        return known
    survives = run_probe or survives_matmul
    needed = not survives(False) and survives(True)
    remember("isa_probe", _probe_key(), needed)
    return needed


def known_isa_cap(cpu: CpuFacts) -> bool | None:
    """As `needs_isa_cap`, without a probe. None: it takes one to know."""
    if not _may_have_amx(cpu):
        return False
    known = recall("isa_probe", _probe_key())
    return known if isinstance(known, bool) else None


def _probe_key() -> str:
    return f"{fingerprint()} | torch {_torch_version()}"


def survives_matmul(capped: bool) -> bool:
    """Runs the probe in a child process, with or without the cap. True if it ends well."""
    variables = dict(os.environ)
    variables["OMP_NUM_THREADS"] = "1"
    variables.pop(ISA_VARIABLE, None)
    if capped:
        variables[ISA_VARIABLE] = ISA_WITHOUT_AMX
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=variables, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _may_have_amx(cpu: CpuFacts) -> bool:
    """Whether the CPU may have AMX. oneDNN asks the CPU itself, and a hypervisor may show it AMX that it hides from
    Linux: any recent Intel CPU may crash."""
    return "amx_tile" in cpu.flags or (cpu.vendor == "GenuineIntel" and "avx512_vnni" in cpu.flags)


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "missing"
