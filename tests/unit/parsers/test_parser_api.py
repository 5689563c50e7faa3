"""Names, ids, delimiters, detection, composition and the one-shot helpers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from bough.core.errors import BoughError, InvalidRequest
from bough.core.messages import Content, Reasoning, TextSpec, ToolCallArguments, ToolCallBegin, ToolCallEnd
from bough.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ResponseParser,
    ToolSpec,
    UnknownParser,
    assemble,
    call_format,
    detect_reasoning_parser,
    detect_tool_parser,
    parse_tool_calls,
    prompt_opens_reasoning,
    reasoning_format,
    reasoning_parser,
    separate_reasoning,
    tool_format,
    tool_parser,
    tool_specs,
)
from bough.parsers.detect import _REASONING, _TOOLS
from bough.parsers.scan import Markers

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def test_promised_names_are_known() -> None:
    reasoning = """deepseek-r1 deepseek-v3 qwen3 qwen3-thinking glm45 gpt-oss kimi kimi_k2 step3 minimax mistral
        nemotron_3 granite gemma gemma4 hunyuan interns1 ernie deepseek-v4 minimax-m3 minimax-append-think step3p5
        poolside_v1 inkling apertus apertus2509 dots kimi_k3 mimo muse gigachat35 nanbeige granite_thinking_parser
        cohere_command4"""
    tools = """llama3 llama4 pythonic qwen qwen25 hermes qwen3_coder mistral deepseekv3 deepseekv31 deepseekv32 kimi_k2
        glm45 glm47 gpt-oss minimax-m2 step3 granite command-r phi4 internlm lfm2 hunyuan ernie deepseekv4 gemma4 gigachat3
        gigachat35 inkling poolside_v1 apertus apertus2509 dots kimi_k3 mimo minicpm5 minimax-m3 muse step3p5 trinity
        nanbeige cohere_command4 interns1"""
    for name in reasoning.split():
        assert reasoning_parser(name).feed("") == []
    for name in tools.split():
        assert tool_parser(name).feed("") == []
    assert tool_format("QWEN3-CODER") is tool_format("qwen3_coder")
    assert reasoning_format("kimi-k2").name == "kimi_k2"


def test_unknown_names_get_help() -> None:
    with pytest.raises(UnknownParser, match="did you mean 'qwen3_coder'") as error:
        tool_parser("qwen3-codr")
    assert isinstance(error.value, BoughError)
    assert "hermes" in error.value.why
    with pytest.raises(UnknownParser, match="no reasoning parser called 'nothing like it'"):
        reasoning_parser("nothing like it")


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("hermes", CALL, r"call_[0-9a-f]{24}"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', r"[A-Za-z0-9]{9}"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}", r"[A-Za-z0-9]{9}"),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>",
            r"functions\.f:3",
        ),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{}<|call|>", r"call_[0-9a-f]{24}"),
    ],
)
def test_ids(name: str, text: str, pattern: str) -> None:
    ids = {parse_tool_calls(text, [TOOL], name).tool_calls[0].id for _ in range(3)}
    assert all(re.fullmatch(pattern, id) for id in ids)
    assert len(ids) == (1 if name == "kimi_k2" else 3)


def test_ids_can_be_injected() -> None:
    parser = tool_parser("hermes", new_id=lambda: "mine")
    assert ToolCallBegin(0, "mine", "f") in parser.feed(CALL)


def test_events_in_order() -> None:
    parser = ResponseParser.named(
        reasoning="qwen3", tools="hermes", tool_list=tool_specs([TOOL]), new_id=iter("xy").__next__
    )
    events = parser.feed(f"<think>\nHm.\n</think>\n\nOne moment.{CALL}{CALL}") + parser.finish()
    assert events == [
        Reasoning("\nHm.\n"),
        Content("\n\nOne moment."),
        ToolCallBegin(0, "x", "f"),
        ToolCallArguments(0, '{"a": 1}'),
        ToolCallEnd(0),
        ToolCallBegin(1, "y", "f"),
        ToolCallArguments(1, '{"a": 1}'),
        ToolCallEnd(1),
    ]


def test_a_name_is_told_before_its_arguments_are_whole() -> None:
    parser = tool_parser("hermes", new_id=lambda: "x")
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "lo') == [
        ToolCallBegin(0, "x", "f"),
        ToolCallArguments(0, '{"a": "lo'),
    ]
    assert parser.feed("ng") == [ToolCallArguments(0, "ng")]
    assert parser.finish() == []


def test_reasoning_is_left_before_calls() -> None:
    """A call inside the reasoning is thinking, unless the format lets calls end it."""
    inside = f"<think>maybe {CALL}</think>done"
    qwen = ResponseParser.named(reasoning="qwen3", tools="hermes")
    assert [c.name for c in assemble([*qwen.feed(inside), *qwen.finish()]).tool_calls] == ["f"]
    deepseek = ResponseParser.named(reasoning="deepseek-r1", tools="hermes")
    parsed = assemble([*deepseek.feed(inside), *deepseek.finish()])
    assert (parsed.tool_calls, parsed.reasoning, parsed.content) == ([], f"maybe {CALL}", "done")


def test_harmony_composed() -> None:
    parser = ResponseParser.named(reasoning="gpt-oss", tools="gpt-oss", new_id=lambda: "x")
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    parsed = assemble([event for char in text for event in parser.feed(char)] + parser.finish())
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Wait.")
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("f", '{"a": 1}')]


def test_without_parsers_all_is_content() -> None:
    parser = ResponseParser()
    assert parser.feed("<think>") + parser.feed("") + parser.finish() == [Content("<think>")]
    assert parser.markers == ()
    assert not parser.needs_special_tokens


def test_special_tokens_are_asked_for() -> None:
    assert not ResponseParser.named(reasoning="qwen3", tools="hermes").needs_special_tokens
    parser = ResponseParser.named(reasoning="qwen3", tools="deepseekv31")
    assert parser.needs_special_tokens
    assert {"<think>", "</think>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"} <= set(parser.markers)
    for name in TOOL_FORMATS:
        assert tool_parser(name).markers


def test_special_token_markers_cover_the_forced_text() -> None:
    """Every special token a forced call is written with must survive detokenising."""
    for name in TOOL_FORMATS:
        format = call_format(name, [ToolSpec("f")])
        if format is None:
            continue
        written = format.section_begin + format.calls[0].begin + format.calls[0].end + format.section_end
        for token in re.findall(r"<[|｜][^<>]*[|｜]>|\[[A-Z_]+\]", written):
            assert any(token in marker for marker in tool_parser(name).markers), (name, token)


def test_where_reasoning_stands() -> None:
    parser = ResponseParser.named(reasoning="deepseek-r1")
    assert parser.in_reasoning
    parser.feed("hm</thi")
    assert parser.in_reasoning
    parser.feed("nk>")
    assert not parser.in_reasoning
    harmony = reasoning_parser("gpt-oss")
    assert not harmony.in_reasoning
    harmony.feed("<|channel|>analysis<|message|>a")
    assert harmony.in_reasoning
    harmony.feed("<|end|>")
    assert not harmony.in_reasoning


def test_delimiters_are_exposed() -> None:
    for name, format in REASONING_FORMATS.items():
        text = f"{format.start}{format.label}thought{format.forced_end}answer"
        if format.stays_content:
            continue
        parsed = separate_reasoning(text, name, force_reasoning=False)
        assert (parsed.reasoning, parsed.content) == ("thought", "answer")


def test_the_prompt_says_where_the_answer_starts() -> None:
    assert prompt_opens_reasoning("<|im_start|>assistant\n<think>\n", "qwen3")
    assert not prompt_opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3")
    assert not prompt_opens_reasoning("<|im_start|>assistant\n", "qwen3")
    assert not prompt_opens_reasoning("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "qwen3")
    assert prompt_opens_reasoning("<|turn>model\n<|channel>thought\n", "gemma")
    assert prompt_opens_reasoning("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss")
    assert prompt_opens_reasoning("...", "qwen3", continued="<think>I was say")
    assert not prompt_opens_reasoning("...", "qwen3", continued="<think>I said</think>So")


def test_from_a_request() -> None:
    spec = TextSpec(reasoning_parser="qwen3", reasoning_forced=True, tool_parser="glm45", tools=json.dumps([TOOL]))
    parser = ResponseParser.of(spec, new_id=lambda: "x")
    text = "Hm.</think>Ok.<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    parsed = assemble([*parser.feed(text), *parser.finish()])
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Ok.")
    assert [(c.id, c.name, c.arguments) for c in parsed.tool_calls] == [("x", "f", '{"a": 1}')]
    plain = ResponseParser.of(TextSpec())
    assert plain.feed("<think>") + plain.finish() == [Content("<think>")]


# What tells a family's chat template from others.
TEMPLATES = [
    ('<|im_start|>{% if enable_thinking %}</think>{% endif %}<tool_call>\n{"name": ', "qwen3", "hermes"),
    ("<|im_start|>assistant\\n<think>\\n' }}{% if '</think>' %}<tool_call>", "qwen3-thinking", "hermes"),
    ("<|im_start|>{{ c }}<tool_call>\n<function=example>\n<parameter=p>", None, "qwen3_coder"),
    ("[gMASK]<sop>...</think>...<tool_call>{{ n }}<arg_key>", "glm45", "glm45"),
    ("<|start|>assistant<|channel|>analysis<|message|>... functions.", "gpt-oss", "gpt-oss"),
    ("◁think▷ ◁/think▷", "kimi", None),
    ("<|im_middle|><think></think><|tool_calls_section_begin|>", "kimi_k2", "kimi_k2"),
    ("<｜User｜><｜Assistant｜></think>...<｜tool▁call▁begin｜>x```json", "deepseek-r1", "deepseekv3"),
    (
        "{% if thinking %}<｜Assistant｜><think>{% else %}</think>{% endif %}<｜tool▁call▁begin｜>",
        "deepseek-v3",
        "deepseekv31",
    ),
    ("<｜DSML｜function_calls></think>", "deepseek-v3", "deepseekv32"),
    ("<think><｜tool_calls_begin｜><steptml:invoke name=", "step3", "step3"),
    ("]~b]ai\n<think>\n<minimax:tool_call><invoke name=", "minimax", "minimax-m2"),
    ("[INST][TOOL_CALLS] [{", None, "mistral"),
    ("[INST][THINK][TOOL_CALLS]{{ name }}[ARGS]", "mistral", "mistral-compact"),
    ("<|start_of_role|>Here is my thought process: <|tool_call|>", "granite", "granite"),
    ("<|turn>model\n<|channel>thought\n<channel|>", "gemma", None),
    ("<think>\n\n</think><|extra_0|><answer>", "hunyuan", None),
    ("<think:opensource><tool_calls:opensource>", "hunyuan-opensource", "hunyuan-opensource"),
    ("</think>\n<response>\n<tool_call>", "ernie", "ernie"),
    ("<|START_THINKING|><|START_ACTION|>", "command-r", "command-r"),
    ("<think>{{ truncate_history_thinking }}<tool_call>\n<function=f>\n<parameter=p>", "nemotron_3", "qwen3_coder"),
    ("<|im_start|><think><|action_start|><|plugin|>", "interns1", "internlm"),
    ("<|system|><|tool|>functools[", None, "phi4"),
    ("<|im_start|><|tool_list_start|>", None, "lfm2"),
    ("<|header_start|>[func_name1(params_name1=params_value1)]<|python_start|>", None, "pythonic"),
    ("<|start_header_id|><|python_tag|>", None, "llama3"),
    ('<|start_header_id|>{"name": n, "parameters": p}', None, "llama3"),
    ("<|turn>model\n<|channel>thought\n<channel|><|tool_call>call:", "gemma", "gemma4"),
    ("<｜DSML｜tool_calls></think>", "deepseek-v3", "deepseekv4"),
    ("<|open|>think<|sep|><|open|>tools<|sep|>", "kimi_k3", "kimi_k3"),
    ("<|message_model|><|content_thinking|><|content_invoke_tool_json|>", "inkling", "inkling"),
    ("<|start|>assistant to=f<|message|><atem:function_calls>", "muse", "muse"),
    ("<|inner_prefix|><|tools_prefix|>", "apertus", "apertus"),
    ("<mm:think>]<]minimax[>[<tool_call>", "minimax-m3", "minimax-m3"),
    ("<think>You are MiMo<tool_call>\n<function=f>\n<parameter=p>", "mimo", "mimo"),
    ("<think>an unescaped XML-like object <tool_call>f\n<arg_key>", "poolside_v1", "poolside_v1"),
    ("<think><dots_function_call><invoke name=", "dots", "dots"),
    ("<think>Reasoning: {{ reasoning_effort }}<tool_call>\n<function=f>\n<parameter=p>", "step3p5", "qwen3_coder"),
    ("assistant<|role_sep|>\nfunction call<|role_sep|>\n", None, "gigachat3"),
    ("<｜GCML｜tool_calls>", None, "gigachat35"),
    ('<|im_start|><function name="f"><param name="p">', None, "minicpm5"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("template", "reasoning", "tools"), TEMPLATES)
def test_detection(template: str, reasoning: str | None, tools: str | None) -> None:
    assert detect_reasoning_parser(template) == reasoning
    assert detect_tool_parser(template) == tools


def test_detection_names_parsers_that_exist() -> None:
    """All but those that an operator chooses: their models' templates look like other families'."""
    assert {sign.parser for sign in _REASONING} == set(REASONING_FORMATS) - {"minimax-append-think"}
    assert {sign.parser for sign in _TOOLS} == set(TOOL_FORMATS) - {"trinity"}


def test_one_shot_helpers() -> None:
    parsed = parse_tool_calls(f"Hi. {CALL}", [TOOL], "qwen25")
    assert parsed.content == "Hi."
    assert [(c.index, c.name, c.arguments, c.complete) for c in parsed.tool_calls] == [(0, "f", '{"a": 1}', True)]
    cut = parse_tool_calls(CALL[: CALL.index("1")], [TOOL], "hermes").tool_calls
    assert [(c.arguments, c.complete) for c in cut] == [('{"a": ', False)]
    assert separate_reasoning("<think>a</think>b", "qwen3").reasoning == "a"
    assert separate_reasoning("a</think>b", "qwen3").content == "a</think>b"
    assert separate_reasoning("a</think>b", "qwen3", force_reasoning=True).content == "b"


@pytest.mark.parametrize(
    "tools",
    [
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]',
        '[{"type": "function", "name": "f", "parameters": {"type": "object"}}]',
        '[{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search"}]',
    ],
)
def test_tools_of_every_dialect(tools: str) -> None:
    assert tool_specs(tools) == [ToolSpec("f", {"type": "object"})]


def test_no_tools() -> None:
    assert tool_specs("") == tool_specs([]) == []
    assert tool_specs([{"name": "f"}, {"name": "g", "parameters": None}]) == [ToolSpec("f"), ToolSpec("g")]


@pytest.mark.parametrize("tools", ["{}", "[1]", "not json", '[{"type": "function", "function": {}}]', [1], [{}]])
def test_bad_tools_are_the_clients_fault(tools: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        tool_specs(tools)
    assert error.value.status == 400
    assert error.value.param == "tools"


def test_markers_must_not_hide_each_other() -> None:
    with pytest.raises(ValueError, match="stands inside"):
        Markers("<a>", "<a>b")
    Markers("<a>", "\n<a>")


def test_importing_the_parsers_is_cheap() -> None:
    code = "import sys, bough.parsers; print([m for m in ('torch', 'transformers', 'starlette') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_glm_may_write_line_breaks_as_two_characters() -> None:
    text = r"Well.<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\ny</arg_value>\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    spec = TextSpec(tool_parser="glm45", tools=json.dumps(tools))
    for cut in range(len(text) + 1):
        parser = ResponseParser.of(spec)
        parsed = assemble([*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()])
        assert parsed.content == "Well."
        assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [("f", {"a": r"x\ny"})]


def test_calls_of_tools_that_were_not_offered_are_told() -> None:
    told = parse_tool_calls('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', [TOOL], "hermes")
    assert [call.name for call in told.tool_calls] == ["other"]


def test_calls_of_tools_that_were_not_offered_can_be_left_out() -> None:
    other = CALL.replace('"f"', '"other"')
    text = f"Well.\n{other}\n{CALL}\n{other}\n{CALL}"
    spec = TextSpec(tool_parser="hermes", tools=json.dumps([TOOL]), drop_unknown_tools=True)
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        parser = ResponseParser.of(spec, new_id=lambda: "x")
        parsed = assemble([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert parsed.content == "Well."
        assert [(call.index, call.name, call.arguments) for call in parsed.tool_calls] == [
            (0, "f", '{"a": 1}'),
            (1, "f", '{"a": 1}'),
        ]
