"""What a family's template writes for a call, its parser reads back: parse(render(calls)) == calls."""

from __future__ import annotations

import copy
import html
import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings, strategies as st

from bough.parsers import TOOL_FORMATS, ResponseParser, ToolSpec, assemble, call_format, tool_parser
from tests.covers import cover

SPEC = ToolSpec(
    "make_note",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "done": {"type": "boolean"},
            "items": {"type": "array"},
            "extra": {"type": "object"},
        },
    },
)
OTHER = ToolSpec("list_notes", {"type": "object", "properties": {}})

NAME, QUOTED, JSON = "{{ c.name }}", "{{ c.name | tojson }}", "{{ c.arguments | tojson }}"
TEXT = "{{ v if v is string else v | tojson }}"


def each(call: str, between: str = "") -> str:
    return "{% for c in calls %}{% if not loop.first %}" + between + "{% endif %}" + call + "{% endfor %}"


def arguments(argument: str, between: str = "") -> str:
    separator = "{% if not loop.first %}" + between + "{% endif %}"
    return "{% for k, v in c.arguments.items() %}" + separator + argument + "{% endfor %}"


def tagged(tag: str, value: str = TEXT) -> str:
    return arguments(f'<{tag} name="{{{{ k }}}}">{value}</{tag}>\n')


PYTHON_CALL = NAME + "(" + arguments("{{ k }}={{ v | python }}", ", ") + ")"


def _dsml(mark: str) -> str:
    return (
        f'<{mark}invoke name="{NAME}">\n'
        + arguments(
            f'<{mark}parameter name="{{{{ k }}}}" string="{{{{ (v is string) | tojson }}}}">{TEXT}</{mark}parameter>\n'
        )
        + f"</{mark}invoke>\n"
    )


def as_gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f'<|"|>{k}<|"|>:{as_gemma(v)}' for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(as_gemma, value)) + "]"
        case _:
            return json.dumps(value)


def as_nested(value: Any, tag: str) -> str:
    """Lists of numbers as items; other lists and objects as JSON, for a tag has no way of being any key."""
    mark = "]<]minimax[>["
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        inside = "".join(as_nested(item, "item") for item in value)
    else:
        inside = value if isinstance(value, str) else json.dumps(value)
    return f"{mark}<{tag}>{inside}{mark}</{tag}>"


