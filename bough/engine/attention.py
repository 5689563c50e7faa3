"""Attention backends by name, as the runner builds them for a step."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from bough.core.errors import ConfigError
from bough.core.step import SpanCosts
from bough.kernels.attention import AttentionInputs, Spec
from bough.layers.batch import AttentionBackend
from bough.runner.context import AttentionFactory

_PER_STEP = {
    "torch": ("bough.kernels.attention.torch_backend", "TorchAttention"),
    "cpu": ("bough.kernels.attention.cpu", "CpuAttention"),
    "whole": ("bough.kernels.attention.whole", "WholeAttention"),
}
_PER_DEVICE = ("hopper", "triton")


def attention_factory(name: str, device: torch.device) -> AttentionFactory:
    """What gives a step its attention: a new object, or the device's own one updated for the step."""
    if name in _PER_STEP:
        factory: AttentionFactory = _named(*_PER_STEP[name])
        return factory
    if name in _PER_DEVICE:
        backend = _named("bough.kernels.attention.triton_backend", "TritonAttention")(device, hopper=name == "hopper")

        def prepared(inputs: AttentionInputs) -> AttentionBackend:
            backend.prepare(inputs)
            return backend  # type: ignore[no-any-return]

        return prepared
    raise ConfigError(
        what=f"there is no attention backend {name!r}",
        why=f"there are: {', '.join((*_PER_STEP, *_PER_DEVICE))}",
        fix="leave --attention-backend out, or choose one of them",
        param="attention_backend",
    )


def span_costs(name: str, specs: Sequence[Spec], kv_bytes: float) -> SpanCosts | None:
    """What shared spans cost the layers of a model, by those that see all of their KV. `kv_bytes`: of one number."""
    spec = next((s for s in specs if s.window is None and s.chunk is None and s.causal), None)
    if spec is None:
        return None
    costs: SpanCosts | None = None
    if name in _PER_DEVICE:
        costs = _named("bough.kernels.attention.triton_backend", "span_costs")(spec, kv_bytes)
    elif name == "cpu":
        costs = _named("bough.kernels.attention.cpu", "SPANS")
    return costs


def _named(module: str, name: str) -> Any:
    return vars(import_module(module))[name]
