"""torchao's tensors as its safetensors files have them: unpacked integers of 8 bits or less, and FP8."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bough.quantization.formats import Eight, InputRounding, WeightFormat
from bough.quantization.read.rules import Config, LayerKind, Rules, refuse, skips, words

_INTEGER = re.compile(r"int([1-8])")
_TABLES = ("FqnToConfig", "ModuleFqnToConfig", "AOPerModuleConfig")


def read_torchao(config: Config) -> Rules:
    given = config.get("quant_type")
    default = given.get("default") if isinstance(given, Mapping) else None
    if not isinstance(default, Mapping):
        raise refuse(
            f"torchao weights of the type {given!r} can't be read",
            "only tensors in safetensors, of torchao 0.15 or later, say how they are stored; older files are pickles",
            "save the model again with a present torchao, or use another quantised form",
        )
    choose, summary = _chooser(default)
    skipped = skips(words(config, "modules_to_not_convert"), style="substring")
    ends = bool(config.get("include_input_output_embeddings"))

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        if skipped(name) or (kind in ("embedding", "head") and not ends):
            return None
        return choose(name)

    return Rules("torchao", f"torchao {summary}", of)


def _chooser(default: Config) -> tuple[Callable[[str], WeightFormat | None], str]:
    """The format of a layer by its name, and a few words about all of them."""
    if str(default.get("_type")) not in _TABLES:
        lone = _format(default)
        return (lambda name: lone), _named(default)
    data = default.get("_data") or {}
    table: Config = data.get("fqn_to_config") or data.get("module_fqn_to_config") or {}
    formats = {key: None if each is None else _format(each) for key, each in table.items()}

    def choose(name: str) -> WeightFormat | None:
        for key in (name, f"{name}.weight"):
            if key in formats:
                return formats[key]
        for key, each in formats.items():
            if key.startswith("re:") and (re.fullmatch(key[3:], name) or re.fullmatch(key[3:], f"{name}.weight")):
                return each
        return formats.get("_default")

    kinds = dict.fromkeys(_named(each) for each in table.values() if each is not None)
    return choose, " and ".join(kinds)


def _named(config: Config) -> str:
    return str(config.get("_type")).removesuffix("Config")


def _format(config: Config) -> WeightFormat:
    kind, data = str(config.get("_type")), config.get("_data") or {}
    match kind:
        case "Int8WeightOnlyConfig":
            return _integers(8, data.get("granularity"), data.get("group_size"), None)
        case "Int8DynamicActivationInt8WeightConfig":
            return _integers(8, data.get("granularity"), None, InputRounding("int8"))
        case "IntxWeightOnlyConfig":
            return _integers(_bits(data.get("weight_dtype")), data.get("granularity"), None, None)
        case "Int8DynamicActivationIntxWeightConfig":
            # Activations are rounded with zero points there; kernels leave them as they are.
            return _integers(_bits(data.get("weight_dtype")), data.get("weight_granularity"), None, None)
        case "Float8WeightOnlyConfig":
            return _float8(data, None)
        case "Float8DynamicActivationFloat8WeightConfig":
            return _float8(data, InputRounding("float8"))
    raise refuse(
        f"torchao weights of the kind {kind!r} can't be read",
        "known: Int8WeightOnly, Int8DynamicActivationInt8Weight, IntxWeightOnly, Int8DynamicActivationIntxWeight, "
        "Float8WeightOnly, Float8DynamicActivationFloat8Weight; INT4 tensors are packed for one kernel",
    )


def _bits(dtype: Any) -> int:
    name = str(dtype.get("_data") if isinstance(dtype, Mapping) else dtype)
    found = _INTEGER.fullmatch(name)
    if found is None:
        raise refuse(f"torchao integers of the type {name!r} can't be read", "known: int1 to int8")
    return int(found[1])


def _integers(bits: int, granularity: Any, group_size: Any, inputs: InputRounding | None) -> Eight:
    per, block = _granularity(granularity)
    if granularity is None and isinstance(group_size, int) and group_size > 0:
        block = (1, group_size)
    return Eight("int8", block=block, per=per, symmetric=False, inputs=inputs, bits=bits, zeros_optional=True)


def _float8(data: Config, inputs: InputRounding | None) -> Eight:
    dtype = data.get("weight_dtype")
    name = str(dtype.get("_data") if isinstance(dtype, Mapping) else dtype or "float8_e4m3fn")
    if name != "float8_e4m3fn":
        raise refuse(f"torchao floats of the type {name!r} can't be read", "known: float8_e4m3fn")
    given = data.get("granularity")
    per, block = _granularity(given[-1] if isinstance(given, list) and given else given)  # of activations and weights
    return Eight("float8", block=block, per=per, inputs=inputs)


def _granularity(given: Any) -> tuple[Any, tuple[int, int] | None]:
    """(per, block) of `Eight`."""
    kind = str(given.get("_type")) if isinstance(given, Mapping) else "PerRow"
    data = (given.get("_data") or {}) if isinstance(given, Mapping) else {}
    if kind == "PerTensor":
        return "tensor", None
    if kind in ("PerRow", "PerAxis", "PerChannel") and int(data.get("axis", data.get("dim", -1))) in (-1, 0):
        return "channel", None
    if kind == "PerGroup":
        return "channel", (1, int(data["group_size"]))
    if kind == "PerBlock":
        rows, cols = (int(size) for size in data["block_size"])
        return "channel", (rows, cols)
    raise refuse(f"torchao weights with scales {kind!r} can't be read", "known: PerTensor, PerRow, PerGroup, PerBlock")
