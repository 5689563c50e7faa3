"""Architectures that bough has no file for, as transformers knows them: what their configs say. Imports it when asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bough.config.fields import Fields
from bough.config.model_facts import Dense, Gqa, LayerFacts, ModelFacts, NormFacts
from bough.core.errors import ConfigError, UnsupportedModel

_log = logging.getLogger(__name__)


def has(architecture: str) -> bool:
    """Whether the installed transformers has a class of this name that generates text."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return False
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return any(architecture in (name if isinstance(name, tuple) else (name,)) for name in names)


def read(fields: Fields) -> ModelFacts:
    """The facts that memory is planned by; attention itself is read from the module. Raises `UnsupportedModel` for what
    transformers doesn't have, or what isn't made of attention layers alone."""
    architecture = fields.architecture()
    if not has(architecture):
        raise UnsupportedModel(
            what=f"transformers has no {architecture}",
            why="the installed version knows no such class that generates text",
            fix="choose another model; code that comes with a checkpoint is not run",
        )
    config = config_of(fields)
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if unknown:
        raise UnsupportedModel(
            what=f"{architecture} can't run through transformers here",
            why=f"it has layers of the kind {', '.join(unknown)}, which keep something else than attention does",
            fix="leave --model-impl at auto if docs/models.md lists it, or choose another model",
        )
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    width = getattr(config, "head_dim", None) or hidden // heads
    mixer = Gqa(
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=width,
        scale=width**-0.5,
    )
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = LayerFacts(mixers=(mixer,), ffn=Dense(intermediate=inner if isinstance(inner, int) else max(inner)))
    _log.warning("%s is computed by transformers' module: bough has no file for it", architecture)
    return ModelFacts(
        architecture=architecture,
        hidden=hidden,
        vocab=_count(config, "vocab_size"),
        max_context=_count(config, "max_position_embeddings"),
        norm=NormFacts(eps=1e-6),
        layers=(layer,) * _count(config, "num_hidden_layers"),
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        through_transformers=True,
        config=fields.raw,
    )


def config_of(fields: Fields) -> Any:
    """transformers' own config object. Raises `ConfigError` where it refuses what the file says."""
    from transformers import CONFIG_MAPPING

    kind = fields.any("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(what=f"transformers has no model_type {kind!r}")
    try:
        return CONFIG_MAPPING[kind].from_dict(_with_infinities(fields.raw))
    except Exception as error:  # whatever its checks raise
        raise ConfigError(
            what=f"transformers can't read the config of {fields.architecture()}", why=str(error)
        ) from error


def _with_infinities(value: Any) -> Any:
    """The same, with numbers for what transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_infinities(each) for key, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def _count(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(
            what=f"the model's config has no usable {key}", why=f"it is {value!r}", fix="check config.json"
        )
    return value
