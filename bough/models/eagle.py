"""EAGLE and EAGLE-2 heads, as EAGLE and vLLM store them. The output head is the target's."""

from __future__ import annotations

from bough.models.hf_names import ATTENTION, FEED_FORWARD, HEAD_NORMS, NORMS
from bough.weights.mapping import Mapping, Rename

WEIGHTS = Mapping(
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    Rename("fc", "fc"),
    Rename("enorm", "embed_norm"),
    Rename("hnorm", "hidden_norm"),
    Rename("norm", "norm"),
)
_NAMES = {"embedding_layernorm": "enorm", "hidden_layernorm": "hnorm"}


def canonical(name: str) -> str | None:
    """The name of a tensor as `WEIGHTS` has it; None: it is the target's, or not needed."""
    name = name.removeprefix("model.")
    if name.startswith(("embed_tokens.", "lm_head.")) or "rotary_emb" in name:
        return None
    stem, _, last = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{last}"
    return f"model.{name}" if name.startswith("layers.") else name
