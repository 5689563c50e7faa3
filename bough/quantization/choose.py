"""Which scheme a checkpoint gets."""

from __future__ import annotations

import torch

from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError
from bough.kernels.packed_linear import keeps_blocks, supported
from bough.quantization.coded import Coded
from bough.quantization.gguf_packed import GgufPacked
from bough.quantization.names import tensor_name
from bough.quantization.readable import rules_for
from bough.quantization.scheme import Scheme
from bough.quantization.unquantized import Unquantized
from bough.weights.mapping import Mapping


def choose_scheme(
    checkpoint: Checkpoint, quantization: str, device: torch.device, names: Mapping, *, dummy: bool = False
) -> Scheme:
    """`auto` follows the checkpoint where that is quick; `none` dequantises on load. `names` are the model's.

    `gguf` keeps GGUF blocks packed; `gguf-exact` too, and rounds no activations (slower). `dummy`: weights will be drawn.
    """
    rules = rules_for(checkpoint, quantization)
    if rules is not None:
        headers = {} if dummy else {tensor_name(name): shape for name, shape in checkpoint.tensors.items()}
        return Coded(rules, names, headers, keep_packed=quantization != "none")
    if quantization == "none" or dummy:
        return Unquantized()
    if quantization == "auto":
        quick = checkpoint.kind == "gguf" and keeps_blocks(device) and _packs(checkpoint)
        return GgufPacked() if quick else Unquantized()
    if checkpoint.kind != "gguf" or not _packs(checkpoint):
        raise ConfigError(
            what=f"--quantization {quantization} can't be used here",
            why=f"it keeps the blocks of GGUF files packed; {checkpoint.name} is a {checkpoint.kind} checkpoint"
            + (" without any that can be" if checkpoint.kind == "gguf" else ""),
            fix="use --quantization auto",
        )
    if device.type != "cpu" and not keeps_blocks(device):
        raise ConfigError(
            what=f"--quantization {quantization} can't be used on this device",
            why="blocks are multiplied by Triton kernels, which need compute capability 8.0 and --custom-kernels",
            fix="use --quantization none, which dequantises them",
        )
    return GgufPacked(exact=quantization == "gguf-exact")


def _packs(checkpoint: Checkpoint) -> bool:
    """Whether any weight is in a format that has a packed kernel (norms are not)."""
    return any(supported(tensor.kind) for tensor in checkpoint.tensors.values())
