"""EAGLE-3 heads, as EAGLE, SpecForge and vLLM's speculators store them."""

from __future__ import annotations

from typing import Final

from bough.models.hf_names import ATTENTION, FEED_FORWARD, HEAD_NORMS, NORMS, in_layers
from bough.weights.mapping import Exact, Mapping, Rename

_FEATURE_NORMS: Final = {
    "input_norm": "feature_norm.0",
    "aux_norm_low": "feature_norm.0",
    "aux_norm_mid": "feature_norm.1",
    "aux_norm_high": "feature_norm.2",
}
WEIGHTS = Mapping(
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    *in_layers({"hidden_norm": "hidden_norm"}),
    Rename("fc", "fc"),
    Rename("feature_norm.*", "feature_norm.*"),
    Rename("norm", "norm"),
    Rename("lm_head", "head"),
    Rename("embed_tokens", "own_embed"),
    Exact("d2t", "vocabulary.d2t"),
)


def canonical(name: str) -> str | None:
    """The name of a tensor as `WEIGHTS` has it; None: it is not needed (a mask for training, tables of positions)."""
    name = name.removeprefix("model.")
    if name == "t2d" or "rotary_emb" in name:
        return None
    stem, _, last = name.rpartition(".")
    if stem in _FEATURE_NORMS:
        return f"{_FEATURE_NORMS[stem]}.{last}"
    if name.startswith("fc_norm."):
        return f"feature_norm.{name.removeprefix('fc_norm.')}"
    if name.startswith("midlayer."):
        return f"model.layers.0.{name.removeprefix('midlayer.')}"
    return f"model.{name}" if name.startswith("layers.") else name
