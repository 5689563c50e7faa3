"""DeepSeek V3.2's chat format, which its checkpoints leave to a program: every part as that program writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from bough.core.errors import InvalidRequest
from bough.parsers import assemble, tool_parser
from bough.parsers.detect import detect_reasoning_parser, detect_tool_parser
from bough.tokenizer.builtin_templates import BUILTIN_TEMPLATES
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.load import load_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TEMPLATE = ChatTemplate(BUILTIN_TEMPLATES["deepseek-v3.2"], {"bos_token": BOS, "eos_token": EOS})
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."}
AGAIN = {"role": "user", "content": "Weather?"}
ARGUMENTS = {"city": 'Århus "C"', "days": 3, "units": ["C", "F"], "now": True}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I look.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}},
        {"id": "2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "6"},
]
CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Århus "C"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="units" string="false">["C", "F"]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="now" string="false">true</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="time">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
GIVEN = "\n\n<function_results>\n<result>rain</result>\n<result>6</result>\n</function_results>"


@pytest.mark.parametrize(
    ("messages", "thinking", "expected"),
    [
        ([ASKED], False, "<｜User｜>Hi<｜Assistant｜></think>"),
        ([ASKED], True, "<｜User｜>Hi<｜Assistant｜><think>"),
        (
            [SYSTEM, ASKED, SAID, AGAIN],
            True,
            f"Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello{EOS}<｜User｜>Weather?<｜Assistant｜><think>",
        ),
        (
            [AGAIN, CALLED, *RESULTS],
            True,
            f"<｜User｜>Weather?<｜Assistant｜><think>I look.</think>{CALLS}{EOS}{GIVEN}\n\n<think>",
        ),
        (
            [AGAIN, CALLED, *RESULTS],
            False,
            f"<｜User｜>Weather?<｜Assistant｜></think>{CALLS}{EOS}{GIVEN}\n\n</think>",
        ),
        (
            [{"role": "developer", "content": "Hi"}],
            False,
            "<｜User｜>\n\n# The user's message is: Hi<｜Assistant｜></think>",
        ),
    ],
)
def test_messages(messages: list[dict[str, Any]], thinking: bool, expected: str) -> None:
    assert TEMPLATE.render(messages, kwargs={"thinking": thinking}) == BOS + expected
    assert TEMPLATE.render(messages, kwargs={"enable_thinking": thinking}) == BOS + expected


def test_an_answer_is_left_open_or_not_begun() -> None:
    assert TEMPLATE.render([ASKED, {"role": "assistant", "content": "He"}], continue_final_message=True).endswith("He")
    assert TEMPLATE.render([ASKED], add_generation_prompt=False) == f"{BOS}<｜User｜>Hi"
    with pytest.raises(InvalidRequest, match="messages are of system"):
        TEMPLATE.render([{"role": "narrator", "content": "x"}])


@pytest.mark.parametrize("messages", [[SYSTEM, ASKED], [ASKED]])
def test_tools_follow_the_system_message(messages: list[dict[str, Any]]) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]
    shown = TEMPLATE.render(messages, tools=tools)
    system = "Be brief." if messages[0] is SYSTEM else ""
    assert shown.startswith(f"{BOS}{system}\n\n## Tools\n\nYou have access to a set of tools")
    assert shown.endswith(
        '<functions>\n{"name": "a", "parameters": {"type": "object"}}\n{"name": "b", "parameters": {"type": "object"}}\n'
        "</functions>\n<｜User｜>Hi<｜Assistant｜></think>"
    )


def test_what_it_writes_is_read_back() -> None:
    assert detect_tool_parser(TEMPLATE.source) == "deepseekv32"
    parser = tool_parser("deepseekv32", [])
    parsed = assemble([*parser.feed(CALLS), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [
        ("weather", ARGUMENTS),
        ("time", {}),
    ]
    assert detect_reasoning_parser(TEMPLATE.source) == "deepseek-v3"


def test_a_checkpoint_without_a_template_gets_it(tmp_path: Path) -> None:
    vocabulary = {BOS: 0, EOS: 1, "a": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV32ForCausalLM"]}))
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.source == TEMPLATE.source
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    own = load_tokenizer(tmp_path).chat_template
    assert own is not None
    assert own.render([ASKED]) == "Hi", "V3.2-Exp brings one"
