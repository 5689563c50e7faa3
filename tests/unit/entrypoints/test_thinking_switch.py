"""Whether a chat's answer begins inside the reasoning, for formats that usually do."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from scripted_server import Answer, serving

from bough.parsers import REASONING_FORMATS, ResponseParser, assemble

INSIDE = sorted(name for name, format in REASONING_FORMATS.items() if format.starts_inside and not format.stays_content)
HEAD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
TEMPLATES = {
    "opens": HEAD + "<think>\n{% endif %}",
    "says nothing": HEAD + "{% endif %}",
    "opens or says nothing": HEAD + "{% if enable_thinking is not false %}<think>\n{% endif %}{% endif %}",
    "opens or closes": HEAD + "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}",
    "says nothing or closes": HEAD + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
}
USER = [{"role": "user", "content": "two and two?"}]


def in_marks_of(name: str, text: str) -> str:
    return text.replace("<think>", REASONING_FORMATS[name].start).replace("</think>", REASONING_FORMATS[name].end)


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_thinking_on_and_off(template: str, name: str) -> None:
    with serving(
        Answer(), template=in_marks_of(name, TEMPLATES[template]), served={"reasoning_parser": name}
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def read(messages: list[Any], **asked: Any) -> tuple[str, str]:
            """How an answer without any mark would be told, as reasoning and as content."""
            client.chat.completions.create(model="fake", messages=messages, extra_body=asked)
            message = server.engine.seen[-1]
            assert message.text is not None
            assert message.reasoning_open == message.text.reasoning_forced
            parser = ResponseParser.of(message.text)
            told = assemble([*parser.feed("four"), *parser.finish()])
            return told.reasoning, told.content

        assert read(USER) == read(USER, chat_template_kwargs={"enable_thinking": True}) == ("four", "")
        has_switch = "enable_thinking" in TEMPLATES[template]
        off = ("", "four") if has_switch else ("four", "")
        assert read(USER, chat_template_kwargs={"enable_thinking": False}) == off
        assert read(USER, reasoning_effort="none") == off
        begun = [*USER, {"role": "assistant", "content": "It is"}]
        assert read(begun, continue_final_message=True, add_generation_prompt=False) == ("", "four")
        parts = [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]
        begun = [*USER, {"role": "assistant", "content": parts}]
        assert read(begun, continue_final_message=True, add_generation_prompt=False) == ("", "four")
        begun[-1]["content"] = [
            {"type": "text", "text": in_marks_of(name, "<think>It")},
            {"type": "text", "text": "is"},
        ]
        assert read(begun, continue_final_message=True, add_generation_prompt=False) == ("four", "")


@pytest.mark.parametrize("name", INSIDE)
def test_a_raw_prompt_opens_a_section_only_by_saying_so(name: str) -> None:
    template = in_marks_of(name, TEMPLATES["opens"])
    with serving(Answer(), template=template, served={"reasoning_parser": name}) as server:

        def read(**asked: Any) -> tuple[str, str]:
            body = {"model": "fake", "prompt": "two and two is", "stream": False, **asked}
            said = httpx.post(f"{server.url}/api/generate", json=body).raise_for_status().json()
            return said.get("thinking", ""), said["response"]

        opened = in_marks_of(name, "Let me see. <think>\n")
        assert read() == read(raw=True, prompt=opened) == ("Hello there.", "")
        assert read(raw=True) == ("", "Hello there.")


def test_constraints_and_budgets_wait_for_no_section_that_is_over() -> None:
    closes = (
        HEAD
        + "{% if enable_thinking is false or 'quick' in messages[0].content %}<think></think>\n{% endif %}{% endif %}"
    )
    with serving(Answer(), template=closes, served={"reasoning_parser": "qwen3", "reasoning_end": (7,)}) as server:

        def waits(path: str, **asked: Any) -> tuple[bool, bool]:
            """Whether the constraint waits for the end of a section, and whether a budget counts its tokens."""
            budget = {} if path.startswith("/api") else {"thinking_budget": 5}
            httpx.post(server.url + path, json={"model": "fake", **budget, **asked}).raise_for_status()
            message = server.engine.seen[-1]
            assert message.sampling.grammar is not None
            return message.sampling.grammar.after_reasoning, message.thinking_budget >= 0

        def chat(messages: list[Any], **asked: Any) -> tuple[bool, bool]:
            form = {"type": "json_object"}
            return waits("/v1/chat/completions", messages=messages, response_format=form, **asked)

        begun = {"continue_final_message": True, "add_generation_prompt": False}
        assert chat(USER) == (True, True)
        assert chat([{"role": "user", "content": "quick: two and two?"}]) == (False, False)
        assert chat([*USER, {"role": "assistant", "content": "{"}], **begun) == (False, False)
        assert chat([*USER, {"role": "assistant", "content": "<think>Well"}], **begun) == (True, True)
        assert waits("/api/generate", prompt="{", raw=True, format="json", stream=False) == (False, False)
