"""Makes steps of a server's engine fail on purpose. Python imports this file at its start if PYTHONPATH names its directory.

BOUGH_FAULTS is `kind@step[,kind@step...]`, with the kinds oom, raise and kill. `kind@TOKEN:t` is the first step that brings
token id t in. The faults of kind oom and raise happen once each.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.core.step import Launched, Runner, Step

_PATCHED = "bough.engine.watch"
"""Its `observe` wraps the engine's runner; the faults go between the two."""


class FaultyRunner:
    """A `Runner` whose steps fail."""

    def __init__(self, inner: Runner, faults: list[tuple[str, int, int]]) -> None:
        """`faults`: (kind, step or -1, token or -1)."""
        self._inner = inner
        self._faults = faults

    def launch(self, step: Step) -> Launched:
        for fault in list(self._faults):
            kind, at, token = fault
            if step.index == at or (token >= 0 and token in step.tokens):
                self._faults.remove(fault)
                _strike(kind)
        return self._inner.launch(step)

    def clear(self) -> None:
        self._inner.clear()


def _fault(text: str) -> tuple[str, int, int]:
    kind, _, where = text.partition("@")
    number = int(where.removeprefix("TOKEN:"))
    return (kind, -1, number) if where.startswith("TOKEN:") else (kind, number, -1)


def _strike(kind: str) -> None:
    import torch

    match kind:
        case "oom":
            raise torch.OutOfMemoryError("no memory, on purpose")
        case "raise":
            raise RuntimeError("failed on purpose")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise ValueError(f"there is no fault {kind}")


class _Finder(importlib.abc.MetaPathFinder):
    """Patches the module when it is imported: importing it here would bring torch into every process."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run: Callable[[ModuleType], None] = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            observe = module.observe
            faults = [_fault(each) for each in os.environ["BOUGH_FAULTS"].split(",")]

            def faulty(runner: Runner, *more: Any) -> Any:
                return observe(FaultyRunner(runner, faults), *more)

            vars(module)["observe"] = faulty

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "BOUGH_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder())
