"""ModelOpt's checkpoints: `hf_quant_config.json`, or the same within config.json."""

from __future__ import annotations

from typing import Any

from bough.quantization.formats import Eight, Four, InputRounding, WeightFormat
from bough.quantization.read.rules import Config, KvRule, LayerKind, Rules, refuse, skips, words

_FORMATS: dict[str, WeightFormat] = {
    "FP8": Eight("float8", per="tensor", inputs=InputRounding("float8", static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": Eight("float8", inputs=InputRounding("float8")),
    "FP8_PB_WO": Eight("float8", block=(128, 128), four_dims=True),
    "MXFP8": Eight(
        "float8", block=(1, 32), exponents=True, inputs=InputRounding("float8", group=32, power_of_two=True)
    ),
    "NVFP4": Four("nv", weight="weight", tensor_scale="weight_scale_2", unused=("input_scale",)),
    "W4A16_NVFP4": Four("nv", weight="weight", tensor_scale="weight_scale_2", unused=("input_scale",)),
}
_SHORT = {"FP8_PB_WO": "FP8, blocks of 128 x 128, weights only", "FP8": "FP8, a scale per tensor, static activations"}


def read_modelopt(config: Config) -> Rules:
    inner = config.get("quantization")
    given: Config = inner if isinstance(inner, dict) else config
    algorithm = str(given.get("quant_algo") or "").upper()
    layers: dict[str, Any] = given.get("quantized_layers") or {}
    skipped = skips(words(given, "exclude_modules", "ignore"), style="glob")
    if algorithm == "MIXED_PRECISION":
        by_layer = {name: _known(str(each.get("quant_algo", ""))) for name, each in layers.items()}

        def of(name: str, kind: LayerKind) -> WeightFormat | None:
            return None if skipped(name) else by_layer.get(name)

    else:
        weight = _known(algorithm)

        def of(name: str, kind: LayerKind) -> WeightFormat | None:
            return None if kind == "embedding" or skipped(name) else weight

    kv = KvRule() if str(given.get("kv_cache_quant_algo") or "").upper() == "FP8" else None
    return Rules("modelopt", f"ModelOpt {_SHORT.get(algorithm, algorithm)}", of, kv)


def _known(algorithm: str) -> WeightFormat:
    found = _FORMATS.get(algorithm.upper())
    if found is None:
        raise refuse(
            f"ModelOpt weights of the kind {algorithm or 'none'!r} can't be read",
            f"known: {', '.join(_FORMATS)}, MIXED_PRECISION; those with AWQ in their names scale activations",
        )
    return found
