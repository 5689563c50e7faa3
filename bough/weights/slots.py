"""What a layer takes from a checkpoint. A layer lists its slots; filling one hands it the whole stored tensor, and the layer
copies the share its rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    outputs: int | None = 0
    """The dimension that runs along a layer's outputs, where a tensor of several layers is cut; None: they share it."""
    head_rows: int = 0
    """Rows of one head, in layers made of heads: some checkpoints store a head's queries, keys and values together."""
    also: tuple[tuple[int, ...], ...] = ()
    """Other shapes that the tensor may have, where it is not cut."""
    kinds: frozenset[str] | None = None
    """The types it may be stored in; None: any."""
    check: Callable[[Stored], None] | None = None
    """Reads a small tensor (scales) and raises `WeightsError` if it can't be right. Called before anything is filled."""


def pass_over(stored: Stored) -> None:
    """Fills nothing: the tensor is another rank's."""


def also_into(slot: Slot, other: Slot) -> Slot:
    """A slot that fills another one of the same kind, too, with the same tensor."""

    def put(stored: Stored) -> None:
        slot.put(stored)
        other.put(stored)

    return replace(slot, put=put)


@runtime_checkable
class TakesWeights(Protocol):
    """A module with parameters of its own."""

    def slots(self) -> dict[str, Slot]:
        """By name below this module: `weight`, `q.weight`, `3.gate.weight` ..."""
        ...


@runtime_checkable
class FinishesLoading(Protocol):
    """A module with work to do once all its slots are filled. Called once, from any thread, as soon as they are: what a
    module keeps until then is gone before the next modules' weights are read."""

    def finish_loading(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Owner:
    """A module of a model that takes weights."""

    path: str
    slots: dict[str, Slot]
    """By full name, `layers.0.qkv.q.weight`."""
    finishers: tuple[FinishesLoading, ...]
    """What finishes once the slots are filled: the module itself and those it is made of."""


def owners_of(model: nn.Module) -> list[Owner]:
    """All modules that take weights, in the order of the model; each finisher with the first that has it."""
    owners: list[Owner] = []
    claimed: set[int] = set()
    for path, module in model.named_modules():
        parts = [part for part in module.modules() if isinstance(part, FinishesLoading) and id(part) not in claimed]
        if not isinstance(module, TakesWeights):
            continue
        claimed |= {id(part) for part in parts}
        slots = {f"{path}.{name}" if path else name: slot for name, slot in module.slots().items()}
        owners.append(Owner(path, slots, tuple(parts)))
    return owners
