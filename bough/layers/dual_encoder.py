"""Two encoders with one space of vectors. T tokens, D width of the text encoder, W width of the vectors."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from bough.layers.batch import Batch
from bough.layers.decoder import Decoder
from bough.layers.tower import Tower


class DualEncoder(nn.Module):
    """From tokens to vectors: those of texts are computed here, those of images were made by the tower."""

    def __init__(self, text: Decoder, project: nn.Module, tower: Tower) -> None:
        super().__init__()
        self.text = text
        self.project = project
        self.tower: Tower | None = tower

    def forward(self, batch: Batch) -> Tensor:
        media = batch.media
        out_TW: Tensor = self.project(self.text(replace(batch, media=None)))
        if media is not None:
            out_TW.index_copy_(0, media.at_M, media.values_MW)
        return out_TW
