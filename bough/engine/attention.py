"""Attention backends by name, as the runner builds them for a step."""

from __future__ import annotations

from importlib import import_module

from bough.core.errors import ConfigError
from bough.runner.forward import AttentionFactory

_BACKENDS = {
    "torch": ("bough.kernels.attention.torch_backend", "TorchAttention"),
    "cpu": ("bough.kernels.attention.cpu", "CpuAttention"),
    "triton": ("bough.kernels.attention.triton_backend", "TritonAttention"),
}


def attention_factory(name: str) -> AttentionFactory:
    """The backend's class: called with a step's AttentionInputs, it gives the step's attention."""
    if name not in _BACKENDS:
        raise ConfigError(
            what=f"there is no attention backend {name!r}",
            why=f"there are: {', '.join(_BACKENDS)}",
            fix="leave --attention-backend out, or choose one of them",
            param="attention_backend",
        )
    module, attribute = _BACKENDS[name]
    factory: AttentionFactory = vars(import_module(module))[attribute]
    return factory
