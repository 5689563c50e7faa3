"""Layouts of quantised weights in checkpoints, one family a file.

in: a format (data) and the checkpoint's headers. out: which tensors a weight has, and `Codes` from them. never: a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

from bough.config.hf import StoredShape
from bough.quantization.formats import (
    Awq,
    BitsAndBytes4,
    BitsAndBytes8,
    Eight,
    Four,
    Gptq,
    Online,
    PackedInts,
    WeightFormat,
)
from bough.quantization.layouts.bnb import BitsAndBytes4Layout, BitsAndBytes8Layout
from bough.quantization.layouts.eight import EightLayout
from bough.quantization.layouts.four import FourLayout
from bough.quantization.layouts.ints import AwqLayout, GptqLayout, PackedIntsLayout
from bough.quantization.layouts.layout import WeightLayout

__all__ = ["WeightLayout", "layout_of"]


def layout_of(form: WeightFormat, name: str, headers: Mapping[str, StoredShape]) -> WeightLayout:
    """The layout of the layer `name`; what the configuration leaves open is taken from the headers of its tensors."""
    match form:
        case Eight():
            return EightLayout(form)
        case Awq():
            return AwqLayout(form)
        case Gptq():
            return GptqLayout(form)
        case PackedInts():
            return PackedIntsLayout(form, straddles=_straddles(form, name, headers))
        case Four():
            return FourLayout(form)
        case BitsAndBytes4():
            state = headers.get(f"{name}.weight_quant_state")
            nested = f"{name}.weight_nested_absmax" in headers
            return BitsAndBytes4Layout(form, nested=nested, state_bytes=state.shape[0] if state else 0)
        case BitsAndBytes8():
            return BitsAndBytes8Layout(form)
        case Online():
            raise ValueError("a checkpoint stores nothing for weights that are quantised while loading")


def _straddles(form: PackedInts, name: str, headers: Mapping[str, StoredShape]) -> bool:
    """Whether codes of 3, 5, 6 or 7 bits fill words without a gap: read from the width of the packed tensor, where groups
    give the number of columns."""
    packed, scale = headers.get(f"{name}.weight_packed"), headers.get(f"{name}.weight_scale")
    if 32 % form.bits == 0 or packed is None or scale is None or form.group <= 0:
        return 32 % form.bits != 0
    return packed.shape[-1] == -(-scale.shape[-1] * form.group * form.bits // 32)
