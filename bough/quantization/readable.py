"""What `--quantization` means for a checkpoint: decided from its config, before anything is loaded. Needs no torch."""

from __future__ import annotations

from typing import Final, get_args

from bough.config.concerns import Quantization
from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError
from bough.quantization.formats import (
    Awq,
    BitsAndBytes4,
    Eight,
    Four,
    Gptq,
    InputRounding,
    Online,
    PackedInts,
    WeightFormat,
)
from bough.quantization.read import LayerKind, Rules, read_rules

KNOWN: Final[tuple[str, ...]] = get_args(Quantization)
"""What `--quantization` may say."""
ONLINE: Final[dict[str, WeightFormat]] = {
    "fp8": Online("fp8"),
    "w8a8_fp8": Online("fp8"),
    "fp8_block": Online("fp8_block"),
    "int8": Online("int8"),
    "w8a8_int8": Online("int8"),
    "w8a16": Online("int8_weight"),
    "int4": Online("int4"),
    "mxfp8": Online("mxfp8"),
    "mxfp4": Online("mxfp4"),
}
"""What floats can be made into while they are loaded."""
_DRAWN: Final[dict[str, WeightFormat]] = {
    **ONLINE,
    "fbgemm_fp8": Online("fp8"),
    "blockwise_int8": Eight("int8", block=(128, 128), inputs=InputRounding("int8", group=128)),
    "awq": Awq(128),
    "gptq": Gptq(4, 128),
    "auto-round": Gptq(4, 128),
    "compressed-tensors": PackedInts(4, 128),
    "modelopt": Four("nv", tensor_scale="weight_scale_2"),
    "bitsandbytes": BitsAndBytes4("nf4"),
}
"""What random weights can be made into: each format's most common form."""


def rules_for(checkpoint: Checkpoint, quantization: str) -> Rules | None:
    """How the layers of a checkpoint are stored; None: as plain floats, or as GGUF's blocks.

    Raises `UnsupportedModel` if its form can't be read, `ConfigError` if `quantization` asks for another one.
    """
    if quantization not in KNOWN:
        raise ConfigError(
            what=f"there is no weight scheme {quantization!r}",
            why=f"known: {', '.join(KNOWN)}",
            fix="check --quantization",
        )
    rules = read_rules(checkpoint.quantization) if checkpoint.quantization else None
    if quantization in ("auto", "none") or quantization.startswith("gguf"):
        return rules
    if rules is not None:
        if rules.method == quantization:
            return rules
        raise ConfigError(
            what=f"--quantization {quantization} was asked for, {checkpoint.name} is quantised with {rules.method}",
            why="weights that are quantised already are not quantised again",
            fix="leave --quantization out, or use the unquantised model",
            param="quantization",
        )
    drawn = checkpoint.kind == "config-only"
    form = (_DRAWN if drawn else ONLINE).get(quantization)
    if form is None:
        raise ConfigError(
            what=f"--quantization {quantization} was asked for, {checkpoint.name} is not quantised",
            why=f"while loading, floats can be made into: {', '.join(ONLINE)}",
            fix="use a checkpoint of that form; `bough quantize` writes those of compressed-tensors",
            param="quantization",
        )
    summary = f"{quantization}, {'random weights' if drawn else 'made while loading'}"
    return Rules(quantization, summary, lambda name, kind: _but_the_ends(form, kind))


def _but_the_ends(form: WeightFormat, kind: LayerKind) -> WeightFormat | None:
    """The embedding and the output head stay as they are: a token's logits depend on them most."""
    return form if kind in ("linear", "expert") else None
