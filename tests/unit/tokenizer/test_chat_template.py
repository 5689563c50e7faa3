from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from bough.core.errors import ConfigError, InvalidRequest
from bough.tokenizer import ChatTemplate, Tokenizer
from bough.tokenizer.builtin_templates import BUILTIN_TEMPLATES
from bough.tokenizer.template_sandbox import RENDER_TIME_S, to_json

USER = [{"role": "user", "content": "hi"}]
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FEATURES = [
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}\n    {% generation %}\n{{ m.content }}\n    {% endgeneration %}\n{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.n }}",
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1]['content'] | trim }}{{ eos_token }}",
    "{% macro show(m) %}[{{ m.role | upper }}]{{ m.content }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "{{ messages[0].content.split(' ')[0] }} {{ 'é<&>' | tojson }} {{ messages[1:] | length }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [{"role": "user", "content": " a 'b' \"c\" é\n"}, {"role": "assistant", "content": "<x>&"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(source, special)
    for given_tools in (None, tools):
        theirs, _ = render_jinja_template([turns], tools=given_tools, chat_template=source, **special)
        assert ours.render(turns, tools=given_tools, add_generation_prompt=False) == theirs[0]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_tojson_is_plain_json(value: Any) -> None:
    assert to_json(value) == json.dumps(value, ensure_ascii=False)


def test_a_refusal_of_the_template_is_the_clients_error() -> None:
    template = ChatTemplate("{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}ok")
    assert template.render(USER) == "ok"
    with pytest.raises(InvalidRequest, match="users first"):
        template.render([{"role": "tool", "content": ""}])
    with pytest.raises(InvalidRequest, match="can't take these messages"):
        ChatTemplate("{{ 'a' + messages[0].content }}").render([{"role": "user", "content": 3}])


def test_a_template_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="compiled"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ strftime_now.__globals__['json'] }}",
    ],
)
def test_templates_can_not_reach_the_interpreter(source: str) -> None:
    try:
        shown = ChatTemplate(source).render(USER)
    except InvalidRequest:
        return
    assert shown in ("", "None"), shown


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = messages[0] %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{% for a in range(50000) %}{{ messages[0].content }}{% endfor %}",
        "{{ range(10**9) | list }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_rendering_is_bounded(source: str) -> None:
    template = ChatTemplate(source)
    started = time.thread_time()
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "x" * 1000}])
    assert time.thread_time() - started < RENDER_TIME_S + 4


def test_kwargs_reach_only_what_the_template_reads() -> None:
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.accepted_kwargs == {"enable_thinking"}
    assert template.render(USER, kwargs={"enable_thinking": True}) == "on<s>"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"):
        with pytest.raises(InvalidRequest, match=name):
            template.render(USER, kwargs={name: "x"})
    with pytest.raises(InvalidRequest, match="too large"):
        template.render(USER, kwargs={"enable_thinking": "x" * 100_000})


def test_content_format_is_found_out() -> None:
    assert ChatTemplate(PARTS).content_format == "parts"
    assert ChatTemplate(BUILTIN_TEMPLATES["chatml"]).content_format == "string"
    assert ChatTemplate("{{ messages[0]['content'] }}").content_format == "string"


def test_parts_are_joined_where_only_text_is_taken() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(InvalidRequest, match="image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    shown = ChatTemplate(PARTS).render([{"role": "user", "content": [*parts, {"type": "image"}]}])
    assert shown == "<user>ab[IMG]</user><assistant>"


def test_arguments_of_tool_calls_become_objects() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    for sent, shown in (('{"a": 1}', '{"a": 1}'), ("", "{}"), ("not json", '"not json"'), ("[1]", '"[1]"')):
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": sent}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert template.render([message]) == shown
        assert call["function"]["arguments"] == sent  # type: ignore[index]


def test_calls_are_written_out_where_the_template_has_no_place_for_them() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    template = ChatTemplate("{{ messages[0]['content'] + '|' }}")
    for content, said in ((None, ""), ("", ""), ("Let me see.", "Let me see.\n")):
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        assert template.render([message]) == f"{said}{written}|"
    knows = ChatTemplate("{{ messages[0]['content'] is none }}{{ messages[0].tool_calls | length }}")
    assert knows.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "True1"


def test_the_final_message_can_be_left_open(smollm: Tokenizer) -> None:
    assert smollm.chat_template is not None
    turns = [*USER, {"role": "assistant", "content": "Once upon"}]
    prompt = smollm.chat_template.render(turns, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(InvalidRequest, match="no final message"):
        smollm.chat_template.render([], continue_final_message=True)


def test_role_affixes_of_the_default_model(smollm: Tokenizer) -> None:
    assert smollm.chat_template is not None
    assert smollm.chat_template.role_affixes() == {
        "system": ["<|im_start|>system\n", "<|im_end|>\n"],
        "user": ["<|im_start|>user\n", "<|im_end|>\n"],
        "assistant": ["<|im_start|>assistant\n", "<|im_end|>\n"],
    }


@pytest.mark.parametrize("name", ["chatml", "llama-3", "phi-3", "zephyr", "plain", "gemma"])
def test_affixes_put_together_give_the_templates_prompt(name: str) -> None:
    template = ChatTemplate(BUILTIN_TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    affixes = template.role_affixes()
    turns = [("user", "Q"), ("assistant", "A"), ("user", "R")]
    if name != "gemma":
        turns.insert(0, ("system", "S"))
    joined = template.bos + "".join(affixes[role][0] + text + affixes[role][1] for role, text in turns)
    rendered = template.render([{"role": role, "content": text} for role, text in turns], add_generation_prompt=False)
    assert joined == rendered


def test_a_template_may_open_the_reasoning_section() -> None:
    assert ChatTemplate("x{% if add_generation_prompt %}<think>\n{% endif %}").opens_reasoning == "<think>"
    assert ChatTemplate("x").opens_reasoning == ""


def test_threads_have_budgets_of_their_own() -> None:
    slow = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = messages[0] %}{% endfor %}{% endfor %}"
    )
    errors: list[Exception] = []

    def run() -> None:
        try:
            slow.render(USER)
        except InvalidRequest as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(errors) == 2
