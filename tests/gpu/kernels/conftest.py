"""The table of kernel cases of tests/kernels, for the tests here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    path = Path(__file__).parents[2] / "kernels" / "triton_cases.py"
    spec = importlib.util.spec_from_file_location("triton_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_cases"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
