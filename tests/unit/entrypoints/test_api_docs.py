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


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with serving(admin_api_key="s4cret") as server:
        yield server


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_requests_work(running: FakeServer, method: str, path: str, body: str) -> None:
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


def test_python_in_the_docs_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "docs/api.md", "exec")
