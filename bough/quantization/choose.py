"""Which scheme a checkpoint gets."""

from __future__ import annotations

import torch

from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError, UnsupportedModel
from bough.kernels.packed_linear import supported
from bough.quantization.gguf_packed import GgufPacked
from bough.quantization.scheme import Scheme
from bough.quantization.unquantized import Unquantized
from bough.weights.stored import DENSE_KINDS

KNOWN = ("auto", "none", "gguf")


def choose_scheme(checkpoint: Checkpoint, quantization: str, device: torch.device) -> Scheme:
    """`auto` follows the checkpoint where a kernel for its format runs on `device`; `none` dequantises on load."""
    if quantization not in KNOWN:
        raise ConfigError(
            what=f"there is no weight scheme {quantization!r}",
            why=f"known: {', '.join(KNOWN)}",
            fix="check --quantization",
        )
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    if method and checkpoint.kind != "config-only":
        raise UnsupportedModel(
            what=f"the weights of {checkpoint.name} are quantised with {method!r}, which can't be read",
            why=f"known: {', '.join(KNOWN[1:])}",
            fix="use the model's unquantised or GGUF checkpoint",
        )
    if quantization == "gguf" and checkpoint.kind != "gguf":
        raise ConfigError(
            what="--quantization gguf needs a .gguf file", why=f"{checkpoint.name} is a {checkpoint.kind} checkpoint"
        )
    if quantization == "none" or checkpoint.kind != "gguf":
        return Unquantized()
    kinds = {tensor.kind for tensor in checkpoint.tensors.values()} - DENSE_KINDS
    if any(supported(kind, device) for kind in kinds):
        return GgufPacked()
    if quantization == "gguf":
        raise ConfigError(
            what=f"packed {', '.join(sorted(kinds)) or 'GGUF'} weights can't be used on {device.type}",
            why="no kernel multiplies them there",
            fix="use --quantization auto, which dequantises them",
        )
    return Unquantized()
