"""bitsandbytes: LLM.int8() and the 4-bit types."""

from __future__ import annotations

from bough.quantization.formats import BitsAndBytes4, BitsAndBytes8, WeightFormat
from bough.quantization.read.rules import Config, LayerKind, Rules, refuse, skips, words


def read_bitsandbytes(config: Config) -> Rules:
    four, eight = bool(config.get("load_in_4bit")), bool(config.get("load_in_8bit"))
    if four == eight:
        raise refuse(
            "the bitsandbytes config says neither 4 nor 8 bits", "load_in_4bit or load_in_8bit must be true", "check it"
        )
    kind = str(config.get("bnb_4bit_quant_type") or "fp4").lower()
    if four and kind not in ("nf4", "fp4"):
        raise refuse(f"bitsandbytes weights of the type {kind!r} can't be read", "known: nf4, fp4")
    weight: WeightFormat = BitsAndBytes8() if eight else BitsAndBytes4("nf4" if kind == "nf4" else "bnb_fp4")
    skipped = skips(words(config, "llm_int8_skip_modules", "modules_to_not_convert"), style="substring")

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        return weight if kind in ("linear", "expert") and not skipped(name) else None

    return Rules("bitsandbytes", "bitsandbytes INT8" if eight else f"bitsandbytes {kind.upper()}", of)
