"""Chat templates, traces, reasoning formats, and what importing the language costs."""

from __future__ import annotations

import subprocess
import sys

import jinja2
import pytest

import bough.lang as sgl
from bough.lang import chat_template as templates
from bough.lang.reasoning import REASONING_FORMATS

NAMES = [
    "default",
    "claude",
    "chatml",
    "chatml-llava",
    "qwen",
    "qwen2-vl",
    "vicuna_v1.1",
    "llama-2-chat",
    "mistral",
    "llama-3-instruct",
    "minicpmv",
    "janus-pro",
    "minicpmo",
    "janus",
    "llama-3-instruct-llava",
    "llama-4",
    "yi-1.5",
    "yi-vl",
    "gemma-it",
    "gemma-4-it",
    "dbrx-instruct",
    "c4ai-command-r",
    "internvl-2-5",
    "interns1",
    "granite-3-instruct",
    "deepseek-v3",
    "glm-4v",
]

TURNS = [
    {"role": "system", "content": "Sys"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
]

# The published Jinja templates, cut down to what plain conversations need.
JINJA = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "llama-3-instruct": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}",
    "llama-4": "{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot|>{% endfor %}",
    "llama-2-chat": "{% for m in messages %}{% if m.role == 'system' %}[INST] <<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
    "{% elif m.role == 'user' %}{% if loop.index0 != 1 %}[INST] {% endif %}{{ m.content }} [/INST]"
    "{% else %}{{ m.content }} </s><s>{% endif %}{% endfor %}",
    "granite-3-instruct": "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}",
    "gemma-4-it": "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<turn|>\n{% endfor %}",
    "deepseek-v3": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_template_writes_every_role(name: str) -> None:
    text = sgl.get_chat_template(name).get_prompt(TURNS)
    assert [text.index(word) for word in ("Sys", "Hi", "Yo", "Bye")] == sorted(
        text.index(word) for word in ("Sys", "Hi", "Yo", "Bye")
    )


@pytest.mark.parametrize("name", JINJA)
def test_templates_agree_with_the_published_ones(name: str) -> None:
    rendered = jinja2.Environment(keep_trailing_newline=True).from_string(JINJA[name]).render(messages=TURNS)
    assert sgl.get_chat_template(name).get_prompt(TURNS) == rendered


