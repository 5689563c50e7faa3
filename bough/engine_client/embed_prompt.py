"""Prompts with which a model that answers was trained to embed: an instruction before each text and its media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bough.engine_client.prompt_template import PromptTemplate, read_template

_TURNS: Final = (
    "<|im_start|>system\n{{ instruct or INSTRUCT }}<|im_end|>\n<|im_start|>user\n{{ media }}{{ text }}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
BUILT_IN: Final[Mapping[str, str]] = {
    "gme-qwen2-vl": _TURNS.replace("INSTRUCT", "'You are a helpful assistant.'") + "<|endoftext|>",
    "qwen3-vl": _TURNS.replace("INSTRUCT", '"Represent the user\'s input."') + "\n",
}
"""Jinja takes the last newline away."""


def choose_embed_prompt(setting: str, model: str) -> PromptTemplate | None:
    """By the setting: a built-in name, a file, `none`, or `auto` (by the model's name; None: inputs are the prompts)."""
    if setting == "auto":
        name = model.lower()
        if "gme-qwen2-vl" in name:
            setting = "gme-qwen2-vl"
        elif "qwen3-vl-embedding" in name:
            setting = "qwen3-vl"
        else:
            return None
    if setting == "none":
        return None
    source = BUILT_IN[setting] if setting in BUILT_IN else read_template(setting, "embedding", [*BUILT_IN, "none"])
    return PromptTemplate(source, "embedding")
