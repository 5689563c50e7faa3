"""Gemma 3n's towers: MobileNet-V5 sees, the Universal Speech Model's encoder hears, and both end in an embedder.

M positions, V tokens of a tower's own, C width of the tower, D width of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.gemma3n_media import Gemma3nMedia, MediaVocabFacts
from bough.kernels.norm import rms_norm
from bough.layers.build import Build
from bough.layers.norm import fill
from bough.layers.tower import Normaliser, Tower, TowerInput, alone
from bough.models.mobilenet_v5 import MobileNetV5
from bough.models.usm_encoder import UsmEncoder
from bough.weights.dummy import DummyDraw
from bough.weights.slots import Slot


class MediaEmbedder(nn.Module):
    """Brings what a tower makes (*soft* tokens), and the vectors of its own tokens (*hard* ones), to the language model."""

    def __init__(self, facts: MediaVocabFacts, hard_VD: Tensor, build: Build) -> None:
        """`hard_VD`: filled with what becomes of the tower's own tokens, once the weights are there."""
        super().__init__()
        self.eps, self.hard_VD = facts.eps, hard_VD

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)

        self.tokens = parameter(facts.count, facts.width)
        self.hard_norm, self.soft_norm = parameter(facts.width), parameter(facts.width)
        self.project = parameter(hard_VD.shape[1], facts.width)
        self.ones_D: Tensor
        self.register_buffer("ones_D", torch.ones_like(hard_VD[0]), persistent=False)

    def slots(self) -> dict[str, Slot]:
        return {
            f"{name}.weight": Slot(tuple(each.shape), partial(fill, each)) for name, each in self.named_parameters()
        }

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        for own, each in self.named_parameters():
            if each.dim() == 1:
                each.fill_(1.0)
            else:
                draw.fill(f"{name}.{own}", each)
        self.finish_loading()

    def finish_loading(self) -> None:
        self.hard_VD.copy_(self._projected(self.tokens, self.hard_norm))

    def forward(self, x_MC: Tensor) -> Tensor:
        return self._projected(x_MC, self.soft_norm)

    def _projected(self, x_MC: Tensor, weight_C: Tensor) -> Tensor:
        return rms_norm(F.linear(rms_norm(x_MC, weight_C, self.eps), self.project), self.ones_D, self.eps)


class Gemma3nTower(Tower):
    """Grids of sounds are one number, their frames; those of images are the rows and columns of their positions."""

    def __init__(self, facts: Gemma3nMedia, width: int, build: Build) -> None:
        """`width`: of the language model."""
        super().__init__()
        build = alone(build)
        self.facts, self.width = facts, width
        images, sounds = facts.image_vocab, facts.sound_vocab
        self.first_token = images.first
        self.hard_VD: Tensor
        """What becomes of tokens from `first_token` on, which are no rows of the language model's table."""
        hard = torch.zeros(images.count + sounds.count, width, dtype=build.dtype, device=build.device)
        self.register_buffer("hard_VD", hard, persistent=False)
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.seeing = MobileNetV5(facts.seeing, build)
        self.embed_images = MediaEmbedder(images, hard[: images.count], build)
        self.hearing = UsmEncoder(facts.hearing, build)
        self.embed_sounds = MediaEmbedder(sounds, hard[images.count :], build)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        sounds = [item for item in items if len(item.grid) == 1]
        images = [item for item in items if len(item.grid) > 1]
        heard = iter(self._heard(sounds) if sounds else ())
        seen = iter(self._seen(images) if images else ())
        return torch.cat([next(heard if len(item.grid) == 1 else seen) for item in items])

    def _seen(self, images: Sequence[TowerInput]) -> list[Tensor]:
        """[M, D] of each."""
        pixels = torch.cat([self.normalise(item.features) for item in images]).to(self.hard_VD.dtype)
        places = self.seeing(pixels).flatten(1, 2)
        return list(self.embed_images(places * self.facts.seeing.out**0.5))

    def _heard(self, sounds: Sequence[TowerInput]) -> list[Tensor]:
        """[M, D] of each: behind a sound stands the token that fills."""
        parts = self.hearing([item.features for item in sounds])
        made = torch.split(self.embed_sounds(torch.cat(parts)), [len(part) for part in parts])
        filler_1D = self.hard_VD[None, self.facts.image_vocab.count + self.facts.filler]
        return [torch.cat((each, filler_1D.expand(self.facts.sound_positions - len(each), -1))) for each in made]
