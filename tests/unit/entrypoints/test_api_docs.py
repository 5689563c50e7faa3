"""docs/api.md: every route is there, and every request in it works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scripted_server import FakeServer, serving

from bough.entrypoints.http.app import ROUTES

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
REQUESTS = re.findall(r"```http\n(GET|POST) (\S+)\n(.*?)```", TEXT, re.DOTALL)


TASKS = {
    "/v1/embeddings": "embed", "/encode": "embed", "/api/embed": "embed", "/api/embeddings": "embed",
    "/v1/classify": "classify", "/classify": "classify", "/v1/moderations": "classify", "/v1/rerank": "embed",
}  # fmt: skip
"""Routes of pooling models, by what the model does."""


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, FakeServer]]:
    """A server that generates, one that embeds, one that classifies."""
    facts = {"family": "Qwen3", "modes": ["last"], "width": 4, "labels": ["safe", "hate", "violence", "spam"]}
    with (
        serving(
            admin_api_key="s4cret", speculative_algorithm="NGRAM", expert_distribution_recorder_mode="stat"
        ) as generates,
        serving(facts={"pooling": {"task": "embed", **facts}}, admin_api_key="s4cret") as embeds,
        serving(facts={"pooling": {"task": "classify", **facts}}, admin_api_key="s4cret") as classifies,
    ):
        yield {"": generates, "embed": embeds, "classify": classifies}


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_requests_work(servers: dict[str, FakeServer], method: str, path: str, body: str) -> None:
    running = servers[TASKS.get(path, "")]
    headers = {"authorization": "Bearer s4cret", "content-type": "application/json"}
    content = json.dumps(json.loads(body)) if body.strip() else None
    response = httpx.request(method, running.url + path, content=content, headers=headers)
    assert response.status_code == 200, response.text
    assert "x-bough-ignored-fields" not in response.headers


def test_every_route_is_documented() -> None:
    for spec in ROUTES:
        for path in spec.paths:
            name = path.replace("{model:path}", "default")
            assert re.search(rf"[`/ ]{re.escape(name)}[`\s]", TEXT), f"{path} is not in docs/api.md"


def test_every_route_has_an_example() -> None:
    """A request, or a call in one of the programs, which tests/e2e/test_api_docs.py runs."""
    programs = "".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    shown = {(method, path.partition("?")[0]) for method, path, _ in REQUESTS}
    shown |= set(re.findall(r"# (GET|POST|DELETE) (/\S+)", programs))
    for spec in ROUTES:
        names = {path.replace("{model:path}", "default") for path in spec.paths}
        found = {(method, name) for method in spec.methods for name in names} & shown
        assert found or names & WITHOUT, f"{spec.methods[0]} {spec.paths[0]} has no example in docs/api.md"


WITHOUT = {
    "/", "/ui", "/docs", "/concate_and_append_request", "/v1/audio/transcriptions", "/v1/audio/translations",
}  # fmt: skip
"""Pages for people; a route whose example, in words, needs requests before it (tests/e2e/test_kv_join.py); and uploads of
sound, for models that hear (tests/e2e/test_transcriptions.py)."""


def test_python_in_the_docs_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "docs/api.md", "exec")
