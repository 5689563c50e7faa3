"""Which implementation of an operation runs on a device: a table that says what each one needs, first match wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from bough.kernels.cpu_build.shared_library import custom_kernels_allowed


@dataclass(frozen=True, slots=True)
class Facts:
    """What a choice may depend on."""

    device_type: str
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) elsewhere."""


Need = Callable[[Facts], bool]


def anywhere(_: Facts) -> bool:
    return True


def cpu(facts: Facts) -> bool:
    return facts.device_type == "cpu"


def cuda(major: int = 8, minor: int = 0) -> Need:
    """A CUDA device of at least this compute capability, with Triton installed and kernels of our own allowed."""

    def needs(facts: Facts) -> bool:
        fits = facts.device_type == "cuda" and facts.capability >= (major, minor)
        return fits and has_triton() and custom_kernels_allowed()

    return needs


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def facts_of(device_type: str, index: int | None) -> Facts:
    capability = torch.cuda.get_device_capability(index) if device_type == "cuda" else (0, 0)
    return Facts(device_type, capability)


@dataclass(frozen=True, slots=True)
class Choice:
    """One implementation: a module that offers some or all functions of the operation.

    A module with a function `available()` is used only where that returns True (say, because a build succeeded).
    """

    name: str
    module: str
    needs: Need = anywhere

    def offers(self, function: str, facts: Facts) -> Callable[..., Any] | None:
        if not self.needs(facts) or find_spec(self.module) is None:
            return None
        module = import_module(self.module)
        names = vars(module)
        if function not in names or ("available" in names and not module.available()):
            return None
        found: Callable[..., Any] = names[function]
        return found


class Choices:
    """The implementations of one operation, best first. The last one must work anywhere and offer every function."""

    def __init__(self, *choices: Choice) -> None:
        self._choices = choices
        self._picked: dict[tuple[str, torch.device], Callable[..., Any]] = {}

    def pick(self, function: str, device: torch.device) -> Callable[..., Any]:
        """The function to call on tensors of `device`. Decided on the first call."""
        key = (function, device)
        found = self._picked.get(key)
        if found is None:
            found = self._picked[key] = self.explain(function, device)[1]
        return found

    def explain(self, function: str, device: torch.device) -> tuple[str, Callable[..., Any]]:
        """The name of the implementation that `pick` uses, and its function."""
        facts = facts_of(device.type, device.index)
        for choice in self._choices:
            found = choice.offers(function, facts)
            if found is not None:
                return choice.name, found
        raise LookupError(f"no implementation of {function} on {device}")


def standard(package: str) -> Choices:
    """Triton on CUDA, the package's `cpu` module on the CPU where it has one, the reference everywhere else."""
    return Choices(
        Choice("triton", f"{package}.triton", needs=cuda()),
        Choice("cpu", f"{package}.cpu", needs=cpu),
        Choice("reference", f"{package}.reference"),
    )
