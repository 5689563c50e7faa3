"""Writes a checkpoint in floats as a quantised one of compressed-tensors, each weight rounded to the nearest."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError
from bough.quantization.formats import Online
from bough.quantization.quantise import codes_on_grid, int_grid, quantise

Target = Literal["fp8", "int8", "int4"]
TARGETS: Final[tuple[Target, ...]] = ("fp8", "int8", "int4")

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_KEPT: Final = re.compile(
    r"(^|\.)(embed\w*|lm_head|\w*norm\w*|gate|router|shared_expert_gate|wte|wpe|score|classifier)\.weight$"
)
"""Embeddings, output heads, norms and routers: small, or what answers depend on most."""
_PACKED: Final = 8
"""Codes of 4 bits in a word."""


def write_quantised(
    source: Checkpoint, out: Path, to: Target, *, group: int = 128, tell: Callable[[str], None]
) -> None:
    """Fills the new directory `out` with a checkpoint that `bough serve` and others read. Weights pass one at a time.

    Raises `ConfigError` if the source is not safetensors in floats, or `out` is there already.
    """
    _check(source, out)
    out.mkdir(parents=True)
    writers: dict[Target, Callable[[Tensor], dict[str, Tensor]]] = {
        "fp8": _fp8,
        "int8": _int8,
        "int4": lambda weight: _int4(weight, group),
    }
    write = writers[to]
    where: dict[str, str] = {}
    kept: list[str] = []
    for number, file in enumerate(source.files, 1):
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                tensor = stored.get_tensor(name)
                layer = name.removesuffix(".weight")
                if not _is_linear(name, tensor):
                    tensors[name] = tensor
                elif not _fits(tensor, to, group):
                    tensors[name] = tensor
                    kept.append(layer)
                else:
                    tensors |= {f"{layer}.{last}": value.contiguous() for last, value in write(tensor).items()}
                if name.endswith(".weight") and _KEPT.search(name) and tensor.dim() == 2:
                    kept.append(layer)
        save_file(tensors, out / file.name, {"format": "pt"})
        where |= dict.fromkeys(tensors, file.name)
        tell(f"{number} of {len(source.files)} files")
    if len(source.files) > 1:
        index = {"metadata": {}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    _copy_others(source.path, out)
    config = {**source.config, "quantization_config": _config(to, group, sorted(set(kept)))}
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _check(source: Checkpoint, out: Path) -> None:
    if source.kind != "safetensors" or source.quantization:
        raise ConfigError(
            what=f"{source.name} can't be quantised",
            why="its weights are quantised already" if source.quantization else f"it is a {source.kind} checkpoint",
            fix="name a model with safetensors in float32, float16 or bfloat16",
        )
    if out.exists():
        raise ConfigError(
            what=f"{out} is there already", why="nothing is overwritten", fix="name a directory that does not exist yet"
        )


def _is_linear(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.dtype in _FLOATS and not _KEPT.search(name)


def _fits(weight: Tensor, to: Target, group: int) -> bool:
    """Words and groups must be whole."""
    return to != "int4" or (weight.shape[0] % _PACKED == 0 and weight.shape[1] % group == 0)


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    codes = quantise(Online("fp8"), weight)
    return {"weight": codes.values_OD, "weight_scale": codes.scale_OG}


def _int8(weight: Tensor) -> dict[str, Tensor]:
    codes = quantise(Online("int8_weight"), weight)
    return {"weight": (codes.values_OD ^ 128).view(torch.int8), "weight_scale": codes.scale_OG}


def _int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    kept = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16
    scale, zero = int_grid(weight.float(), 4, group, symmetric=False)
    scale = scale.to(kept)
    codes = codes_on_grid(weight.float(), scale.float().clamp(min=torch.finfo(kept).tiny), zero, 4, group)
    return {
        "weight_packed": _words(codes.values_OD),
        "weight_scale": scale,
        "weight_zero_point": _words(zero.to(torch.uint8).T.contiguous()).T,
        "weight_shape": torch.tensor(weight.shape),
    }


def _words(codes: Tensor) -> Tensor:
    """int32 [R, C / 8]: eight codes of 4 bits, the first in the lowest bits."""
    pad = -codes.shape[1] % _PACKED
    eight = torch.nn.functional.pad(codes, (0, pad)).view(codes.shape[0], -1, _PACKED).to(torch.int64)
    words = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _config(to: Target, group: int, kept: list[str]) -> dict[str, Any]:
    token = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    channel = {"num_bits": 8, "strategy": "channel", "dynamic": False, "symmetric": True}
    forms: dict[Target, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
        "fp8": ("float-quantized", {**channel, "type": "float"}, {**token, "type": "float"}),
        "int8": ("int-quantized", {**channel, "type": "int"}, {**token, "type": "int"}),
        "int4": (
            "pack-quantized",
            {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": group,
                "dynamic": False,
                "symmetric": False,
            },
            None,
        ),
    }
    form, weights, inputs = forms[to]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": kept,
    }


def _copy_others(source: Path, out: Path) -> None:
    """The tokenizer and whatever else belongs to the model, but no weights."""
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".gguf") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copy2(path, out / path.name)


def largest_group(sizes: list[int], most: int = 128) -> int:
    """The largest group of columns, up to `most`, that divides all of these widths; at least 32."""
    return max(32, math.gcd(most, *sizes)) if sizes else most
