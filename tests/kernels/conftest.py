"""What the tests of kernels' doors have in common."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The stream that launches go to, where there is no device."""
    found = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: found.cuda_stream, raising=False)
    return found
