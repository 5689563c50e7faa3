"""The model as clients know it (names, tokenizer, template, parsers, sampling defaults), and how an API worker loads it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bough.config.concerns import Config
from bough.config.hf import Checkpoint
from bough.config.served_names import served_names, with_own_name
from bough.config.speech import SpeechFacts, read_speech
from bough.engine_client.sampling import sampling_defaults
from bough.entrypoints.fim import FimFormat, choose_format
from bough.multimodal.media import Media
from bough.parsers import detect_reasoning_parser, detect_tool_parser, reasoning_format, tool_format
from bough.tokenizer import Tokenizer, tokenizer_of

DEFAULT_NAME = "default"
"""A model name that is always accepted, for clients that must send one."""
_PACKED = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
_NO_WEIGHTS = frozenset({"I64", "U64", "BOOL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as clients know it."""

    name: str
    """Its first name."""
    names: tuple[str, ...] = ()
    """The names under which it is listed; empty: the first only."""
    aliases: frozenset[str] = frozenset()
    """Other names that are accepted: the path it was started with, "default"."""
    adapters: tuple[str, ...] = ()
    """Names of adapters, which stand for models, too, alone and behind one of the model's (`base:adapter`)."""
    patterns: tuple[str, ...] = ()
    """Patterns of further names that are accepted (`claude-*`)."""
    tokenizer: Tokenizer | None
    """None under --skip-tokenizer-init."""
    context_length: int
    reasoning_parser: str | None = None
    reasoning_end: tuple[int, ...] = ()
    """Token ids that end a reasoning section."""
    tool_parser: str | None = None
    fim: FimFormat | None = None
    """Fill-in-the-middle format of the model."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Native sampling parameters that requests don't set: the operator's, and those recommended by the model's
    authors."""
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the chat template for what requests don't set."""
    created: int = 0
    format: str = "safetensors"
    """Of the files with its weights: safetensors or gguf."""
    stored_as: str = ""
    """The type that most of the weights have in their files: Q4_K, BF16 ...; empty if there are no files."""
    num_parameters: int = 0
    """Weights of the model; 0: not known."""
    speech: SpeechFacts | None = None
    """Facts for transcription; None: it is not a Whisper model."""
    markers: Mapping[str, str] = field(default_factory=dict)
    """By kind of media: its placeholder text, for templates that do not write one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The facts that the engine reported when it was ready. `media`: the kinds of media that the model takes, if
    any."""


def load_tokenizer_side(config: Config, checkpoint: Checkpoint) -> Tokenizer | None:
    """Loads the checkpoint's tokenizer; takes a while, and needs no engine. Raises the same errors as `make_served` for
    unknown parser names, before the engine is loaded."""
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
    """The model as clients see it. `facts`: reported by the engine when it was ready; `media`: prepares media, if the
    model takes any."""
    names, patterns = served_names(with_own_name(config.model.served_model_name, checkpoint.name))
    name = names[0]
    template = tokenizer.chat_template.source if tokenizer is not None and tokenizer.chat_template is not None else ""
    reasoning = choose_reasoning_parser(config.server.reasoning_parser, template)
    return ServedModel(
        name=name,
        names=names,
        aliases=frozenset({checkpoint.name, config.model.model, DEFAULT_NAME} - {*names, ""}),
        adapters=tuple(facts.get("adapters", ())),
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
        speech=_speech(checkpoint, tokenizer),
        markers=media.markers() if media is not None and tokenizer is not None else {},
        facts=facts,
    )


def _speech(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> SpeechFacts | None:
    def unknown(_: str) -> None:
        return None

    id_of = unknown if tokenizer is None else tokenizer.id_of
    return read_speech(checkpoint.config, checkpoint.generation_config, id_of)


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
    """Token ids that end a reasoning section; empty if there are none."""
    if parser is None or tokenizer is None:
        return ()
    format = reasoning_format(parser)
    return tuple(tokenizer.encode(format.forced_end, add_special_tokens=False)) if format.ends else ()
