"""Facts about this machine, gathered without importing torch."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bough.core.errors import ConfigError
from bough.platform.cuda_driver import Gpu, query_gpu
from bough.platform.prebuilt import prebuilt_kernels
from bough.platform.processor import find_compiler, memory_bytes, processor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device that will compute, and the host beside it."""

    kind: Literal["cpu", "cuda"]
    name: str
    arch: str
    """Instruction set ("avx512_vnni") or compute capability ("sm90")."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None on a CPU."""
    total_bytes: int
    free_bytes: int
    num_sms: int
    """Multiprocessors; 0 on a CPU."""
    num_devices: int
    physical_cores: int
    """CPU cores that this process may use."""
    isa_flags: frozenset[str]
    """Instruction sets of the CPU that decisions depend on."""
    compiler: str | None
    """Path of a C++ compiler, if there is one."""
    prebuilt: Path | None
    """Prebuilt CPU kernels of the package that run on this CPU, if there are any."""
    host_total_bytes: int
    host_free_bytes: int

    @property
    def has_cpu_kernels(self) -> bool:
        """Whether the C++ kernels are available: prebuilt, or because there is a compiler."""
        return self.prebuilt is not None or self.compiler is not None

    @property
    def has_bfloat16(self) -> bool:
        """Whether bf16 arithmetic is done in hardware."""
        if self.capability is not None:
            return self.capability >= (8, 0)
        return bool(self.isa_flags & {"avx512_bf16", "amx_bf16", "bf16"})


def detect(device: Literal["auto", "cpu", "cuda"] = "auto") -> DeviceFacts:
    """Facts about the given device. `auto`: a GPU that this torch supports, else the CPU."""
    if device == "cpu":
        return _cpu_facts()
    gpu = query_gpu()
    torch_cuda = torch_cuda_version()
    if gpu is not None and torch_cuda is not None:
        return _gpu_facts(gpu)
    if device == "auto":
        return _cpu_facts()
    if gpu is None:
        raise ConfigError(
            what="--device cuda was asked for, but no GPU is visible",
            why="the CUDA driver is missing, or it shows no device to this process",
            fix="check nvidia-smi and CUDA_VISIBLE_DEVICES, or start with --device cpu",
            param="device",
        )
    raise ConfigError(
        what=f"--device cuda was asked for, but the installed torch can't drive {gpu.name}",
        why="it is a build for the CPU only",
        fix="install a CUDA build of torch, or start with --device cpu",
        param="device",
    )


def computes_on_gpu(device: Literal["auto", "cpu", "cuda"]) -> bool:
    """Whether `detect` finds facts about a GPU for this device."""
    return device != "cpu" and torch_cuda_version() is not None and query_gpu() is not None


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed torch was built for, or None; read from its files, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def _cpu_facts() -> DeviceFacts:
    cpu = processor()
    total, free = memory_bytes()
    return DeviceFacts(
        kind="cpu",
        name=cpu.model,
        arch=cpu.arch,
        capability=None,
        total_bytes=total,
        free_bytes=free,
        num_sms=0,
        num_devices=1,
        physical_cores=cpu.physical_cores,
        isa_flags=cpu.flags,
        compiler=find_compiler(),
        prebuilt=prebuilt_kernels(cpu.flags),
        host_total_bytes=total,
        host_free_bytes=free,
    )


def _gpu_facts(gpu: Gpu) -> DeviceFacts:
    cpu = processor()
    total, free = memory_bytes()
    return DeviceFacts(
        kind="cuda",
        name=gpu.name,
        arch=f"sm{gpu.capability[0]}{gpu.capability[1]}",
        capability=gpu.capability,
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        num_sms=gpu.num_sms,
        num_devices=gpu.num_devices,
        physical_cores=cpu.physical_cores,
        isa_flags=cpu.flags,
        compiler=find_compiler(),
        prebuilt=prebuilt_kernels(cpu.flags),
        host_total_bytes=total,
        host_free_bytes=free,
    )
