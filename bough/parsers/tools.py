"""Tool-call formats by name: their parsers, and how a call is written for constrained generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from bough.parsers.call_shapes import CallShape, CallTag, MarkupShape, PythonShape, ToolCallFormat
from bough.parsers.events import ToolSpec
from bough.parsers.gemma_calls import QUOTE, Gemma4Parser
from bough.parsers.harmony import HarmonyToolParser
from bough.parsers.header_calls import DeepseekV3Parser, DeepseekV31Parser, KimiK2Parser
from bough.parsers.names import lookup
from bough.parsers.nested_calls import TOKEN as M3_TOKEN, MinimaxM3Parser
from bough.parsers.pythonic_calls import Lfm2Parser, PythonicParser
from bough.parsers.scan import IdFactory, Parser
from bough.parsers.tools_json import (
    ApertusParser,
    CommandRParser,
    ErnieParser,
    GigaChat3Parser,
    GraniteParser,
    HermesParser,
    InklingParser,
    InternlmParser,
    Llama3Parser,
    MistralParser,
    Phi4Parser,
    TrinityParser,
)
from bough.parsers.tools_markup import (
    DeepseekV32Parser,
    DotsParser,
    GigaChat35Parser,
    Glm45Parser,
    HunyuanOpensourceParser,
    HunyuanParser,
    KimiK3Parser,
    MimoParser,
    Minicpm5Parser,
    MinimaxM2Parser,
    MuseParser,
    PoolsideV1Parser,
    Qwen3CoderParser,
    Step3Parser,
)

__all__ = ["ALIASES", "FORMATS", "CallTag", "ToolCallFormat", "ToolFormat", "call_format", "tool_format", "tool_parser"]


class MakeParser(Protocol):
    def __call__(self, tools: Sequence[ToolSpec] = (), new_id: IdFactory | None = None) -> Parser: ...


class ToolFormat(msgspec.Struct, frozen=True):
    """A family's way of calling tools, for parsers and (`shape`) for grammars."""

    name: str
    make: MakeParser
    shape: CallShape


_OBJECT = '{"name": "NAME", "arguments": '
_HERMES = CallShape(begin=f"<tool_call>\n{_OBJECT}", end="}\n</tool_call>", separator="\n", triggers=("<tool_call>",))
_COMPACT = CallShape(begin="[TOOL_CALLS]NAME[ARGS]", end="", triggers=("[TOOL_CALLS]",))


def _listed(begin: str, end: str, *, call: str = _OBJECT) -> CallShape:
    return CallShape(begin=call, end="}", section_begin=begin, separator=", ", section_end=end, triggers=(begin,))


def _python(begin: str, end: str, *, is_bare: bool = False) -> CallShape:
    triggers = () if is_bare else (begin,)
    return PythonShape(
        begin="NAME(", end=")", section_begin=begin, separator=", ", section_end=end, triggers=triggers, is_bare=is_bare
    )


def _invokes(mark: str, section: str) -> CallShape:
    """Elements `invoke` and `parameter` whose tags begin with a mark; parameters say whether they are texts."""
    return MarkupShape(
        begin=f'<{mark}invoke name="NAME">\n',
        end=f"</{mark}invoke>\n",
        argument_begin=f'<{mark}parameter name="KEY" string="IS_TEXT">',
        argument_end=f"</{mark}parameter>\n",
        section_begin=f"<{mark}{section}>\n",
        section_end=f"</{mark}{section}>",
        triggers=(f"<{mark}{section}>",),
    )


def _keyed(separator: str) -> CallShape:
    """GLM's elements, one for each key and one for each value."""
    return MarkupShape(
        begin="<tool_call>NAME\n",
        end="</tool_call>",
        argument_begin="<arg_key>KEY</arg_key>\n<arg_value>",
        argument_end="</arg_value>\n",
        separator=separator,
        triggers=("<tool_call>",),
    )