def test_default_system_prompts_come_first() -> None:
    text = sgl.get_chat_template("qwen").get_prompt([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("lmsys/vicuna-7b-v1.5", "vicuna_v1.1"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-chat"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3-instruct"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2-vl"),
        ("Qwen/Qwen3-8B", "qwen"),
        ("google/gemma-2-9b-it", "gemma-it"),
        ("google/gemma-4-31b-it", "gemma-4-it"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("deepseek-ai/Janus-Pro-7B", "janus-pro"),
        ("openbmb/MiniCPM-V-2_6", "minicpmv"),
        ("openbmb/MiniCPM-o-2_6", "minicpmo"),
        ("OpenGVLab/InternVL2_5-8B", "internvl-2-5"),
        ("internlm/Intern-S1", "interns1"),
        ("ibm-granite/granite-3.1-8b-instruct", "granite-3-instruct"),
        ("01-ai/Yi-1.5-9B-Chat", "yi-1.5"),
        ("01-ai/Yi-VL-6B", "yi-vl"),
        ("CohereForAI/c4ai-command-r-v01", "c4ai-command-r"),
        ("databricks/dbrx-instruct", "dbrx-instruct"),
        ("zai-org/GLM-4.5V", "glm-4v"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "chatml"),
        ("lmms-lab/llava-onevision-qwen2-7b-ov", "chatml-llava"),
        ("lmms-lab/llama3-llava-next-8b", "llama-3-instruct-llava"),
        ("some/base", "default"),
    ],
)
def test_templates_by_model_path(path: str, name: str) -> None:
    assert sgl.get_chat_template_by_model_path(path).name == name


def test_registering_a_template_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_templates", dict(templates._templates))
    monkeypatch.setattr(templates, "_matchers", list(templates._matchers))
    mine = sgl.ChatTemplate("mine", None, {"user": ("U>", "<"), "assistant": ("A>", "<")})
    sgl.register_chat_template(mine)

    @sgl.register_chat_template_matching_function
    def match(model_path: str) -> str | None:
        return "mine" if "my-model" in model_path else None

    assert sgl.get_chat_template_by_model_path("me/my-model-instruct") is mine
    assert sgl.get_chat_template_by_model_path("Qwen/Qwen3-8B").name == "qwen"
    with pytest.raises(sgl.LangError, match="no role 'system'"):
        mine.get_prompt(TURNS)
    with pytest.raises(sgl.LangError, match="no chat template"):
        sgl.get_chat_template("nothing")


def test_affixes_from_a_server() -> None:
    info = {
        "role_affixes": {"user": ["<u>", "</u>"], "assistant": ["<a>", "</a>\n"], "system": ["<s>", "</s>"]},
        "bos": "<bos>",
        "default_system_prompt": "D",
    }
    template = templates.from_role_affixes("Qwen/Qwen2.5-VL-7B-Instruct", info)
    assert template is not None
    assert template.get_prompt([{"role": "user", "content": "x"}]) == "<bos><s>D</s><u>x</u>"
    assert template.stop_str == ("</a>",)
    assert template.image_token == "<|vision_start|><|image_pad|><|vision_end|>"
    assert templates.from_role_affixes("x", {"role_affixes": None}) is None


# -- traces


def test_a_trace_shows_the_whole_program_and_its_constant_prefix() -> None:
    @sgl.function
    def program(s, topic, depth=2):
        s += "You are a guide.\n"
        s += f"Topic: {topic}\n"
        s += sgl.gen("plan") + "\n"
        forks = s.fork(depth)
        forks += lambda i: f"{i}: " + sgl.gen("part")
        forks.join()
        s += sgl.select("ok", ["yes", "no"]) + s["part"][0]

    trace = program.trace()
    assert trace.prefix == "You are a guide.\nTopic: "
    assert trace.variables == ["plan", "part", "ok"]
    assert trace.stopped_at is None
    kinds = [type(node.expr).__name__ for node in trace.nodes]
    assert kinds.count("Gen") == 3
    fork = next(node for node in trace.nodes if type(node.expr).__name__ == "Fork")
    assert next(node.previous for node in trace.nodes if node.state == 1) == fork.number
    assert "gen('plan') after" in str(trace)
    assert "text 'Topic: <topic>\\n'" in str(trace)
    assert trace.last_node is not None
    assert trace.last_node.origin.function == "program"
    assert program.trace(topic="birds").prefix == "You are a guide.\nTopic: birds\n"
    assert program.bind(topic="bees").trace().prefix == "You are a guide.\nTopic: bees\n"


@pytest.mark.parametrize(
    "use",
    [lambda q: len(q), lambda q: q.upper(), lambda q: q == "x", lambda q: [*q], lambda q: int(q), lambda q: q or "y"],
)
def test_a_trace_ends_where_python_needs_a_real_value(use) -> None:
    @sgl.function
    def program(s, question):
        s += "Fixed. "
        s += question["text"] + " "
        try:
            use(question)
        except Exception:
            raise AssertionError("a program must not be able to swallow the end of a trace") from None
        s += "never traced"

    trace = program.trace()
    assert trace.prefix == "Fixed. "
    assert trace.stopped_at is not None
    assert trace.stopped_at.startswith("question")
    assert "never traced" not in str(trace)


def test_traces_of_async_programs() -> None:
    @sgl.function
    async def program(s, question):
        s += "Fixed. " + sgl.gen("a")
        first = await s.aget("a")
        s += f"then {first}"
        await s
        s += sgl.gen("b")

    assert program.trace().variables == ["a", "b"]
    assert program.trace().stopped_at is None

    @sgl.function
    async def waits(s, question):
        import asyncio

        s += "Fixed. "
        await asyncio.sleep(0)
        s += "later"

    assert waits.trace().prefix == "Fixed. "
    assert waits.trace().stopped_at is not None


def test_a_program_must_take_s() -> None:
    with pytest.raises(sgl.LangError, match="not s"):
        sgl.function(lambda state: None)
    with pytest.raises(sgl.LangError, match=r"\*args"):

        @sgl.function
        def program(s, *args):
            pass


@pytest.mark.parametrize(
    "call",
    [
        lambda: sgl.gen("x", regex="(("),
        lambda: sgl.gen("x", stop_regex=["(("]),
        lambda: sgl.gen("x", json_schema="{"),
        lambda: sgl.gen("x", dtype=list),
        lambda: sgl.gen("x", dtype=int, regex="a"),
        lambda: sgl.gen("x", max_tokens=-1),
        lambda: sgl.gen("x", n=1.5),  # type: ignore[arg-type]
        lambda: sgl.gen("x", schema=int),
        lambda: sgl.gen("x", schema={"type": "object"}),
    ],
)
def test_bad_parameters_are_refused_where_they_are_written(call) -> None:
    with pytest.raises(sgl.LangError):
        call()


# -- reasoning


@pytest.mark.parametrize("model_type", REASONING_FORMATS)
@pytest.mark.parametrize("text", ["{}hm <b> 1{} the <i> answer", "{}only thoughts", "no tags at all"])
def test_streamed_reasoning_equals_whole_reasoning(model_type: str, text: str) -> None:
    form = REASONING_FORMATS[model_type]
    whole = text.format(*[form.start, form.end][: text.count("{}")])
    reasoning, answer = form.split(whole, final=True)
    shown = ""
    for end in range(len(whole) + 1):
        part = form.split(whole[:end], final=False)[1]
        assert part.startswith(shown), "what was shown must stay"
        shown = part
    assert answer.startswith(shown)
    if text.count("{}") == 2:
        assert (reasoning, answer) == ("hm <b> 1", " the <i> answer")
    elif text.count("{}") == 1 or form.open_at_start:
        assert answer == ""
    else:
        assert (reasoning, answer) == ("", "no tags at all")


# -- what an import costs


def test_importing_the_language_imports_neither_torch_nor_anything_heavy() -> None:
    code = (
        "import sys, bough.lang; heavy = {'torch', 'transformers', 'numpy', 'httpx', 'pydantic', 'starlette'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
