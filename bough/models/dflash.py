"""DFlash's block drafters. Embeddings and the output head are the target's."""

from __future__ import annotations

from bough.models.hf_names import ATTENTION, FEED_FORWARD, HEAD_NORMS, NORMS
from bough.weights.mapping import Mapping, Rename

WEIGHTS = Mapping(
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    Rename("fc", "fc"),
    Rename("hidden_norm", "hidden_norm"),
    Rename("norm", "norm"),
)


def canonical(name: str) -> str | None:
    """The name of a tensor as `WEIGHTS` has it; None: it is the target's, or not needed."""
    name = name.removeprefix("model.")
    if name in ("t2d", "d2t") or name.startswith(("embed_tokens.", "lm_head.")) or "rotary_emb" in name:
        return None
    return f"model.{name}" if name.startswith("layers.") else name
