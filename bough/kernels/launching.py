# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What Triton launches share: facts of the device, programmatic dependent launch, rounding to powers of two.

Programmatic dependent launch (Hopper and later): a kernel may start while the one before it still runs. It calls `wait`
before it touches anything another kernel writes, or writes anything another kernel may read; before that it may only read
what no kernel of the step changes (weights, the step's plan). `trigger` lets the next kernel start. A kernel that never
calls `wait` must not be launched with `pdl_options`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bough.kernels.choices import facts_of


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a few on the CPU, where the interpreter runs kernels in tests."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 3


@cache
def shared_bytes_per_sm(device: torch.device) -> int:
    """Shared memory of a multiprocessor; plenty on the CPU, where the interpreter knows none."""
    if device.type != "cuda":
        return 1 << 20
    if torch.version.hip is not None:
        return 64 << 10  # older builds for AMD don't tell
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


@cache
def has_pdl(device: torch.device) -> bool:
    facts = facts_of(device.type, device.index)
    return facts.capability >= (9, 0) and torch.version.hip is None


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch arguments: the constexpr `PDL` of a kernel and the attribute that goes with it."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}


def cdiv(number: int, by: int) -> int:
    """Rounded up. Triton's own takes a hundred times as long, which is a tenth of what a launch does."""
    return -(-number // by)


@cache
def power_of_two(n: int, at_least: int = 1) -> int:
    return max(at_least, 1 << max(n - 1, 0).bit_length())


@cache
def warps_for(elements: int, per_thread: int = 8, most: int = 16) -> int:
    """Warps so that each thread holds about `per_thread` of a program's elements."""
    return min(most, power_of_two(cdiv(elements, 32 * per_thread)))


@triton.jit
def wait(PDL: tl.constexpr):
    """Everything earlier kernels wrote is visible after this."""
    if PDL:
        gdc_wait()


@triton.jit
def trigger(PDL: tl.constexpr):
    """The next kernel may start (and must `wait` before it reads what this one writes)."""
    if PDL:
        gdc_launch_dependents()
