"""Which layers of a model are alike: those of one kind launch the same kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn

_PLACES = frozenset({"layer", "index", "number"})
"""Attributes that say which layer it is: they choose memory, not kernels."""
_DEPTH = 3
"""Of objects in objects that are looked at."""


def unlike_layers(layers: Sequence[nn.Module]) -> frozenset[int]:
    """The numbers of a few layers in which every kind follows every kind that it follows somewhere, with the first and the
    last: what a layer launches may depend on what the one before has left to it."""
    kinds = [kind_of(layer) for layer in layers]
    chosen: list[int] = []
    seen: set[tuple[Hashable, Hashable]] = set()
    for number, kind in enumerate(kinds):
        before = kinds[number - 1] if number else None
        if number and number != len(kinds) - 1 and (before, kind) in seen:
            continue
        if number and kinds[chosen[-1]] != before:
            chosen.append(number - 1)
        chosen.append(number)
        seen.add((before, kind))
    return frozenset(chosen)


def kind_of(layer: nn.Module) -> Hashable:
    """Equal for layers whose modules are of the same types, with the same settings and tensors of the same shapes."""
    return tuple((name, *_kind(module, _DEPTH)) for name, module in layer.named_modules())


def _kind(value: Any, depth: int) -> tuple[Hashable, ...]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return (value,)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.data_ptr() % 16 == 0
    name = type(value).__qualname__
    if not depth:
        return (name,)
    if isinstance(value, nn.Module):
        held = {**value._parameters, **value._buffers}
        held |= {key: each for key, each in vars(value).items() if not key.startswith("_")}
    elif isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        held = {str(at): each for at, each in enumerate(value)}
    elif dataclasses.is_dataclass(value):
        held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, msgspec.Struct):
        held = {each: getattr(value, each) for each in value.__struct_fields__}
    elif hasattr(value, "_asdict"):
        held = value._asdict()
    else:
        held = {}
    return name, *((key, _kind(each, depth - 1)) for key, each in held.items() if key not in _PLACES)
