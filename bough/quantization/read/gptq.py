"""GPTQ as AutoGPTQ and GPTQModel write it, and auto-round's use of the same layouts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from bough.quantization.formats import Awq, Gptq, WeightFormat
from bough.quantization.read.rules import Config, LayerKind, Rules, number, refuse, skips, words

_BITS = (2, 3, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What each adds to stored zero points."""
_AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}


def read_gptq(config: Config) -> Rules:
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if form not in _FORMATS or config.get("is_marlin_format"):
        raise refuse(
            f"GPTQ weights of the format {form!r} can't be read",
            f"known: {', '.join(_FORMATS)}; others are packed for one kernel",
            "use a checkpoint of the format gptq",
        )
    weight = _gptq(config, _FORMATS[form])
    wanted = _wanted(config.get("modules_in_block_to_quantize"))
    dynamic = [_rule(pattern, changes) for pattern, changes in (config.get("dynamic") or {}).items()]
    with_head = bool(config.get("lm_head", False))

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        if kind == "embedding" or (kind == "head" and not with_head):
            return None
        if wanted is not None and kind != "head" and not wanted(name):
            return None
        for pattern, changes in dynamic:  # the first that matches decides
            if pattern.match(name):
                return None if changes is None else _gptq({**config, **changes}, weight.zero_bias)
        return weight

    return Rules("gptq", f"GPTQ, INT{weight.bits} in groups of {weight.group or 'a row'}", of)


def _gptq(config: Config, zero_bias: int) -> Gptq:
    bits, group = number(config, "bits"), max(0, number(config, "group_size", default=128))
    if bits not in _BITS:
        raise refuse(f"GPTQ weights of {bits} bits can't be read", f"known: {', '.join(map(str, _BITS))}")
    return Gptq(
        bits,
        group,
        symmetric=bool(config.get("sym", True)),
        act_order=bool(config.get("desc_act", False)) and group > 0,
        zero_bias=zero_bias,
    )


def _rule(pattern: str, changes: Any) -> tuple[re.Pattern[str], dict[str, Any] | None]:
    """`-:` leaves layers as they are, `+:` (or nothing) changes settings for them."""
    if pattern.startswith("-:"):
        return re.compile(pattern[2:]), None
    return re.compile(pattern.removeprefix("+:")), dict(changes or {})


def _wanted(modules: Any) -> Any:
    """Where only some projections of a block are quantised."""
    if not modules:
        return None
    names = [str(name) for each in modules for name in (each if isinstance(each, list) else [each])]
    return lambda name: any(name.endswith(f".{each}") for each in names)


def read_auto_round(config: Config) -> Rules:
    """`extra_config` has, for some layers, the settings that differ."""
    packing = str(config.get("packing_format", "auto_round:auto_gptq")).lower()
    data_type, bits = str(config.get("data_type", "int")), number(config, "bits")
    if data_type != "int" or number(config, "act_bits", default=16) < 16:
        raise refuse(
            f"auto-round weights of the type {data_type!r} with rounded activations can't be read"
            if data_type == "int"
            else f"auto-round weights of the type {data_type!r} can't be read",
            "known: int weights, activations as they are",
            "export the model in the llm_compressor format",
        )
    if "awq" in packing:
        default: Awq | Gptq = Awq(max(0, number(config, "group_size")), zeros=not config.get("sym", True))
    elif packing in _AUTO_ROUND:
        default = _gptq({**config, "desc_act": False}, _AUTO_ROUND[packing])
    else:
        raise refuse(f"auto-round's packing {packing!r} can't be read", f"known: {', '.join(_AUTO_ROUND)}, ..:auto_awq")
    extra = {str(name): dict(changes) for name, changes in (config.get("extra_config") or {}).items()}
    inside = _blocks(config.get("block_name_to_quantize") or ())
    skipped = skips(words(config, "modules_to_not_convert", "ignore_layers"), style="exact")

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        changes = _changes(name, extra)
        outside = kind == "head" or (inside is not None and not inside(name)) or skipped(name)
        if kind == "embedding" or (outside and changes is None) or int((changes or {}).get("bits", bits)) > 8:
            return None
        if not changes:
            return default
        if isinstance(default, Awq):
            return replace(default, group=max(0, int(changes.get("group_size", default.group))))
        return _gptq({**config, "desc_act": False, **changes}, default.zero_bias)

    return Rules("auto-round", f"auto-round, INT{bits} in groups of {default.group or 'a row'}", of)


def _changes(name: str, extra: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    if name in extra:
        return extra[name]
    return next((changes for pattern, changes in extra.items() if _matches(pattern, name)), None)


def _matches(pattern: str, name: str) -> bool:
    if not re.search(r"[*+^$\\]", pattern):
        return False
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _blocks(blocks: Any) -> Any:
    names = [blocks] if isinstance(blocks, str) else list(blocks)
    names = [part.strip() for each in names for part in (each.split(",") if isinstance(each, str) else each)]
    if not names:
        return None
    return lambda name: any(name.startswith(f"{each}.") for each in names)
