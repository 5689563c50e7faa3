"""Language models inside models that see or hear, where a family has several: chosen by the config's `text_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.core.errors import ConfigError
from bough.models import llama, mistral, qwen2, qwen3

_READERS: Final[Mapping[str, Callable[[Fields], ModelFacts]]] = {
    "llama": llama.read,
    "mistral": mistral.read,
    "qwen2": qwen2.read,
    "qwen3": qwen3.read,
}
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    },
    "qwen2": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32,
    },
}  # fmt: skip
"""What published files don't say, since it is transformers' default."""
WEIGHTS: Final = qwen3.WEIGHTS
"""The rules of all of them: what some have not is in no checkpoint of theirs."""


def read_inside(config: Fields) -> ModelFacts:
    """The facts of the language model. Raises `ConfigError` if it is none of those that are known."""
    kind = str(config.any("text_model_type") or "llama")
    if kind not in _READERS:
        raise ConfigError(
            what=f"the language model is of type {kind[:60]!r}",
            why=f"this family is served with {', '.join(_READERS)}",
            fix="serve another checkpoint",
        )
    missing = {name: value for name, value in _DEFAULTS.get(kind, {}).items() if not config.has(name)}
    return _READERS[kind](config.put(**missing))
