"""The language model of a model that also sees. Pictures are not taken.

Its config is that of the text (`config.hf.with_text_config`), and its tensors are called as those of the text model, below
`language_model`.
"""

from __future__ import annotations

from typing import Final

from bough.weights.mapping import Mapping, Outside, Rule, renamed

_TOWERS: Final = (
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
)


def text_weights(weights: Mapping) -> Mapping:
    """The rules of a text model for the same model as a part, by the names that transformers writes now and wrote before."""
    now = [_below(rule, "model.language_model.", "") for rule in weights.rules]
    before = [_below(rule, "language_model.model.", "language_model.") for rule in weights.rules]
    towers = [Outside(f"{prefix}{name}.") for prefix in ("", "model.") for name in _TOWERS]
    return Mapping(*now, *(rule for rule in before if rule not in now), *towers)


def _below(rule: Rule, body: str, head: str) -> Rule:
    return renamed(rule, lambda name: head + name if name.startswith("lm_head") else body + name.removeprefix("model."))
