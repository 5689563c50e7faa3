"""Frameworks that people point at a server: a round trip each, against the default model.

They pin one another's dependencies, so they live in an environment of their own (`make test-clients`), which holds
nothing of bough; the server is started with the interpreter in BOUGH_PYTHON. Without a framework its tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FRAMEWORKS = ("litellm", "instructor", "langchain_openai", "pydantic_ai")
NODE_MODULES = os.environ.get("BOUGH_NODE_MODULES", "")
if not NODE_MODULES and not any(importlib.util.find_spec(name) for name in FRAMEWORKS):
    pytest.skip("no framework is installed here: run `make test-clients`", allow_module_level=True)

ROOT = Path(__file__).parents[2]
CAPITAL = "What is the capital of France? Answer with one word."
MODEL = "SmolLM2-135M-Instruct"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": CAPITAL}], "max_tokens": 16, "temperature": 0}
    openai_like = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    whole = litellm.completion(**openai_like, **asked)
    assert "Paris" in whole.choices[0].message.content
    pieces = litellm.completion(**openai_like, **asked, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == whole.choices[0].message.content
    forced = litellm.completion(**openai_like, **{**asked, "max_tokens": 128}, tools=[WEATHER], tool_choice="required")
    call = forced.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    anthropic_like = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none"}
    assert "Paris" in litellm.completion(**anthropic_like, **asked).choices[0].message.content
    ollama_like = {"model": f"ollama_chat/{MODEL}", "api_base": url}
    assert "Paris" in litellm.completion(**ollama_like, **asked).choices[0].message.content


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai
    import pydantic

    class Size(pydantic.BaseModel):
        kind: str = pydantic.Field(pattern="^(small|large)$")

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        made = client.chat.completions.create(
            model=MODEL, response_model=Size, messages=[{"role": "user", "content": "Is Paris a small or a large city?"}],
            max_tokens=128, temperature=0, max_retries=0,
        )  # fmt: skip
        assert made.kind in ("small", "large")


def test_langchain(url: str) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        model = ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=16, use_responses_api=responses
        )
        whole = model.invoke(CAPITAL)
        assert "Paris" in whole.text
        assert "".join(str(each.text) for each in model.stream(CAPITAL)) == whole.text
        assert whole.usage_metadata["input_tokens"] > 0
    caller = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=128)
    made = caller.bind_tools([WEATHER], tool_choice="required").invoke("How is the weather in Oslo?")
    assert made.tool_calls[0]["name"] == "get_weather"


def test_pydantic_ai(url: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL, provider=provider), model_settings={"temperature": 0, "max_tokens": 16})
        assert "Paris" in agent.run_sync(CAPITAL).output


NODE = """
import OpenAI, { toFile } from "openai";
const client = new OpenAI({baseURL: process.env.URL + "/v1", apiKey: "none"});
const messages = [{role: "user", content: process.env.ASK}];
const asked = {model: "default", messages, max_tokens: 16, temperature: 0};
const told = {};
const whole = await client.chat.completions.create(asked);
told.chat = whole.choices[0].message.content;
told.streamed = "";
for await (const chunk of await client.chat.completions.create({...asked, stream: true}))
  told.streamed += chunk.choices[0]?.delta?.content ?? "";
told.helped = await client.chat.completions.stream(asked).finalContent();
const tools = JSON.parse(process.env.TOOLS);
const called = await client.chat.completions.create({...asked, max_tokens: 128, tools, tool_choice: "required"});
told.call = called.choices[0].message.tool_calls[0].function;
const text = {model: "default", prompt: "The capital of France is", max_tokens: 8, temperature: 0};
told.completion = (await client.completions.create(text)).choices[0].text;
told.completed = "";
for await (const chunk of await client.completions.create({...text, stream: true}))
  told.completed += chunk.choices[0]?.text ?? "";
const models = (await client.models.list()).data;
told.model = (await client.models.retrieve(models[0].id)).id;
const input = {model: "default", input: messages, max_output_tokens: 16, temperature: 0};
const response = await client.responses.create(input);
told.response = response.output_text;
told.answered = (await client.responses.stream(input).finalResponse()).output_text;
told.again = (await client.responses.retrieve(response.id)).output_text;
told.items = (await client.responses.inputItems.list(response.id)).data.length;
await client.responses.delete(response.id);
const line = JSON.stringify({custom_id: "a", method: "POST", url: "/v1/chat/completions", body: asked});
const file = await client.files.create({file: await toFile(Buffer.from(line), "a.jsonl"), purpose: "batch"});
let batch = await client.batches.create(
  {input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h"});
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((done) => setTimeout(done, 200));
  batch = await client.batches.retrieve(batch.id);
}
const answer = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
told.batch = answer.response.body.choices[0].message.content;
await client.files.delete(file.id);
try { await client.chat.completions.create({...asked, temperature: -1}); }
catch (error) { told.refused = [error.status, error.param, error instanceof OpenAI.BadRequestError]; }
console.log(JSON.stringify(told));
"""


def test_node(url: str, tmp_path: Path) -> None:
    modules = NODE_MODULES
    if shutil.which("node") is None or not Path(modules, "openai").is_dir():
        pytest.skip("needs node, and BOUGH_NODE_MODULES with openai in it")
    (tmp_path / "node_modules").symlink_to(Path(modules).resolve())
    script = tmp_path / "ask.mjs"
    script.write_text(NODE)
    done = subprocess.run(
        ["node", str(script)],
        env={**os.environ, "URL": url, "ASK": CAPITAL, "TOOLS": json.dumps([WEATHER])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "Paris" in told["chat"]
    same = ("chat", "streamed", "helped", "response", "answered", "again", "batch")
    assert {told[name] for name in same} == {told["chat"]}
    assert told["call"]["name"] == "get_weather"
    assert json.loads(told["call"]["arguments"])["city"] in ("Oslo", "Rome")
    assert "Paris" in told["completion"]
    assert told["completed"] == told["completion"]
    assert (told["model"], told["items"]) == (MODEL, 1)
    assert told["refused"] == [400, "temperature", True]
