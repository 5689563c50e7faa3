"""compressed-tensors, as llm-compressor and others write it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bough.quantization.formats import Eight, Four, InputRounding, PackedInts, WeightFormat
from bough.quantization.read.rules import Config, KvRule, LayerKind, Rules, number, refuse, skips, words

_CLASSES: dict[LayerKind, tuple[str, ...]] = {
    "linear": ("Linear",),
    "expert": ("Linear",),
    "head": ("Linear",),
    "embedding": ("Embedding",),
}
_WRITTEN_AS = {
    ("int", False): "int-quantized",
    ("int", True): "pack-quantized",
    ("float", False): "float-quantized",
}


def read_compressed_tensors(config: Config) -> Rules:
    if config.get("sparsity_config") and (config["sparsity_config"].get("format") or "dense") != "dense":
        raise refuse(
            "sparse weights can't be read", f"sparsity_config says {config['sparsity_config'].get('format')!r}"
        )
    if config.get("transform_config"):
        raise refuse("weights with transforms can't be read", "transform_config asks for rotations of activations")
    groups = list((config.get("config_groups") or {}).values())
    top = str(config.get("format") or "")
    formats = [(words(group, "targets"), _format(group, top)) for group in groups]
    kv = _kv(config.get("kv_cache_scheme"))
    if not formats and kv is not None:
        return Rules("compressed-tensors", "weights in floats, keys and values in FP8", lambda name, kind: None, kv)
    if not formats:
        raise refuse(
            "the quantisation config has no config_groups", "nothing says what is quantised", "check config.json"
        )
    skipped = skips(words(config, "ignore"), style="exact")

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        if skipped(name):
            return None
        for matches in (_is_named, _is_like):
            for targets, weight in formats:
                if any(matches(target, name) for target in targets):
                    return weight
        return next((weight for targets, weight in formats if any(each in targets for each in _CLASSES[kind])), None)

    kinds = dict.fromkeys(summary(weight) for _, weight in formats if weight is not None)
    return Rules("compressed-tensors", " and ".join(kinds), of, kv)


def _is_named(target: str, name: str) -> bool:
    return target in (name, f"model.{name}") or f"model.{target}" == name


def _is_like(target: str, name: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], name) is not None


def _kv(scheme: Mapping[str, Any] | None) -> KvRule | None:
    """Where keys and values have 8 bits and one scale a layer; other forms need other kernels, so that they stay as they
    are."""
    if not scheme:
        return None
    eight = scheme.get("type", "float") == "float" and number(scheme, "num_bits", default=8) == 8
    return KvRule() if eight and not scheme.get("dynamic") and scheme.get("strategy", "tensor") == "tensor" else None


def _format(group: Config, top: str) -> WeightFormat | None:
    args = group.get("weights")
    if not args:
        return None
    form = str(group.get("format") or top)
    bits, kind, strategy = number(args, "num_bits"), str(args.get("type", "int")), str(args.get("strategy", "tensor"))
    if form in ("", "mixed-precision", "naive-quantized", "dense"):
        form = _WRITTEN_AS.get((kind, bits < 8 and form != "naive-quantized"), form)
    inputs = _inputs(group.get("input_activations"))
    match form:
        case "pack-quantized":
            if strategy not in ("group", "channel", "tensor"):
                raise refuse(
                    f"packed weights with the strategy {strategy!r} can't be read", "known: group, channel, tensor"
                )
            size = {"channel": 0, "tensor": -1}.get(strategy)
            symmetric, order = bool(args.get("symmetric", True)), args.get("actorder") in ("group", True)
            return PackedInts(bits, number(args, "group_size") if size is None else size, symmetric, order, inputs)
        case "int-quantized" | "float-quantized" | "mxfp8-quantized":
            return _eight(args, kind, strategy, inputs, exponents=form.startswith("mx"))
        case "nvfp4-pack-quantized":
            unused = ("input_global_scale",)
            return Four("nv", tensor_scale="weight_global_scale", inverse=True, unused=unused)
        case "mxfp4-pack-quantized":
            return Four("mx", unused=("input_global_scale",))
    raise refuse(
        f"compressed-tensors weights of the format {form or 'unknown'!r} can't be read",
        "known: pack-quantized, int-quantized, float-quantized, mxfp8-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized",
    )


def _eight(args: Config, kind: str, strategy: str, inputs: InputRounding | None, *, exponents: bool) -> Eight:
    bits = number(args, "num_bits")
    if kind not in ("int", "float") or bits > 8 or (kind == "float" and bits != 8):
        raise refuse(f"weights of {bits} bits of the type {kind!r} can't be read", "known: int of up to 8, float of 8")
    block: tuple[int, int] | None = None
    if strategy == "block":
        rows, cols = (int(size) for size in args.get("block_structure") or (128, 128))
        block = (rows, cols)
    elif strategy == "group":
        block = (1, number(args, "group_size"))
    elif strategy not in ("tensor", "channel"):
        raise refuse(f"weights with the strategy {strategy!r} can't be read", "known: tensor, channel, group, block")
    return Eight(
        "float8" if kind == "float" else "int8",
        block=block,
        per="tensor" if strategy == "tensor" else "channel",
        exponents=exponents,
        symmetric=bool(args.get("symmetric", True)),
        inputs=inputs,
    )


def _inputs(args: Config | None) -> InputRounding | None:
    """None: as they are. Inputs of 4 bits too: there is weight-only arithmetic for them."""
    if not args or number(args, "num_bits", default=8) != 8:
        return None
    static = args.get("dynamic", False) is False
    group = number(args, "group_size") if args.get("strategy") in ("group", "tensor_group") else None
    kind = "int8" if str(args.get("type", "int")) == "int" else "float8"
    return InputRounding(
        kind,  # type: ignore[arg-type]
        static=static and group is None,
        group=group,
        symmetric=bool(args.get("symmetric", True)),
        power_of_two=group == 32 and kind == "float8",
    )


def summary(weight: WeightFormat) -> str:
    """A format in a few words."""
    match weight:
        case PackedInts():
            text = f"INT{weight.bits}" + (f" in groups of {weight.group}" if weight.group > 0 else "")
            return text + ("" if weight.inputs is None else f", activations {_named(weight.inputs)}")
        case Eight():
            name = "FP8" if weight.kind == "float8" else "INT8"
            where = f"blocks of {weight.block[0]} x {weight.block[1]}" if weight.block else f"a scale per {weight.per}"
            return f"{name}, {where}" + ("" if weight.inputs is None else f", activations {_named(weight.inputs)}")
        case Four():
            return "MXFP4" if weight.scales == "mx" else "NVFP4"
    return type(weight).__name__


def _named(inputs: InputRounding) -> str:
    return f"{'FP8' if inputs.kind == 'float8' else 'INT8'} {'static' if inputs.static else 'dynamic'}"
