"""Adapters beside a checkpoint, in folders as PEFT writes them: `vision-lora/adapter_config.json` and
`vision-lora/adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from bough.core.errors import ConfigError

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_FOLDER: Final = "-lora"
_PREFIX: Final = "base_model.model."
_REFUSED: Final = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "layer_replication",
    "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "layers_to_transform", "fan_in_fan_out",
)  # fmt: skip
"""Settings that change what an adapter computes, and are not served."""


def folder_of(path: Path, name: str) -> Path:
    """Where the adapter `name` of the checkpoint at `path` would be."""
    return path / f"{name}{_FOLDER}"


def read_folders(path: Path, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """By name, `r` and `lora_alpha` of the adapters that the checkpoint at `path` has in folders. Raises `ConfigError` for
    one that is not served."""
    return {name: read_adapter_config(folder_of(path, name)) for name in names if folder_of(path, name).is_dir()}


def read_adapter_config(folder: Path) -> dict[str, float]:
    """`r` and `lora_alpha` of a plain LoRA. Raises `ConfigError` for what is missing, broken or not served."""
    file = folder / ADAPTER_CONFIG
    try:
        given: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            what=f"{file} can't be read", why=str(error).splitlines()[0], fix="download the adapter again"
        ) from error
    kind = given.get("peft_type") if isinstance(given, dict) else None
    if kind != "LORA":
        raise ConfigError(what=f"{folder} is no LoRA", why=f"its peft_type is {str(kind)[:40]!r}", fix="serve another")
    set_ones = [name for name in _REFUSED if given.get(name)]
    if given.get("bias", "none") != "none":
        set_ones.append("bias")
    if set_ones:
        raise ConfigError(
            what=f"the adapter {folder.name} has {', '.join(set_ones)}",
            why="only plain low-rank additions to matrices are served",
            fix="merge it into its model, or train it without",
        )
    rank, alpha = given.get("r"), given.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(
            what=f"{file} has r {rank!r} and lora_alpha {alpha!r}",
            why="the rank and the scale of what is added",
            fix="download the adapter again",
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(
            what=f"{folder} has no {ADAPTER_WEIGHTS}",
            why="weights are read from safetensors only; pickled ones can run code",
            fix="convert them to safetensors",
        )
    return {"r": rank, "lora_alpha": alpha * math.sqrt(rank) if given.get("use_rslora") else alpha}


def adapter_tensor(adapter: str, name: str) -> str:
    """The name of a tensor of an adapter's file, as a checkpoint would call it that holds all adapters
    (`model.layers.0.self_attn.o_proj.lora_A.vision.weight`)."""
    stem, _, last = name.removeprefix(_PREFIX).rpartition(".")
    return f"{stem}.{adapter}.{last}"
