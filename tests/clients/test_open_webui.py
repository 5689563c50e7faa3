"""What Open WebUI sends, over a connection of type OpenAI and over one of type Ollama: its own requests, field by field."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "4c1e",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "9f0a",
}
MESSAGES = [
    {"role": "system", "content": "User context: none."},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "text", "text": "And again, in one word."}]},
]
TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Output:\n"
    'JSON format: { "title": "your concise title here" }\n<chat_history>\nUSER: hi\n</chat_history>'
)


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers=HEADERS)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def test_an_openai_connection(url: str) -> None:
    models = json.loads(ask(url, "/v1/models"))
    assert models["object"] == "list"
    model = models["data"][0]["id"]
    chat = {
        "stream": True, "model": model, "messages": MESSAGES, "stream_options": {"include_usage": True},
        "max_tokens": 16, "temperature": 0.5, "frequency_penalty": 0.1, "seed": 3, "stop": ["</s>"],
    }  # fmt: skip
    lines = [line.removeprefix("data: ") for line in ask(url, "/v1/chat/completions", chat).splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    title = {
        "model": model,
        "messages": [{"role": "user", "content": TITLE}],
        "stream": False,
        "max_completion_tokens": 20,
    }
    assert json.loads(ask(url, "/v1/chat/completions", title))["choices"][0]["message"]["content"]


def test_an_ollama_connection(url: str) -> None:
    assert json.loads(ask(url, "/api/version"))["version"]
    tags = json.loads(ask(url, "/api/tags"))["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= set(tags[0])
    assert json.loads(ask(url, "/api/ps"))["models"]
    shown = json.loads(ask(url, "/api/show", {"model": tags[0]["model"]}))
    assert {"details", "model_info", "capabilities"} <= set(shown)
    chat = {
        "model": tags[0]["model"], "messages": [*MESSAGES[:3], {"role": "user", "content": "Again."}], "stream": True,
        "keep_alive": "5m", "options": {"num_predict": 16, "temperature": 0.5, "num_ctx": 2048, "repeat_penalty": 1.1},
    }  # fmt: skip
    parts = [json.loads(line) for line in ask(url, "/api/chat", chat).splitlines()]
    assert "".join(part["message"]["content"] for part in parts)
    assert parts[-1]["done"]
    assert parts[-1]["eval_count"] > 0
