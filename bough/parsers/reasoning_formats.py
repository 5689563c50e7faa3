"""How each family marks its reasoning: a table."""

from __future__ import annotations

import msgspec

from bough.parsers.names import lookup
from bough.parsers.scan import SPACE


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family marks its reasoning. `starts[0]` and `ends[0]` are what it writes today; the others are understood."""

    name: str
    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    starts_inside: bool = False
    """The prompt ends inside the section: its start is not part of the answer (and is dropped if the model repeats it)."""
    ended_by: tuple[str, ...] = ()
    """Markers of tool calls that end the section although its own end is missing; they stay part of the answer."""
    label: str = ""
    """A word the format writes behind the start."""
    again: bool = False
    """Further sections may follow inside the answer (where the delimiters are special tokens, nothing else looks so)."""
    answer: tuple[tuple[str, str], ...] = ()
    """Wrappers of the answer that are not part of it."""
    answer_prefix: str = ""
    """What the model writes between the end and the answer; a grammar for the answer starts behind it."""
    dropped: tuple[str, ...] = ()
    """Special tokens around the answer that are no part of it, wherever they stand."""
    resumes_after: str = ""
    """Where one of `ended_by` interrupted the section, it goes on behind this marker of its calls."""
    trim: str = ""
    """Characters next to the delimiters that belong to them; all other white space is kept as the model wrote it."""
    stays_content: bool = False
    """The section is not separated: it stays part of the answer, after the start delimiter with which the prompt
    ended."""
    needs_special_tokens: bool = False
    harmony: bool = False

    @property
    def start(self) -> str:
        return self.starts[0]

    @property
    def end(self) -> str:
        return self.ends[0]

    @property
    def forced_end(self) -> str:
        """What to append when the thinking budget is spent, so that the answer begins."""
        return self.end + self.answer_prefix


def _format(name: str, **fields: object) -> ReasoningFormat:
    return msgspec.convert({"name": name, **fields}, ReasoningFormat)


_QWEN_TOOL = ("<tool_call>",)
_K3_FRAMES = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_MUSE_HEADS = ("<|start|>assistant ", " ", "")
_LINE_BREAKS = "\r\n"
FORMATS: dict[str, ReasoningFormat] = {
    entry.name: entry
    for entry in (
        _format("deepseek-r1", starts_inside=True),
        _format("deepseek-v3", ended_by=("<｜tool▁calls▁begin｜>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")),
        _format("qwen3", ended_by=_QWEN_TOOL),
        _format("qwen3-thinking", starts_inside=True, ended_by=_QWEN_TOOL),
        _format("glm45", ended_by=_QWEN_TOOL),
        _format(
            "gpt-oss",
            starts=("<|channel|>analysis<|message|>",),
            ends=("<|end|>",),
            answer_prefix="<|start|>assistant<|channel|>final<|message|>",
            harmony=True,
            needs_special_tokens=True,
        ),
        _format("kimi", starts=("◁think▷",), ends=("◁/think▷",), needs_special_tokens=True),
        _format("kimi_k2", ended_by=("<|tool_calls_section_begin|>",)),
        _format(
            "kimi_k3",
            starts=("<|open|>think<|sep|>",),
            ends=("<|close|>think<|sep|>",),
            starts_inside=True,
            ended_by=("<|open|>tools<|sep|>", *_K3_FRAMES),
            dropped=_K3_FRAMES,
            needs_special_tokens=True,
        ),
        _format("step3", starts_inside=True, ended_by=("<｜tool_calls_begin｜>",)),
        _format("step3p5", starts_inside=True, ended_by=_QWEN_TOOL),
        _format("minimax", starts_inside=True, ended_by=("<minimax:tool_call>",)),
        _format("minimax-append-think", starts_inside=True, stays_content=True),
        _format(
            "minimax-m3",
            starts=("<mm:think>",),
            ends=("</mm:think>",),
            ended_by=("]<]minimax[>[<tool_call>",),
            dropped=("</mm:think>",),
            needs_special_tokens=True,
        ),
        _format("mimo", ended_by=_QWEN_TOOL),
        _format("poolside_v1", ended_by=_QWEN_TOOL),
        _format("dots", ended_by=("<dots_function_call>",)),
        _format(
            "apertus",
            starts=("<|inner_prefix|>",),
            ends=("<|inner_suffix|>",),
            ended_by=("<|tools_prefix|>",),
            resumes_after="<|tools_suffix|>",
            again=True,
            needs_special_tokens=True,
        ),
        _format(
            "inkling",
            starts=("<|message_model|><|content_thinking|>", "<|content_thinking|>"),
            ends=("<|end_message|>",),
            ended_by=("<|content_invoke_tool_json|>",),
            dropped=(
                "<|message_model|><|content_text|>",
                "<|content_text|>",
                "<|end_message|>",
                "<|content_model_end_sampling|>",
            ),
            again=True,
            needs_special_tokens=True,
        ),
        _format(
            "muse",
            starts=(" to=self<|message|>", "to=self<|message|>", "<|start|>assistant to=self<|message|>"),
            ends=("<|eom|>", "<|eot|>"),
            dropped=(
                *(f"{head}to={who}<|message|>" for head in _MUSE_HEADS for who in ("user", "commentary")),
                "<|eom|>",
                "<|eot|>",
            ),
            again=True,
            needs_special_tokens=True,
        ),
        _format(
            "mistral",
            starts=("[THINK]", "<think>"),
            ends=("[/THINK]", "</think>"),
            ended_by=("[TOOL_CALLS]",),
            needs_special_tokens=True,
        ),
        _format("nemotron_3", ended_by=_QWEN_TOOL),
        _format(
            "granite",
            starts=("<think>", "Here is my thought process:", "Here's my thought process:"),
            ends=("</think>", "Here is my response:", "Here's my response:"),
            answer=(("<response>", "</response>"),),
            trim=SPACE,
        ),
        _format(
            "gemma",
            starts=("<|channel>",),
            ends=("<channel|>",),
            label="thought\n",
            again=True,
            needs_special_tokens=True,
        ),
        _format("hunyuan", ended_by=("<tool_calls>",), answer=(("<answer>", "</answer>"),), trim=_LINE_BREAKS),
        _format(
            "hunyuan-opensource",
            starts=("<think:opensource>",),
            ends=("</think:opensource>",),
            ended_by=("<tool_calls:opensource>",),
            needs_special_tokens=True,
        ),
        _format("interns1", ended_by=("<|action_start|>",)),
        _format(
            "ernie",
            starts_inside=True,
            ended_by=_QWEN_TOOL,
            answer=(("<response>", "</response>"),),
            trim=_LINE_BREAKS,
        ),
        _format(
            "command-r",
            starts=("<|START_THINKING|>",),
            ends=("<|END_THINKING|>",),
            ended_by=("<|START_ACTION|>",),
            answer=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
            trim=_LINE_BREAKS,
            needs_special_tokens=True,
        ),
    )
}
ALIASES = {
    "deepseek-v31": "deepseek-v3",
    "deepseek-v32": "deepseek-v3",
    "deepseek-v4": "deepseek-v3",
    "gemma4": "gemma",
    "glm47": "glm45",
    "granite-thinking-parser": "granite",
    "minimax-m2": "minimax",
    "ernie45": "ernie",
    "hunyuan-a13b": "hunyuan",
    "cohere-command4": "command-r",
    "openai": "gpt-oss",
    "apertus2509": "apertus",
    "gigachat35": "deepseek-r1",
    "muse-glimmer": "muse",
    "nanbeige": "qwen3",
}


def reasoning_format(name: str) -> ReasoningFormat:
    """The format called `name` (or an alias); underscores, dots and hyphens are the same."""
    return lookup(FORMATS, ALIASES, name, kind="reasoning parser", flag="--reasoning-parser")
