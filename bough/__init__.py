"""bough: serve language models, and program them.

The public names are resolved on first use, so that importing the package costs milliseconds and never imports torch.
`import bough as sgl` runs programs written for SGLang's frontend language.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.config.server_args import ServerArgs as ServerArgs
    from bough.lang import (
        Anthropic as Anthropic,
        Backend as Backend,
        BackendError as BackendError,
        ChatTemplate as ChatTemplate,
        ChoicesDecision as ChoicesDecision,
        ChoicesSamplingMethod as ChoicesSamplingMethod,
        EngineBackend as EngineBackend,
        Function as Function,
        Generation as Generation,
        LangError as LangError,
        LiteLLM as LiteLLM,
        OpenAI as OpenAI,
        ProgramError as ProgramError,
        ProgramState as ProgramState,
        ProgramStateGroup as ProgramStateGroup,
        Runtime as Runtime,
        RuntimeEndpoint as RuntimeEndpoint,
        SglFunction as SglFunction,
        SglGen as SglGen,
        SglImage as SglImage,
        SglRoleBegin as SglRoleBegin,
        SglRoleEnd as SglRoleEnd,
        SglSelect as SglSelect,
        SglVideo as SglVideo,
        TokenUsage as TokenUsage,
        UnknownVariable as UnknownVariable,
        Unsupported as Unsupported,
        assistant as assistant,
        assistant_begin as assistant_begin,
        assistant_end as assistant_end,
        flush_cache as flush_cache,
        function as function,
        gen as gen,
        gen_int as gen_int,
        gen_string as gen_string,
        get_chat_template as get_chat_template,
        get_chat_template_by_model_path as get_chat_template_by_model_path,
        get_server_info as get_server_info,
        global_config as global_config,
        greedy_token_selection as greedy_token_selection,
        image as image,
        register_chat_template as register_chat_template,
        register_chat_template_matching_function as register_chat_template_matching_function,
        select as select,
        separate_reasoning as separate_reasoning,
        set_default_backend as set_default_backend,
        system as system,
        system_begin as system_begin,
        system_end as system_end,
        token_length_normalized as token_length_normalized,
        unconditional_likelihood_normalized as unconditional_likelihood_normalized,
        user as user,
        user_begin as user_begin,
        user_end as user_end,
        video as video,
    )
    from bough.offline import Engine as Engine

__version__ = "0.1.0"

_LANGUAGE = (
    "Anthropic",
    "Backend",
    "BackendError",
    "ChatTemplate",
    "ChoicesDecision",
    "ChoicesSamplingMethod",
    "EngineBackend",
    "Function",
    "Generation",
    "LangError",
    "LiteLLM",
    "OpenAI",
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "Runtime",
    "RuntimeEndpoint",
    "SglFunction",
    "SglGen",
    "SglImage",
    "SglRoleBegin",
    "SglRoleEnd",
    "SglSelect",
    "SglVideo",
    "TokenUsage",
    "UnknownVariable",
    "Unsupported",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_chat_template",
    "get_chat_template_by_model_path",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "register_chat_template",
    "register_chat_template_matching_function",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
)
_HOMES = {
    "Engine": "bough.offline",
    "ServerArgs": "bough.config.server_args",
    **dict.fromkeys(_LANGUAGE, "bough.lang"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bough' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
