"""Detects a model's parsers from its chat template."""

from __future__ import annotations

import msgspec


class _Sign(msgspec.Struct, frozen=True):
    """A template has this format if it contains all of `all`, one of `any`, and none of `none`."""

    parser: str
    all: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    none: tuple[str, ...] = ()

    def shows(self, template: str) -> bool:
        return (
            all(text in template for text in self.all)
            and (not self.any or any(text in template for text in self.any))
            and not any(text in template for text in self.none)
        )


_THINK = "<think>"
_POOLSIDE = ("unescaped XML-like object", "All available function signatures are listed below")
_REASONING = (
    _Sign("gpt-oss", all=("<|channel|>", "<|message|>", "analysis")),
    _Sign("mistral", all=("[THINK]",)),
    _Sign("kimi", all=("◁think▷",)),
    _Sign("gemma", all=("<|channel>", "<channel|>")),
    _Sign("command-r", all=("<|START_THINKING|>",)),
    _Sign("hunyuan-opensource", all=("<think:opensource>",)),
    _Sign("granite", any=("Here is my thought process", "<response></response>")),
    _Sign("hunyuan", all=(_THINK,), any=("<answer>", "<|extra_0|>", "<｜hy_", "<|hy_", "<tool_sep>")),
    _Sign("kimi_k3", all=("<|open|>", "<|sep|>")),
    _Sign("inkling", all=("<|content_thinking|>",)),
    _Sign("muse", any=("<atem:", "<|eom|><|start|>")),
    _Sign("apertus", all=("<|inner_prefix|>",)),
    _Sign("minimax-m3", any=("<mm:think>", "]<]minimax[>[")),
    _Sign("minimax", all=(_THINK,), any=("<minimax:tool_call>", "]~b]")),
    _Sign("kimi_k2", all=("<|im_middle|>",), any=(_THINK, "</think>")),
    _Sign("poolside_v1", all=(_THINK, "<arg_key>"), any=_POOLSIDE),
    _Sign("dots", all=(_THINK, "<dots_function_call>")),
    _Sign("mimo", all=(_THINK, "MiMo")),
    _Sign("step3p5", all=(_THINK, "<function=", "reasoning_effort", "Reasoning: ")),
    _Sign("glm45", any=(_THINK, "</think>"), all=("[gMASK]",)),
    _Sign("glm45", any=(_THINK, "</think>"), all=("<arg_key>",)),
    _Sign("step3", all=(_THINK,), any=("<｜tool_calls_begin｜>", "<steptml:")),
    _Sign("deepseek-v3", all=("</think>", "<｜Assistant｜>", "thinking")),
    _Sign("deepseek-v3", all=("</think>", "｜DSML｜")),
    _Sign("deepseek-r1", all=("</think>", "<｜Assistant｜>")),
    _Sign("ernie", all=("</think>", "<response>")),
    _Sign("nemotron_3", all=(_THINK,), any=("truncate_history_thinking", "<SPECIAL_")),
    _Sign("interns1", all=(_THINK,), any=("<|action_start|>", "default_thinking_sys")),
    _Sign("qwen3", all=("<|im_start|>", "</think>", "enable_thinking")),
    _Sign("qwen3-thinking", all=("<|im_start|>",), any=("<think>\\n' }}", "<think>\\n'}}", "assistant\\n<think>\\n")),
    _Sign("qwen3", all=("<|im_start|>", "</think>")),
)
_TOOLS = (
    _Sign("gpt-oss", all=("<|channel|>", "<|message|>", "functions.")),
    _Sign("kimi_k2", all=("<|tool_calls_section_begin|>",)),
    _Sign("minimax-m2", all=("<minimax:tool_call>",)),
    _Sign("minimax-m3", all=("]<]minimax[>[",)),
    _Sign("kimi_k3", all=("<|open|>", "<|sep|>")),
    _Sign("inkling", all=("<|content_invoke_tool_json|>",)),
    _Sign("muse", all=("<atem:",)),
    _Sign("apertus", all=("<|tools_prefix|>",)),
    _Sign("gemma4", all=("<|tool_call>",)),
    _Sign("gigachat35", all=("｜GCML｜",)),
    _Sign("gigachat3", any=("function call<|role_sep|>", "<|function_call|>")),
    _Sign("dots", all=("<dots_function_call>",)),
    _Sign("minicpm5", all=("<function name=", "<param name=")),
    _Sign("poolside_v1", all=("<arg_key>",), any=_POOLSIDE),
    _Sign("mimo", all=("MiMo", "<function=")),
    _Sign("deepseekv4", all=("<｜DSML｜tool_calls>",)),
    _Sign("deepseekv32", all=("｜DSML｜",)),
    _Sign("step3", all=("<steptml:invoke",)),
    _Sign("deepseekv3", all=("<｜tool▁call▁begin｜>", "```json")),
    _Sign("deepseekv31", all=("<｜tool▁call▁begin｜>",)),
    _Sign("hunyuan-opensource", all=("<tool_calls:opensource>",)),
    _Sign("hunyuan", all=("<tool_calls>",)),
    _Sign("glm45", all=("<arg_key>",)),
    _Sign("qwen3_coder", all=("<function=", "<parameter=")),
    _Sign("mistral-compact", all=("[TOOL_CALLS]", "[ARGS]")),
    _Sign("mistral", all=("[TOOL_CALLS]",)),
    _Sign("command-r", any=("<|START_ACTION|>", "Action:```json", "directly_answer")),
    _Sign("internlm", all=("<|plugin|>",)),
    _Sign("lfm2", any=("<|tool_call_start|>", "<|tool_list_start|>")),
    _Sign("phi4", any=("functools", "<|/tool_call|>", "<|/tool|>")),
    _Sign("granite", any=("<|tool_call|>", "<function_call>")),
    _Sign("ernie", all=("<tool_call>", "<response>")),
    _Sign("hermes", all=("<tool_call>",)),
    _Sign("pythonic", any=("<|python_start|>", "[func_name1(", "[func1(")),
    _Sign("llama3", any=("<|python_tag|>",)),
    _Sign("llama3", all=("<|start_header_id|>", '"parameters"')),
)


def detect_reasoning_parser(chat_template: str) -> str | None:
    """The reasoning format of a chat template; None: unknown."""
    return next((sign.parser for sign in _REASONING if sign.shows(chat_template)), None)


def detect_tool_parser(chat_template: str) -> str | None:
    """The tool-call format of a chat template; None: unknown."""
    return next((sign.parser for sign in _TOOLS if sign.shows(chat_template)), None)
