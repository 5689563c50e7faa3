"""Medusa's heads, as Medusa and vLLM store them."""

from __future__ import annotations

from bough.weights.mapping import Exact, Mapping, Rename

WEIGHTS = Mapping(
    Rename("blocks.*.*.linear", "blocks.*.*.linear"),
    Rename("heads.*", "heads.*"),
    Exact("d2t", "vocabulary.d2t"),
)
_PREFIXES = ("medusa_head.", "medusa_heads.")


def canonical(name: str) -> str | None:
    """The name of a tensor as `WEIGHTS` has it."""
    if name == "t2d":
        return None
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    match name.split("."):
        case [head, layer, "linear", last] if head.isdigit():
            return f"blocks.{head}.{layer}.linear.{last}"
        case [head, _, "weight"] if head.isdigit():
            return f"heads.{head}.weight"
        case ["blocks", head, "layers", layer, last]:
            return f"blocks.{head}.{layer}.linear.{last}"
        case ["lm_heads", head, "weight"]:
            return f"heads.{head}.weight"
    return name
