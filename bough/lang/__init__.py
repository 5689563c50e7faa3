"""The frontend language: Python programs that generate, branch, join and share their prefixes in the cache.

in: functions over a state `s`; out: requests to a backend, and states with text and variables; never: torch, a model.
"""

from bough.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    image,
    select,
    separate_reasoning,
    set_default_backend,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from bough.lang.backends.anthropic import Anthropic
from bough.lang.backends.base import Backend, Generation
from bough.lang.backends.endpoint import RuntimeEndpoint
from bough.lang.backends.engine import EngineBackend
from bough.lang.backends.litellm import LiteLLM
from bough.lang.backends.openai import OpenAI, TokenUsage
from bough.lang.backends.runtime import Runtime
from bough.lang.chat_template import (
    ChatTemplate,
    get_chat_template,
    get_chat_template_by_model_path,
    register_chat_template,
    register_chat_template_matching_function,
)
from bough.lang.choices import (
    ChoicesDecision,
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from bough.lang.config import global_config
from bough.lang.errors import BackendError, LangError, ProgramError, UnknownVariable, Unsupported
from bough.lang.ir import Gen, Image, RoleBegin, RoleEnd, Select, Video
from bough.lang.program import Function
from bough.lang.state import ProgramState, ProgramStateGroup

# SGLang's names of the classes.
SglFunction = Function
SglGen = Gen
SglImage = Image
SglRoleBegin = RoleBegin
SglRoleEnd = RoleEnd
SglSelect = Select
SglVideo = Video

__all__ = [
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
]
