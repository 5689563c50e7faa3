# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What Triton launches share: facts of the device, programmatic dependent launch, a short way past Triton's own, rounding
to powers of two.

Programmatic dependent launch (Hopper and later): a kernel may start while the one before it still runs. It calls `wait`
before it touches anything another kernel writes, or writes anything another kernel may read; before that it may only read
what no kernel of the step changes (weights), or only one that waits and does not trigger (the step's inputs, its plan).
`trigger` lets the next kernel start. A kernel that never calls `wait` must not be launched with `pdl_options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bough.kernels.ahead import is_rehearsing
from bough.kernels.choices import facts_of
from bough.kernels.cuda_source import current_stream


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
    """Whether kernels are launched with their constant `PDL`."""
    facts = facts_of(device.type, device.index)
    return facts.capability >= (9, 0) and torch.version.hip is None


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch arguments: the constexpr `PDL` of a kernel and the attribute that goes with it."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(device) else {"PDL": False}


_ALIGNMENT = 16
"""Bytes: Triton compiles one form of a kernel for pointers to a multiple of this, and another for the rest."""

_MOST_COUNT = 2**31 - 1
"""Triton compiles a kernel one way for integers of 32 bits, and another way for larger ones."""


class Launcher:
    """Launches a kernel whose parameters are tensors, then integers, then counts (integers that Triton was asked not to
    specialise it for), then floats, then constants (`tl.constexpr`).

    At every launch Triton finds out anew which of a kernel's compiled forms its arguments ask for, and takes longer over it
    than over the launch. It goes by tensors' dtypes and alignment, by properties of integers and by the constants; a form is
    kept here by all of these, integers by their values, and is launched as it is where they are all the same. Where a tensor
    isn't aligned, on AMD's devices (where it also matters how large a tensor is), in the interpreter, and with a Triton that
    calls its launchers otherwise, Triton launches.

    Hooks that Triton would call around a launch are not called.
    """

    MOST_FORMS = 4096

    def __init__(self, kernel: Any) -> None:
        """`kernel`: a function with `triton.jit`."""
        self._kernel = kernel
        self._is_short = True
        self._forms: dict[tuple[object, ...], tuple[Any, Any, Any, CompiledKernel]] = {}
        """Per form: its launcher, its handle, its packed metadata, and the form, which would be unloaded otherwise."""

    def launch(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        integers: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[object, ...],
        num_warps: int,
        counts: tuple[int, ...] = (),
    ) -> None:
        """`constants`: all but `PDL`, which is the last. `counts`, of what differs from step to step, aren't negative."""
        device = tensors[0].device
        pdl = has_pdl(device)
        constants = (*constants, pdl)
        pointers, bits = [], 0
        for tensor in tensors:
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        key = (device, num_warps, integers, constants, *[tensor.dtype for tensor in tensors])
        usual = self._is_short and bits % _ALIGNMENT == 0 and (not counts or max(counts) <= _MOST_COUNT)
        form = self._forms.get(key) if usual and not is_rehearsing() else None
        if form is not None:
            run, function, metadata, _ = form
            given = (*pointers, *integers, *counts, *floats, *constants)
            try:
                run(*grid, 1, current_stream(device), function, metadata, None, None, None, *given)
                return
            except TypeError:  # launchers of this Triton take something else, and have launched nothing
                self._is_short = False
        # By type, so that the form fits all numbers that are equal: True is 1, and 1 is 1.0.
        numbers = (*map(int, integers), *map(int, counts), *map(float, floats))
        options = {"launch_pdl": True} if pdl else {}
        made = self._kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps, **options)
        if usual and isinstance(made, CompiledKernel) and _is_current(device):
            first = len(tensors) + len(integers)
            for parameter in self._kernel.params[first : first + len(counts)]:
                if not parameter.do_not_specialize:
                    raise ValueError(f"{parameter.name} must be in the kernel's do_not_specialize")
            if len(self._forms) >= self.MOST_FORMS:
                self._forms.clear()
            self._forms[key] = made.run, made.function, made.packed_metadata, made


def _is_current(device: torch.device) -> bool:
    """Whether Triton launches on this one."""
    return torch.version.hip is None and torch.cuda.current_device() == device.index


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
