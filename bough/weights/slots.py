"""What a layer takes from a checkpoint. A layer lists its slots; filling one hands it the whole stored tensor, and the layer
copies the share its rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from bough.weights.stored import Stored


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor, as it stands in the checkpoint, not of this rank's share."""
    put: Callable[[Stored], None]
    """Copies what this rank needs. Called once, from any thread."""
    optional: bool = False
    """A checkpoint may leave it out (an output head that repeats the embedding)."""


@runtime_checkable
class TakesWeights(Protocol):
    """A module with parameters of its own."""

    def slots(self) -> dict[str, Slot]:
        """By name below this module: `weight`, `q.weight`, `3.gate.weight` ..."""
        ...


@runtime_checkable
class FinishesLoading(Protocol):
    """A module with work to do once all its slots are filled. Called once, from any thread."""

    def finish_loading(self) -> None: ...


def model_slots(model: nn.Module) -> dict[str, Slot]:
    """All slots of a model by full name, `layers.0.qkv.q.weight`."""
    return {
        f"{path}.{name}" if path else name: slot
        for path, module in model.named_modules()
        if isinstance(module, TakesWeights)
        for name, slot in module.slots().items()
    }
