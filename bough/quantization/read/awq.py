"""AWQ as AutoAWQ writes it."""

from __future__ import annotations

from bough.quantization.formats import Awq, WeightFormat
from bough.quantization.read.rules import Config, LayerKind, Rules, number, refuse, skips, words


def read_awq(config: Config) -> Rules:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise refuse(
            f"AWQ weights of the version {version!r} can't be read",
            "they are packed in another order than those of version 'gemm'",
            "use a checkpoint of version gemm, as AutoAWQ writes by default",
        )
    if (bits := number(config, "bits", "w_bit")) != 4:
        raise refuse(f"AWQ weights of {bits} bits can't be read", "AWQ has 4")
    group = max(0, number(config, "group_size", "q_group_size"))
    weight = Awq(group, zeros=bool(config.get("zero_point", True)))
    skipped = skips(words(config, "modules_to_not_convert"), style="substring")

    def of(name: str, kind: LayerKind) -> WeightFormat | None:
        return weight if kind in ("linear", "expert") and not skipped(name) else None

    return Rules("awq", f"AWQ, INT4 in groups of {group or 'a row'}", of)