FORMATS: dict[str, ToolFormat] = {
    entry.name: entry
    for entry in (
        ToolFormat("hermes", HermesParser, _HERMES),
        ToolFormat(
            "llama3",
            Llama3Parser,
            CallShape(begin='{"name": "NAME", "parameters": ', end="}", separator="; ", triggers=('{"name": "',)),
        ),
        ToolFormat("pythonic", PythonicParser, _python("[", "]", is_bare=True)),
        ToolFormat(
            "qwen3_coder",
            Qwen3CoderParser,
            MarkupShape(
                begin="<tool_call>\n<function=NAME>\n",
                end="</function>\n</tool_call>",
                argument_begin="<parameter=KEY>\n",
                argument_end="\n</parameter>\n",
                separator="\n",
                triggers=("<tool_call>",),
            ),
        ),
        ToolFormat(
            "mimo",
            MimoParser,
            MarkupShape(
                begin="<tool_call>\n<function=NAME>\n",
                end="</function>\n</tool_call>",
                argument_begin="<parameter=KEY>",
                argument_end="</parameter>\n",
                separator="\n",
                triggers=("<tool_call>",),
            ),
        ),
        ToolFormat("mistral", MistralParser, _listed("[TOOL_CALLS] [", "]")),
        ToolFormat("mistral-compact", MistralParser, _COMPACT),
        ToolFormat(
            "deepseekv3",
            DeepseekV3Parser,
            CallShape(
                begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
                end="\n```<｜tool▁call▁end｜>",
                section_begin="<｜tool▁calls▁begin｜>",
                separator="\n",
                section_end="<｜tool▁calls▁end｜>",
                triggers=("<｜tool▁calls▁begin｜>",),
            ),
        ),
        ToolFormat(
            "deepseekv31",
            DeepseekV31Parser,
            CallShape(
                begin="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
                end="<｜tool▁call▁end｜>",
                section_begin="<｜tool▁calls▁begin｜>",
                section_end="<｜tool▁calls▁end｜>",
                triggers=("<｜tool▁calls▁begin｜>",),
            ),
        ),
        ToolFormat("deepseekv32", DeepseekV32Parser, _invokes("｜DSML｜", "function_calls")),
        ToolFormat("deepseekv4", DeepseekV32Parser, _invokes("｜DSML｜", "tool_calls")),
        ToolFormat("gigachat35", GigaChat35Parser, _invokes("｜GCML｜", "tool_calls")),
        ToolFormat(
            "kimi_k2",
            KimiK2Parser,
            CallShape(
                begin="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
                end="<|tool_call_end|>",
                section_begin="<|tool_calls_section_begin|>",
                section_end="<|tool_calls_section_end|>",
                triggers=("<|tool_calls_section_begin|>",),
            ),
        ),
        ToolFormat(
            "kimi_k3",
            KimiK3Parser,
            MarkupShape(
                begin='<|open|>call tool="NAME" index="1"<|sep|>',
                end="<|close|>call<|sep|>",
                argument_begin='<|open|>argument key="KEY" type="TYPE"<|sep|>',
                argument_end="<|close|>argument<|sep|>",
                section_begin="<|open|>tools<|sep|>",
                section_end="<|close|>tools<|sep|>",
                triggers=("<|open|>tools<|sep|>",),
            ),
        ),
        ToolFormat("glm45", Glm45Parser, _keyed("\n")),
        ToolFormat("poolside_v1", PoolsideV1Parser, _keyed("\n")),
        ToolFormat(
            "gpt-oss",
            HarmonyToolParser,
            CallShape(
                begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
                end="<|call|>",
                separator="<|start|>assistant",
                triggers=("<|channel|>commentary to=functions.",),
            ),
        ),
        ToolFormat(
            "minimax-m2",
            MinimaxM2Parser,
            MarkupShape(
                begin='<invoke name="NAME">\n',
                end="</invoke>\n",
                argument_begin='<parameter name="KEY">',
                argument_end="</parameter>\n",
                section_begin="<minimax:tool_call>\n",
                section_end="</minimax:tool_call>",
                triggers=("<minimax:tool_call>",),
            ),
        ),
        ToolFormat(
            "minimax-m3",
            MinimaxM3Parser,
            MarkupShape(
                begin=f'{M3_TOKEN}<invoke name="NAME">',
                end=f"{M3_TOKEN}</invoke>\n",
                argument_begin=f"{M3_TOKEN}<KEY>",
                argument_end=f"{M3_TOKEN}</KEY>",
                section_begin=f"{M3_TOKEN}<tool_call>\n",
                section_end=f"{M3_TOKEN}</tool_call>",
                triggers=(f"{M3_TOKEN}<tool_call>",),
            ),
        ),
        ToolFormat(
            "dots",
            DotsParser,
            MarkupShape(
                begin='<invoke name="NAME">\n',
                end="</invoke>\n",
                argument_begin='<parameter name="KEY">',
                argument_end="</parameter>\n",
                section_begin="<dots_function_call>\n",
                section_end="</dots_function_call>",
                triggers=("<dots_function_call>",),
            ),
        ),
        ToolFormat(
            "minicpm5",
            Minicpm5Parser,
            MarkupShape(
                begin='<function name="NAME">',
                end="</function>",
                argument_begin='<param name="KEY">',
                argument_end="</param>",
                triggers=('<function name="',),
            ),
        ),
        ToolFormat(
            "muse",
            MuseParser,
            MarkupShape(
                begin=' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
                end="</atem:invoke>\n</atem:function_calls><|eom|>",
                argument_begin='<atem:parameter name="KEY">',
                argument_end="</atem:parameter>\n",
                separator="<|start|>assistant",
                triggers=(" to=NAME<|message|>",),
            ),
        ),
        ToolFormat(
            "step3",
            Step3Parser,
            MarkupShape(
                begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
                end="</steptml:invoke><｜tool_call_end｜>",
                argument_begin='<steptml:parameter name="KEY">',
                argument_end="</steptml:parameter>",
                section_begin="<｜tool_calls_begin｜>",
                section_end="<｜tool_calls_end｜>",
                triggers=("<｜tool_calls_begin｜>",),
            ),
        ),
        ToolFormat("granite", GraniteParser, _listed("<|tool_call|>[", "]")),
        ToolFormat(
            "command-r",
            CommandRParser,
            _listed("<|START_ACTION|>[", "]<|END_ACTION|>", call='{"tool_name": "NAME", "parameters": '),
        ),
        ToolFormat("phi4", Phi4Parser, _listed("functools[", "]")),
        ToolFormat(
            "internlm",
            InternlmParser,
            CallShape(
                begin='<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ',
                end="}<|action_end|>",
                separator="\n",
                triggers=("<|action_start|><|plugin|>",),
            ),
        ),
        ToolFormat("lfm2", Lfm2Parser, _python("<|tool_call_start|>[", "]<|tool_call_end|>")),
        ToolFormat("hunyuan", HunyuanParser, _listed("<tool_calls>[", "]</tool_calls>")),
        ToolFormat(
            "hunyuan-opensource",
            HunyuanOpensourceParser,
            MarkupShape(
                begin="<tool_call:opensource>NAME<tool_sep:opensource>\n",
                end="</tool_call:opensource>\n",
                argument_begin="<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>",
                argument_end="</arg_value:opensource>\n",
                section_begin="<tool_calls:opensource>\n",
                section_end="</tool_calls:opensource>",
                triggers=("<tool_calls:opensource>",),
            ),
        ),
        ToolFormat("ernie", ErnieParser, _HERMES),
        ToolFormat("trinity", TrinityParser, _HERMES),
        ToolFormat("apertus", ApertusParser, _listed("<|tools_prefix|>[", "]<|tools_suffix|>", call='{"NAME": ')),
        ToolFormat(
            "gigachat3",
            GigaChat3Parser,
            CallShape(begin=f"<|function_call|>{_OBJECT}", end="}", triggers=("<|function_call|>",)),
        ),
        ToolFormat(
            "inkling",
            InklingParser,
            CallShape(
                begin='<|message_model|>NAME<|content_invoke_tool_json|>{"name":"NAME","args":',
                end="}<|end_message|>",
                triggers=("<|message_model|>NAME<|content_invoke_tool_json|>",),
            ),
        ),
        ToolFormat(
            "gemma4",
            Gemma4Parser,
            PythonShape(
                begin="<|tool_call>call:NAME{",
                end="}<tool_call|>",
                triggers=("<|tool_call>",),
                assign=":",
                comma=",",
                quote=QUOTE,
            ),
        ),
    )
}
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama4": "pythonic",
    "llama4-pythonic": "pythonic",
    "llama3-json": "llama3",
    "qwen3-xml": "qwen3_coder",
    "nemotron-3": "qwen3_coder",
    "deepseek-v3": "deepseekv3",
    "deepseek-v31": "deepseekv31",
    "deepseek-v32": "deepseekv32",
    "deepseek-v4": "deepseekv4",
    "glm": "glm45",
    "glm47": "glm45",
    "openai": "gpt-oss",
    "minimax": "minimax-m2",
    "command-r7b": "command-r",
    "cohere-command4": "command-r",
    "phi4-mini": "phi4",
    "interns1": "internlm",
    "internlm2": "internlm",
    "hunyuan-a13b": "hunyuan",
    "ernie45": "ernie",
    "granite4": "hermes",
    "step3p5": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "apertus2509": "apertus",
    "muse-glimmer": "muse",
}


def tool_format(name: str) -> ToolFormat:
    """The format called `name` (or an alias); underscores, dots and hyphens are the same."""
    return lookup(FORMATS, ALIASES, name, kind="tool-call parser", flag="--tool-call-parser")


def tool_parser(name: str, tools: Sequence[ToolSpec] = (), *, new_id: IdFactory | None = None) -> Parser:
    """A parser for one answer. `new_id` makes the ids of calls, where the model does not write them."""
    return tool_format(name).make(tools, new_id)


def call_format(name: str, tools: Sequence[ToolSpec]) -> ToolCallFormat | None:
    """How this family writes calls of these tools; None where a grammar can't hold them to their schemas."""
    return tool_format(name).shape.of(tools)
