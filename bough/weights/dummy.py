"""Random weights of the right shapes, made where they live. For load tests: no bytes are read and none are copied."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from bough.config.concerns import DummyWeights

_STD = 0.02
_REACH = 1e-3


@torch.no_grad()
def fill_dummy(model: nn.Module, seed: int, drawn: DummyWeights = "normal") -> None:
    """Fills every parameter from its own generator, seeded by `seed` and its name.

    All ranks of a mesh draw alike for a name, so what they hold in common is equal. Norm weights become 1 and biases 0;
    everything else is small, so that logits stay finite.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if drawn == "even":
            parameter.uniform_(-_REACH, _REACH, generator=generator)
        else:
            parameter.normal_(0.0, _STD, generator=generator)
