"""Loads what an API worker needs to know of the model: its tokenizer and template, its parsers, its sampling defaults."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from bough.config.concerns import Config
from bough.config.hf import Checkpoint
from bough.config.served_names import served_names, with_own_name
from bough.entrypoints.fim import choose_format
from bough.entrypoints.service import ServedModel
from bough.intake.sampling import sampling_defaults
from bough.multimodal.media import Media
from bough.parsers import detect_reasoning_parser, detect_tool_parser, reasoning_format, tool_format
from bough.tokenizer import Tokenizer, tokenizer_of

DEFAULT_NAME = "default"
"""A model name that always works, for clients that insist on sending one."""
_PACKED = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
_NO_WEIGHTS = frozenset({"I64", "U64", "BOOL"})


def load_tokenizer_side(config: Config, checkpoint: Checkpoint) -> Tokenizer | None:
    """Loads the checkpoint's tokenizer; takes a while, needs no engine. Raises what `make_served` would for names that
    nothing has, so that such an error need not wait for the engine."""
    tokenizer = tokenizer_of(config.model, checkpoint)
    choose_reasoning_parser(config.server.reasoning_parser, "")
    choose_tool_parser(config.server.tool_call_parser, "")
    choose_format(config.server.completion_template, tokenizer)
    sampling_defaults(config.server, checkpoint.recommended_sampling)
    return tokenizer


def make_served(
    config: Config,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    facts: Mapping[str, Any],
    media: Media | None = None,
) -> ServedModel:
    """The model as clients will know it. `facts`: what the engine said when it was ready; `media`: what prepares media, if
    the model takes any."""
    names, patterns = served_names(with_own_name(config.model.served_model_name, checkpoint.name))
    name = names[0]
    template = tokenizer.chat_template.source if tokenizer is not None and tokenizer.chat_template is not None else ""
    reasoning = choose_reasoning_parser(config.server.reasoning_parser, template)
    return ServedModel(
        name=name,
        names=names,
        aliases=frozenset({checkpoint.name, config.model.model, DEFAULT_NAME} - {*names, ""}),
        patterns=patterns,
        tokenizer=tokenizer,
        context_length=facts["context_length"],
        reasoning_parser=reasoning,
        reasoning_end=reasoning_end_ids(reasoning, tokenizer),
        tool_parser=choose_tool_parser(config.server.tool_call_parser, template),
        fim=choose_format(config.server.completion_template, tokenizer),
        sampling_defaults=sampling_defaults(config.server, checkpoint.recommended_sampling),
        template_defaults=json_object(config.server.default_chat_template_kwargs),
        created=int(time.time()),
        format="gguf" if checkpoint.kind == "gguf" else "safetensors",
        stored_as=_stored_as(checkpoint),
        num_parameters=num_parameters(checkpoint, facts),
        markers=media.markers() if media is not None and tokenizer is not None else {},
        facts=facts,
    )


def json_object(text: str) -> dict[str, Any]:
    """A setting that `check` has found to be a JSON object, or empty."""
    parsed: dict[str, Any] = json.loads(text) if text else {}
    return parsed


def num_parameters(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> int:
    """Weights of the model, from headers. Where several share an integer, as the engine found by arithmetic on shapes."""
    kinds = {tensor.kind for tensor in checkpoint.tensors.values()}
    if checkpoint.kind == "config-only" or kinds & _PACKED:
        return int(facts.get("num_parameters", 0))
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values() if tensor.kind not in _NO_WEIGHTS)


def _stored_as(checkpoint: Checkpoint) -> str:
    """The type that takes most of the bytes."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default="")


def choose_reasoning_parser(setting: str, template: str) -> str | None:
    """The parser's name, by the setting: a name (checked), `auto` (by the template) or `none`."""
    if setting == "none":
        return None
    return detect_reasoning_parser(template) if setting == "auto" else reasoning_format(setting).name


def choose_tool_parser(setting: str, template: str) -> str | None:
    """Like `choose_reasoning_parser`, for tool calls."""
    if setting == "none":
        return None
    return detect_tool_parser(template) if setting == "auto" else tool_format(setting).name


def reasoning_end_ids(parser: str | None, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids of what stands between a reasoning section and the answer; empty where there is none."""
    if parser is None or tokenizer is None:
        return ()
    format = reasoning_format(parser)
    return tuple(tokenizer.encode(format.forced_end, add_special_tokens=False)) if format.ends else ()
