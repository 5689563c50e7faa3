"""Which implementation runs where: without custom kernels, none of ours does, on any device and for any operation."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from bough.kernels import choices
from bough.kernels.choices import Choices, Facts
from bough.kernels.cpu_build import shared_library

KERNELS = Path(choices.__file__).parent
HOPPER = torch.device("cuda", 0)


def operations() -> Iterator[tuple[str, str]]:
    """(package, function) of every `pick` in the tree."""
    for file in sorted(KERNELS.glob("*/__init__.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pick":
                name = node.args[0]
                assert isinstance(name, ast.Constant)
                yield file.parent.name, str(name.value)


OPERATIONS = list(operations())


def table_of(package: str) -> Choices:
    found = vars(import_module(f"bough.kernels.{package}"))["_IMPLEMENTATIONS"]
    assert isinstance(found, Choices)
    return found


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one."""
    monkeypatch.setattr(choices, "facts_of", lambda kind, index: Facts(kind, (9, 0) if kind == "cuda" else (0, 0)))
    monkeypatch.setattr(choices, "has_triton", lambda: True)


def test_operations_are_found() -> None:
    assert {"linear", "norm", "sampling", "moe", "pages", "rotary", "activation"} <= {
        package for package, _ in OPERATIONS
    }


@pytest.mark.parametrize(("package", "function"), OPERATIONS)
@pytest.mark.parametrize("device", [HOPPER, torch.device("cpu")], ids=str)
def test_without_custom_kernels_nothing_compiled_runs(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, package: str, function: str, device: torch.device
) -> None:
    monkeypatch.setattr(shared_library, "_forbidden", True)
    shared_library.library.cache_clear()
    try:
        name, chosen = table_of(package).explain(function, device)
    finally:
        shared_library.library.cache_clear()
    source = inspect.getsource(import_module(chosen.__module__))
    assert name == "reference" or not {"cpu_build", "triton"} & set(re.findall(r"\w+", source)), "it compiles nothing"


def test_with_them_triton_runs_on_a_gpu(on_a_gpu: None) -> None:
    pytest.importorskip("triton")
    chosen = {package: table_of(package).explain(function, HOPPER)[0] for package, function in OPERATIONS}
    chosen.pop("packed_linear", None)
    assert set(chosen.values()) == {"triton"}, chosen
