"""Random weights of the right shapes, made where they live. For load tests: no bytes are read and none are copied."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bough.config.concerns import DummyWeights

_STD = 0.02
_REACH = 1e-3


@dataclass(frozen=True, slots=True)
class DummyDraw:
    """Draws tensors by name: all ranks of a mesh draw alike for a name, so what they hold in common is equal."""

    seed: int
    drawn: DummyWeights = "normal"

    def generator(self, name: str, device: torch.device) -> torch.Generator:
        """Seeded by `seed` and the name."""
        return torch.Generator(device=device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def fill(self, name: str, target: Tensor) -> None:
        """Fills a tensor of floats with small numbers, so that logits stay finite."""
        generator = self.generator(name, target.device)
        if self.drawn == "even":
            target.uniform_(-_REACH, _REACH, generator=generator)
        else:
            target.normal_(0.0, _STD, generator=generator)


@runtime_checkable
class DrawsDummies(Protocol):
    """A module whose parameters are not plain floats (packed or scaled weights) and which draws them itself."""

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        """Fills all parameters of the module, which is called `name`, so that its weights are worth about what
        `draw.fill` would have drawn."""
        ...


@torch.no_grad()
def fill_dummy(model: nn.Module, seed: int, drawn: DummyWeights = "normal") -> None:
    """Fills every parameter: norm weights become 1 and biases 0, everything else is drawn."""
    draw = DummyDraw(seed, drawn)
    filled: set[int] = set()
    drawn_by_itself: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if drawn_by_itself and path.startswith(drawn_by_itself):
            continue
        if isinstance(module, DrawsDummies):
            module.draw_dummies(path, draw)
            drawn_by_itself += (f"{path}.",)
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in filled:  # tied to another one
                continue
            filled.add(id(parameter))
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                draw.fill(name, parameter)
