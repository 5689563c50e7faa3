"""Scales of cached keys and values: where checkpoints and files keep them. Needs no torch until a checkpoint's are read."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError, WeightsError
from bough.quantization.names import kv_scale_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvScales:
    """By layer: the cache holds k / k scale and v / v scale. Empty: 1."""

    keys: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def held(self, layers: range) -> KvScales:
        """Those of the layers of a stage."""
        return KvScales(self.keys[layers.start : layers.stop], self.values[layers.start : layers.stop])

    def padded(self, num_layers: int) -> KvScales:
        """With 1 for layers behind the model's own, which draft."""
        if not self.keys:
            return self
        more = (1.0,) * (num_layers - len(self.keys))
        return KvScales(self.keys + more, self.values + more)


def find_kv_scales(checkpoint: Checkpoint, num_layers: int, path: str = "", rank: int = 0) -> KvScales:
    """From the JSON file at `path`, or from the checkpoint (`rank`: as in `load_weights`). Raises `ConfigError` or
    `WeightsError` for scales that can't be.

    Layers without a scale have 1, which is said in the log.
    """
    if path:
        found, source = _of_file(Path(path)), path
    else:
        found, source = _of_checkpoint(checkpoint, rank), checkpoint.name
    if not found:
        _log.warning(
            "keys and values are cached in 8 bits without scales: %s has none (--calculate-kv-scales finds some)",
            source,
        )
        return KvScales()
    wrong = sorted(layer for layer, _ in found if layer >= num_layers)
    if wrong:
        raise ConfigError(
            what=f"{source} has a scale for the keys of layer {wrong[0]}",
            why=f"the model has {num_layers} layers",
            fix="use the file of this model",
        )
    missing = [layer for layer in range(num_layers) if (layer, "k") not in found or (layer, "v") not in found]
    if missing:
        _log.warning("%s has no scales of keys or values for %d of %d layers: 1", source, len(missing), num_layers)
    keys, values = ([found.get((layer, which), 1.0) for layer in range(num_layers)] for which in ("k", "v"))
    return KvScales(tuple(keys), tuple(values))


def _of_checkpoint(checkpoint: Checkpoint, rank: int) -> dict[tuple[int, str], float]:
    if checkpoint.kind != "safetensors" or not any(kv_scale_of(name) for name in checkpoint.tensors):
        return {}
    from bough.weights.load import open_tensors
    from bough.weights.stored import read_all

    found: dict[tuple[int, str], float] = {}
    with open_tensors(checkpoint, rank) as tensors:
        for name, stored in tensors.items():
            place = kv_scale_of(name)
            if place is None or place.which not in ("k", "v", "kv"):
                continue
            if math.prod(stored.shape) != 1:
                raise WeightsError(
                    what=f"{name} is {list(stored.shape)}: scales of single heads can't be used",
                    why="kernels take one scale for all heads of a layer",
                    fix="use a checkpoint with a scale per tensor, or --kv-cache-dtype auto",
                )
            scale = _checked(float(read_all(stored).float().reshape(())), name)
            found |= {(place.layer, which): scale for which in place.which}
    return found


def _of_file(path: Path) -> dict[tuple[int, str], float]:
    """As SGLang and vLLM write it: {"kv_cache": {"scaling_factor": {"<rank>": {"<layer>": scale}}}}. A scale may also be
    {"k": ..., "v": ...}. All ranks must agree: their caches hold parts of the same numbers."""
    try:
        by_rank = json.loads(path.read_text())["kv_cache"]["scaling_factor"]
        ranks = [
            {
                (int(layer), which): _checked(
                    float(scale[which] if isinstance(scale, dict) else scale), f"layer {layer}"
                )
                for layer, scale in scales.items()
                for which in ("k", "v")
            }
            for scales in by_rank.values()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            what=f"{path} can't be read as a file of KV scales",
            why=f"{type(error).__name__}: {error}",
            fix='it must be JSON: {"kv_cache": {"scaling_factor": {"0": {"0": 0.02, "1": 0.03}}}}, a scale for each layer',
            param="quantization_param_path",
        ) from None
    if any(each != ranks[0] for each in ranks):
        raise ConfigError(
            what=f"{path} has different scales for different ranks",
            why="a layer has one scale on all ranks",
            fix="calibrate for one rank",
            param="quantization_param_path",
        )
    return ranks[0] if ranks else {}


def _checked(scale: float, name: str) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise WeightsError(
            what=f"the KV scale {name} is {scale}", why="a scale is positive", fix="calibrate the checkpoint again"
        )
    return scale
