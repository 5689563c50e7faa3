"""Readers of checkpoints' quantisation configs, one file a method. Needs no torch.

in: the configuration that a checkpoint brings. out: `Rules`, which give every layer its format. never: a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bough.quantization.read.awq import read_awq
from bough.quantization.read.bitsandbytes import read_bitsandbytes
from bough.quantization.read.compressed_tensors import read_compressed_tensors
from bough.quantization.read.fp8 import (
    read_blockwise_int8,
    read_fbgemm_fp8,
    read_fp8,
    read_mxfp8,
    read_w8a8_fp8,
    read_w8a8_int8,
)
from bough.quantization.read.gptq import read_auto_round, read_gptq
from bough.quantization.read.modelopt import read_modelopt
from bough.quantization.read.mxfp4 import read_mxfp4
from bough.quantization.read.rules import Config, KvRule, LayerKind, Rules, refuse
from bough.quantization.read.torchao import read_torchao

__all__ = ["METHODS", "KvRule", "LayerKind", "Rules", "read_rules"]

_READERS: Final[dict[str, Callable[[Config], Rules]]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "mxfp8": read_mxfp8,
    "w8a8_fp8": read_w8a8_fp8,
    "w8a8_int8": read_w8a8_int8,
    "blockwise_int8": read_blockwise_int8,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "bitsandbytes": read_bitsandbytes,
    "torchao": read_torchao,
}
METHODS: Final = tuple(_READERS)
_ALIASES: Final = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
    "gptqmodel": "gptq",
    "deepseek_fp8": "fp8",
}


def read_rules(config: Config) -> Rules:
    """What a quantisation config says. Raises `UnsupportedModel` for what can't be read."""
    given = str(config.get("quant_method") or "").lower()
    if not given and ("quant_algo" in config or "quantization" in config):
        given = "modelopt"
    method = _ALIASES.get(given, given)
    if method not in _READERS:
        raise refuse(
            f"the weights are quantised with {given or 'an unnamed method'!r}, which can't be read",
            f"known: {', '.join(METHODS)}",
            "use the model's unquantised checkpoint, or one of a known method",
        )
    return _READERS[method](config)