# The part of each family's chat template that writes an assistant's calls.
TEMPLATES = {
    "hermes": each(f'<tool_call>\n{{"name": {QUOTED}, "arguments": {JSON}}}\n</tool_call>', "\n"),
    "ernie": each(f'<tool_call>\n{{"name": {QUOTED}, "arguments": {JSON}}}\n</tool_call>\n'),
    "llama3": each(f'{{"name": {QUOTED}, "parameters": {JSON}}}', "; "),
    "mistral": "[TOOL_CALLS] ["
    + each(f'{{"name": {QUOTED}, "arguments": {JSON}, "id": "abcdefgh{{{{ loop.index }}}}"}}', ", ")
    + "]",
    "mistral-compact": each(f"[TOOL_CALLS]{NAME}[CALL_ID]abcdefgh{{{{ loop.index }}}}[ARGS]{JSON}"),
    "deepseekv3": "<｜tool▁calls▁begin｜>"
    + each(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{JSON}\n```<｜tool▁call▁end｜>", "\n")
    + "<｜tool▁calls▁end｜>",
    "deepseekv31": "<｜tool▁calls▁begin｜>"
    + each(f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "deepseekv32": "<｜DSML｜function_calls>\n"
    + each(
        f'<｜DSML｜invoke name="{NAME}">\n'
        + arguments(
            '<｜DSML｜parameter name="{{ k }}" string="{{ (v is string) | tojson }}">' + TEXT + "</｜DSML｜parameter>\n"
        )
        + "</｜DSML｜invoke>\n"
    )
    + "</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + each(
        f"<|tool_call_begin|>functions.{NAME}:{{{{ loop.index0 }}}}<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
    )
    + "<|tool_calls_section_end|>",
    "qwen3_coder": each(
        f"<tool_call>\n<function={NAME}>\n"
        + arguments("<parameter={{ k }}>\n" + TEXT + "\n</parameter>\n")
        + "</function>\n</tool_call>\n"
    ),
    "glm45": each(
        f"\n<tool_call>{NAME}\n"
        + arguments("<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n")
        + "</tool_call>"
    ),
    "minimax-m2": "<minimax:tool_call>\n"
    + each(f'<invoke name="{NAME}">\n' + tagged("parameter") + "</invoke>\n")
    + "</minimax:tool_call>",
    "step3": "<｜tool_calls_begin｜>"
    + each(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{NAME}">'
        + tagged("steptml:parameter")
        + "</steptml:invoke><｜tool_call_end｜>"
    )
    + "<｜tool_calls_end｜>",
    "gpt-oss": each(f"<|start|>assistant to=functions.{NAME}<|channel|>commentary json<|message|>{JSON}<|call|>"),
    "granite": "<|tool_call|>{{ calls | tojson }}",
    "command-r": "<|START_ACTION|>[\n"
    + each(f'    {{"tool_call_id": "0", "tool_name": {QUOTED}, "parameters": {JSON}}}', ",\n")
    + "\n]<|END_ACTION|>",
    "phi4": "functools{{ calls | tojson }}",
    "internlm": each(f'<|action_start|><|plugin|>\n{{"name": {QUOTED}, "parameters": {JSON}}}<|action_end|>\n'),
    "hunyuan": "<tool_calls>{{ calls | tojson }}</tool_calls>",
    "hunyuan-opensource": "<tool_calls:opensource>\n"
    + each(
        f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n"
        + arguments(
            "<arg_key:opensource>{{ k }}</arg_key:opensource>\n"
            "<arg_value:opensource>" + TEXT + "</arg_value:opensource>\n"
        )
        + "</tool_call:opensource>\n"
    )
    + "</tool_calls:opensource>",
    "mimo": each(
        f"<tool_call>\n<function={NAME}>\n"
        + arguments("<parameter={{ k }}>{{ (v if v is string else v | tojson) | xml }}</parameter>\n")
        + "</function>\n</tool_call>",
        "\n",
    ),
    "deepseekv4": "<｜DSML｜tool_calls>\n" + each(_dsml("｜DSML｜")) + "</｜DSML｜tool_calls>",
    "gigachat35": "<｜GCML｜tool_calls>\n" + each(_dsml("｜GCML｜")) + "</｜GCML｜tool_calls>",
    "kimi_k3": "<|open|>tools<|sep|>"
    + each(
        f'<|open|>call tool="{NAME}" index="{{{{ loop.index }}}}"<|sep|>'
        + arguments(
            '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "other" }}"<|sep|>'
            + TEXT
            + "<|close|>argument<|sep|>"
        )
        + "<|close|>call<|sep|>"
    )
    + "<|close|>tools<|sep|>",
    "poolside_v1": each(
        f"<tool_call>{NAME}\n"
        + arguments("<arg_key>{{ k }}</arg_key>\n<arg_value>\n" + TEXT + "\n</arg_value>\n")
        + "</tool_call>",
        "\n",
    ),
    "dots": "<dots_function_call>\n"
    + each(f'<invoke name="{NAME}">\n' + tagged("parameter") + "</invoke>\n")
    + "</dots_function_call>",
    "minicpm5": each(
        f'<function name="{NAME}">'
        + arguments('<param name="{{ k }}">{{ (v if v is string else v | tojson) | xml }}</param>')
        + "</function>"
    ),
    "minimax-m3": "]<]minimax[>[<tool_call>\n"
    + each(f']<]minimax[>[<invoke name="{NAME}">' + arguments("{{ v | nested(k) }}") + "]<]minimax[>[</invoke>\n")
    + "]<]minimax[>[</tool_call>",
    "muse": each(
        f'<|start|>assistant to={NAME}<|message|><atem:function_calls>\n<atem:invoke name="{NAME}">\n'
        + tagged("atem:parameter")
        + "</atem:invoke>\n</atem:function_calls><|eom|>"
    ),
    "trinity": each(f'<tool_call>\n{{"name": {QUOTED}, "arguments": {JSON}}}\n</tool_call>', "\n"),
    "apertus": "<|tools_prefix|>[" + each("{{ '{' }}" + f"{QUOTED}: {JSON}}}", ", ") + "]<|tools_suffix|>",
    "gigachat3": each(f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": {QUOTED}, "arguments": {JSON}}}'),
    "inkling": each(
        f'<|message_model|>{NAME}<|content_invoke_tool_json|>{{"name":{QUOTED},"args":{JSON}}}<|end_message|>'
    ),
    "gemma4": each(f"<|tool_call>call:{NAME}{{{{ c.arguments | gemma }}}}<tool_call|>"),
    "pythonic": "[" + each(PYTHON_CALL, ", ") + "]",
    "lfm2": "<|tool_call_start|>[" + each(PYTHON_CALL, ", ") + "]<|tool_call_end|>",
}
MARKUP = {
    *("deepseekv32", "deepseekv4", "gigachat35", "qwen3_coder", "glm45", "minimax-m2", "minimax-m3", "step3"),
    *("hunyuan-opensource", "kimi_k3", "mimo", "minicpm5", "poolside_v1", "dots", "muse"),
}
STRIPPING = {"dots", "minicpm5"}
"""White space around a value is none of it."""

ENVIRONMENT = jinja2.Environment(keep_trailing_newline=True)
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
ENVIRONMENT.filters["python"] = repr
ENVIRONMENT.filters["xml"] = lambda text: html.escape(text, quote=False)
ENVIRONMENT.filters["gemma"] = as_gemma
ENVIRONMENT.filters["nested"] = as_nested

RENDERED = {name: ENVIRONMENT.from_string(template) for name, template in TEMPLATES.items()}

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3), max_leaves=8
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=30),
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "done": st.booleans(),
        "items": st.lists(VALUES, max_size=3),
        "extra": st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    },
)
CALLS = st.lists(
    st.one_of(
        ARGUMENTS.map(lambda arguments: {"name": "make_note", "arguments": arguments}),
        st.just({"name": "list_notes", "arguments": {}}),
    ),
    min_size=1,
    max_size=3,
)


def parse(name: str, text: str, pieces: int) -> Any:
    parser = tool_parser(name, [SPEC, OTHER])
    step = max(1, len(text) // pieces)
    events = [event for at in range(0, len(text), step) for event in parser.feed(text[at : at + step])]
    return assemble(events + parser.finish())


def check(parsed: Any, calls: list[dict[str, Any]]) -> None:
    assert [{"name": c.name, "arguments": json.loads(c.arguments)} for c in parsed.tool_calls] == calls
    assert [c.index for c in parsed.tool_calls] == list(range(len(calls)))
    assert all(c.complete for c in parsed.tool_calls)
    assert len({c.id for c in parsed.tool_calls}) == len(calls)
    assert parsed.content == ""


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@settings(max_examples=30, deadline=None)
@given(calls=CALLS, pieces=st.integers(1, 60))
def test_reads_back_what_the_template_wrote(name: str, calls: list[dict[str, Any]], pieces: int) -> None:
    text = RENDERED[name].render(calls=calls)
    if name in MARKUP and "<" in "".join(call["arguments"].get("text", "") for call in calls):
        return  # markup has no way to quote a tag inside a value
    if name in STRIPPING:
        calls = [
            {**call, "arguments": {k: v.strip(" \t\r\n") if k == "text" else v for k, v in call["arguments"].items()}}
            for call in calls
        ]
    check(parse(name, text, pieces), calls)


JSON_FORMATS = sorted(set(TOOL_FORMATS) - MARKUP - {"pythonic", "lfm2", "gemma4"})


@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, pieces=st.integers(1, 60))
def test_reads_what_its_call_format_forces(name: str, calls: list[dict[str, Any]], pieces: int) -> None:
    """A grammar built from `call_format` yields exactly such texts."""
    format = call_format(name, [SPEC, OTHER])
    assert format is not None
    tags = {tag.name: tag for tag in format.calls}
    assert tags["make_note"].schema == SPEC.parameters
    written = [tags[c["name"]].begin + json.dumps(c["arguments"]) + tags[c["name"]].end for c in calls]
    text = format.section_begin + format.separator.join(written) + format.section_end
    assert any(text.startswith(trigger) for trigger in format.triggers)
    check(parse(name, text, pieces), calls)


def test_every_format_can_be_written_by_a_grammar() -> None:
    assert not [name for name in TOOL_FORMATS if call_format(name, [SPEC]) is None]


TWO_CALLS = [
    {"name": "make_note", "arguments": {"text": "a b", "count": 3, "items": [1, {"x": None}]}},
    {"name": "list_notes", "arguments": {}},
]


@pytest.mark.parametrize(("name", "reasoning"), cover(sorted(TOOL_FORMATS), [None, "same"]))
def test_a_forced_call_that_is_cut_short_leaves_no_content(name: str, reasoning: str | None) -> None:
    """Wherever it ends: within the opening mark, before the name, within the arguments, between two calls."""
    format = call_format(name, [SPEC, OTHER])
    assert format is not None
    thinks = "gpt-oss" if name == "gpt-oss" else "qwen3"
    forced = [format.section_begin + call.begin for call in format.calls]
    rendered = RENDERED[name].render(calls=TWO_CALLS)

    def new_parser() -> ResponseParser:
        return ResponseParser.named(
            reasoning=thinks if reasoning else None, tools=name, tool_list=[SPEC, OTHER], calls_only=True
        )

    for text in (*forced, rendered):
        slow, said = new_parser(), []
        for end in range(len(text) + 1):
            at_once = new_parser()
            whole = at_once.feed(text[:end]) + at_once.finish()
            said += slow.feed(text[end - 1 : end]) if end else []
            streamed = [said + copy.deepcopy(slow).finish()] if end % 4 == len(text) % 4 else []  # copies take long
            for events in (whole, *streamed):
                parsed = assemble(events)
                assert (parsed.content, parsed.reasoning) == ("", ""), text[:end]
                assert all(call.name in ("make_note", "list_notes") for call in parsed.tool_calls)
    assert [call.name for call in parsed.tool_calls] == ["make_note", "list_notes"]


def test_an_answer_that_may_be_text_keeps_what_turned_out_to_be_no_call() -> None:
    for calls_only, content in ((False, "It is <tool_call>"), (True, "It is")):
        parser = ResponseParser.named(tools="hermes", tool_list=[SPEC], calls_only=calls_only)
        assert assemble(parser.feed("It is <tool_call>") + parser.finish()).content == content
