"""The second step of building a model: every layer asks its scheme for the place of its weights, under the layer's name.

A scheme decides by name (some layers of a checkpoint are quantised, others are not), and a layer learns its name from the
tree of modules once that is complete. Names that constructors would pass along could differ from the tree's.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class NeedsPlace(Protocol):
    """A layer with weights that a scheme holds."""

    def place(self, name: str) -> None:
        """Asks the scheme. `name` is the layer's path in the model, `layers.0.qkv`. Called once, before loading."""
        ...


def place_weights(model: nn.Module) -> None:
    """Calls `place` of every layer, in the order of the tree. Afterwards the model's slots can be listed and filled."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NeedsPlace):
            module.place(name)
    _put_modules_at_hand(model)


def _put_modules_at_hand(model: nn.Module) -> None:
    """Modules become ordinary attributes of those they belong to, beside what torch knows of them: it looks for them when
    all else has failed, a dozen times a layer, which is a tenth of what launching a layer takes.

    Torch forgets the attribute when another module is assigned, and then only: modules of a model are never deleted, set to
    None or registered anew. Parameters stay where they are: torch may replace them.
    """
    for module in model.modules():
        vars(module).update(module.named_children())
