"""Request bodies of OpenAI's routes, with the extensions that SGLang's and vLLM's clients send.

Types are checked by msgspec while the body is converted; null means "not given" everywhere. Sizes are checked by
`bounds`, ranges by `SamplingParams.check`. Fields that only concern OpenAI's own service are accepted and have no effect;
they are listed last.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from bough.engine_client.request import PriorityWord

Json = dict[str, Any]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: bool | None = None


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's way to say what an answer looks like; one of these."""

    json: str | Json | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Json | None = None


class FunctionDefinition(Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(Struct, kw_only=True):
    name: str


class NamedTool(Struct, kw_only=True, tag="function", tag_field="type"):
    function: NamedFunction


class AllowedNames(Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Struct, kw_only=True, tag="allowed_tools", tag_field="type"):
    """A choice among some of the tools."""

    allowed_tools: AllowedNames


class Common(Struct, kw_only=True):
    """What chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    json_schema: str | Json | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | Json | None = None
    guided_choice: list[str] | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    custom_params: dict[str, bool | int | float | str] | None = None
    logit_processor: str | None = None
    beam_width: int | None = None
    processed_logprobs: bool | None = None
    """Log-probabilities after temperature, penalties and masks, instead of the model's own."""
    speculate: bool | None = None
    """False: no speculative decoding for this request."""
    return_hidden_states: bool | Literal["last", "all"] | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None
    rid: str | None = None
    priority: int | PriorityWord | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    """The name of an adapter; one that `model` names comes first."""
    response_format: Json | None = None
    # of no effect here
    user: str | None = None
    metadata: Json | None = None


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Json]
    mm_processor_kwargs: Json | None = None
    """Settings of the model's media processor, for all media of the request."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | float | None = None
    functions: list[FunctionDefinition] | None = None
    """The older way to offer tools; their calls are sent in the older way, too."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    # extensions
    input_ids: list[int] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    thinking: bool | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    """Another name of `thinking_budget`."""
    # refused: what they ask for does not exist here
    audio: Json | None = None
    modalities: list[str] | None = None
    web_search_options: Json | None = None
    # of no effect here
    store: bool | None = None
    service_tier: str | None = None
    prediction: Json | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    moderation: Json | None = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    # extensions
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    """Another name of `thinking_budget`."""
    # refused: a raw prompt has no place for them
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages with the chat template applied."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    """Another name of `prompt`."""
    messages: list[Json] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int | list[int]] | None = None
    input_ids: list[int | list[int]] | None = None
    """Another name of `tokens`."""
    model: str | None = None
    skip_special_tokens: bool | None = None
