"""Parts of a model that another stage of the pipeline holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from bough.layers.build import Build
from bough.layers.place import NeedsPlace
from bough.weights.slots import Slot, owners_of, pass_over


class Elsewhere(nn.Module):
    """Stands where a part would be: takes no memory and computes nothing. Its weights in the checkpoint are passed over,
    unread, so that a missing or leftover tensor is still found on every stage."""

    def __init__(self, make: Callable[[Build], nn.Module], build: Build) -> None:
        super().__init__()
        self._make = make
        self._build = replace(build, device=torch.device("meta"))
        self._slots: dict[str, Slot] = {}

    def place(self, name: str) -> None:
        part = self._make(self._build)
        for below, module in list(part.named_modules()):
            if isinstance(module, NeedsPlace):
                module.place(f"{name}.{below}" if below else name)
        for owner in owners_of(part):
            self._slots |= {each: replace(slot, put=pass_over, check=None) for each, slot in owner.slots.items()}

    def slots(self) -> dict[str, Slot]:
        return self._slots
