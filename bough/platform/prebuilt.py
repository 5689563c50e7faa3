"""CPU kernels that come compiled with the package: which builds exist, and which of them this CPU can run.

Needs the standard library only: the build of a wheel loads this file by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "kernels" / "cpu_build" / "prebuilt"
"""Where a wheel for Linux on x86-64 holds them. Empty in a source tree and in the wheel for other platforms."""

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of the kernels."""

    name: str
    machine: tuple[str, ...]
    """Compiler flags that choose the instruction sets."""
    needs: frozenset[str]
    """Flags of /proc/cpuinfo that a CPU must have to run it."""

    @property
    def file_name(self) -> str:
        return f"bough_cpu_{self.name}.so"


VARIANTS = (
    Variant(
        "avx512_vnni_bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Variant("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Variant("avx512", ("-march=x86-64-v4",), _V4),
    Variant("avx2", ("-march=x86-64-v3",), _V3),
)
"""Best first."""


def prebuilt_kernels(flags: frozenset[str]) -> Path | None:
    """Path of the best build in `FOLDER` for a CPU with these flags, or None if there is none."""
    paths = (FOLDER / variant.file_name for variant in VARIANTS if variant.needs <= flags)
    return next((path for path in paths if path.exists()), None)
