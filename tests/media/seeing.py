"""Tiny models that see, loaded once for all tests of a file."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tiny_vision import FAMILIES, make_seeing
from transformers import PreTrainedModel

from bough.config.hf import Checkpoint, open_checkpoint
from bough.layers.decoder import Decoder
from bough.layers.tower import Tower
from bough.models.load import build_model
from bough.multimodal.families import processor_of
from bough.multimodal.processor import Processor

CPU = torch.device("cpu")
NAMES = list(FAMILIES)


@dataclass(frozen=True)
class Seeing:
    """A model of ours, the one of transformers that it was made from, and the processor."""

    name: str
    checkpoint: Checkpoint
    reference: PreTrainedModel
    model: Decoder
    processor: Processor

    @property
    def tower(self) -> Tower:
        assert self.model.tower is not None
        return self.model.tower


@cache
def load(name: str) -> Seeing:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    reference = make_seeing(name, folder)
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=256)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    assert processor is not None
    return Seeing(name, checkpoint, reference, model, processor)
