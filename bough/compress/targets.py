"""What a checkpoint can be written as, and how compressed-tensors stores each. O rows, D columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from bough.compress.grid import plain_grid
from bough.kernels.packed_linear import Codes
from bough.quantization.formats import Online
from bough.quantization.quantise import quantise

Method = Literal["nearest", "gptq", "awq"]
Stored = dict[str, Tensor]
"""The tensors of one weight, by the last word of their names."""


@dataclass(frozen=True, slots=True)
class Target:
    """A form to write weights in."""

    about: str
    form: str
    """compressed-tensors' name of the format."""
    weights: dict[str, Any]
    """Its quantisation arguments of weights, and of activations."""
    inputs: dict[str, Any] | None
    store: Callable[[Tensor, int], Stored]
    """The tensors of a weight [O, D] in float32, or of what another method has put on the grid; the group's size."""
    method: Method = "nearest"
    grouped: bool = False
    """Whether columns come in groups of a size that can be chosen."""

    def fits(self, shape: tuple[int, ...], group: int) -> bool:
        """Words and groups must be whole."""
        return not self.grouped or (shape[0] % _WORD == 0 and shape[1] % group == 0)

    def config(self, group: int, ignore: list[str]) -> dict[str, Any]:
        """A checkpoint's `quantization_config`."""
        weights = {**self.weights, **({"group_size": group} if self.grouped else {})}
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": self.inputs}},
            "ignore": ignore,
        }


_WORD: Final = 8
"""Codes of 4 bits in a word."""
_EIGHT: Final = {"num_bits": 8, "dynamic": False, "symmetric": True}
_TOKEN: Final = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_FOUR: Final = {"num_bits": 4, "type": "int", "strategy": "group", "dynamic": False, "symmetric": False}


def _fp8(weight_OD: Tensor, group: int) -> Stored:
    codes = quantise(Online("fp8"), weight_OD)
    return {"weight": codes.values_OD, "weight_scale": codes.scale_OG}


def _fp8_block(weight_OD: Tensor, group: int) -> Stored:
    codes = quantise(Online("fp8_block"), weight_OD)
    return {"weight": codes.values_OD, "weight_scale": codes.scale_OG}


def _int8(weight_OD: Tensor, group: int) -> Stored:
    codes = quantise(Online("int8_weight"), weight_OD)
    return {"weight": (codes.values_OD ^ 128).view(torch.int8), "weight_scale": codes.scale_OG}


def _int8_weight(weight_OD: Tensor, group: int) -> Stored:
    codes = quantise(Online("int8_weight"), weight_OD)
    return {
        "weight_packed": words(codes.values_OD, 8),
        "weight_scale": codes.scale_OG,
        "weight_shape": torch.tensor(weight_OD.shape),
    }


def _int4(weight_OD: Tensor, group: int) -> Stored:
    kept = torch.bfloat16 if weight_OD.dtype == torch.bfloat16 else torch.float16
    weight = weight_OD.float()
    return packed_ints(plain_grid(weight, 4, group, kept).nearest(weight))


def packed_ints(codes: Codes) -> Stored:
    """Codes of 4 bits with zero points."""
    zero = torch.full_like(codes.scale_OG, 8, dtype=torch.uint8) if codes.zero_OG is None else codes.zero_OG
    return {
        "weight_packed": words(codes.values_OD, 4),
        "weight_scale": codes.scale_OG,
        "weight_zero_point": words(zero.T.contiguous(), 4).T,
        "weight_shape": torch.tensor(codes.shape),
    }


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [R, C * bits / 32]: codes of a row one after the other, the first in the lowest bits."""
    count = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % count))
    each = padded.view(codes.shape[0], -1, count).to(torch.int64)
    packed = (each << torch.arange(0, 32, bits, device=codes.device)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


TARGETS: Final[dict[str, Target]] = {
    "fp8": Target(
        "FP8, a scale per channel, activations per token",
        "float-quantized",
        {**_EIGHT, "type": "float", "strategy": "channel"},
        {**_TOKEN, "type": "float"},
        _fp8,
    ),
    "fp8-block": Target(
        "FP8, a scale per 128 x 128, activations per 128 channels",
        "float-quantized",
        {**_EIGHT, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        {**_TOKEN, "type": "float", "strategy": "group", "group_size": 128},
        _fp8_block,
    ),
    "int8": Target(
        "INT8, a scale per channel, activations per token",
        "int-quantized",
        {**_EIGHT, "type": "int", "strategy": "channel"},
        {**_TOKEN, "type": "int"},
        _int8,
    ),
    "int8-weight": Target(
        "INT8, a scale per channel, activations as they are",
        "pack-quantized",
        {**_EIGHT, "type": "int", "strategy": "channel"},
        None,
        _int8_weight,
    ),
    "int4": Target("INT4 in groups, rounded to the nearest", "pack-quantized", _FOUR, None, _int4, grouped=True),
    "int4-gptq": Target("INT4 in groups by GPTQ", "pack-quantized", _FOUR, None, _int4, method="gptq", grouped=True),
    "int4-awq": Target("INT4 in groups by AWQ", "pack-quantized", _FOUR, None, _int4, method="awq", grouped=True),
}
