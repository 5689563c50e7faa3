"""FP8 as transformers, AutoFP8, DeepSeek and fbgemm write it; MXFP8; INT8 of the same shapes."""

from __future__ import annotations

from bough.quantization.formats import Eight, InputRounding, WeightFormat
from bough.quantization.read.rules import Config, LayerKind, Rules, refuse, skips, words

_BLOCK = 128


def read_fp8(config: Config) -> Rules:
    scheme = str(config.get("activation_scheme", "dynamic"))
    if scheme not in ("static", "dynamic"):
        raise refuse(f"activation_scheme {scheme!r} is unknown", "known: static, dynamic", "check config.json")
    if str(config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise refuse(f"FP8 weights of the format {config['fmt']!r} can't be read", "known: e4m3")
    block = config.get("weight_block_size")
    static = scheme == "static"
    if block:
        rows, cols = (int(size) for size in block)
        if static:
            raise refuse("FP8 blocks with static activations can't be read", "blocks have dynamic activations")
        exact = str(config.get("scale_fmt") or "") == "ue8m0"
        rounding = InputRounding("float8", group=cols, power_of_two=exact)
        weight = Eight("float8", block=(rows, cols), scale="weight_scale_inv", inputs=rounding)
        summary = f"FP8, blocks of {rows} x {cols}"
    else:
        weight = Eight("float8", per="tensor", inputs=InputRounding("float8", static=static))
        summary = f"FP8, a scale per tensor, {scheme} activations"
    return _for_linears("fp8", summary, weight, config)


def read_fbgemm_fp8(config: Config) -> Rules:
    """`input_scale_ub`, an upper bound of activation scales, is not needed where scales follow each token."""
    return _for_linears(
        "fbgemm_fp8", "FP8, a scale per channel", Eight("float8", inputs=InputRounding("float8")), config
    )


def read_mxfp8(config: Config) -> Rules:
    weight = Eight("float8", block=(1, 32), exponents=True, inputs=InputRounding("float8", group=32, power_of_two=True))
    return _for_linears("mxfp8", "MXFP8, blocks of 32", weight, config)


def read_w8a8_int8(config: Config) -> Rules:
    return _for_linears("w8a8_int8", "INT8, a scale per channel", Eight("int8", inputs=InputRounding("int8")), config)


def read_w8a8_fp8(config: Config) -> Rules:
    return _for_linears("w8a8_fp8", "FP8, a scale per channel", Eight("float8", inputs=InputRounding("float8")), config)


def read_blockwise_int8(config: Config) -> Rules:
    rows, cols = (int(size) for size in config.get("weight_block_size") or (_BLOCK, _BLOCK))
    weight = Eight("int8", block=(rows, cols), scale="weight_scale_inv", inputs=InputRounding("int8", group=cols))
    return _for_linears("blockwise_int8", f"INT8, blocks of {rows} x {cols}", weight, config)


def _for_linears(method: str, summary: str, weight: WeightFormat, config: Config) -> Rules:
    """All projections but those listed; not the embedding and the output head."""
    skipped = skips(words(config, "modules_to_not_convert", "ignored_layers", "ignore"), style="exact")

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        return weight if kind in ("linear", "expert") and not skipped(name) else None

    return Rules(method, summary, of)
