"""MXFP4 as gpt-oss stores its experts: all of a layer's in one tensor."""

from __future__ import annotations

from bough.quantization.formats import Four, WeightFormat
from bough.quantization.read.rules import Config, LayerKind, Rules, skips, words


def read_mxfp4(config: Config) -> Rules:
    weight = Four("mx", weight="blocks", scale="scales")
    skipped = skips(words(config, "modules_to_not_convert"), style="exact")

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        return weight if kind == "expert" and not skipped(name) else None

    return Rules("mxfp4", "MXFP4 experts", of)
