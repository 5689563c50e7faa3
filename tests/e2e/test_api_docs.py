"""docs/api.md on a real server: every request of it, in its order, and every program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import ROOT, Server, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TEXT = (ROOT / "docs" / "api.md").read_text()
REQUESTS = re.findall(r"```http\n(GET|POST) (\S+)\n(.*?)```", TEXT, re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
POOLING = {
    "/v1/embeddings", "/encode", "/api/embed", "/api/embeddings", "/v1/classify", "/classify", "/v1/moderations",
}  # fmt: skip
"""Routes of models that don't generate: tests/e2e/test_pooling.py has those."""
EXPERTS = {f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump")}
"""Routes of servers that count tokens by expert: tests/parallel/test_experts.py has those."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """The default model, which knows when to stop talking."""
    port = free_port()
    server = Server(
        {"device": "cpu", "context_length": 1024, "speculative_algorithm": "NGRAM"},
        "--admin-api-key", "s4cret", "--grpc-port", str(port), "--batch-dir", str(tmp_path_factory.mktemp("batches")),
    )  # fmt: skip
    yield server, port
    server.end()


def test_every_request_works(running: tuple[Server, int]) -> None:
    with httpx.Client(base_url=running[0].url, headers={"authorization": "Bearer s4cret"}, timeout=120) as client:
        for method, path, body in REQUESTS:
            if path in POOLING | EXPERTS:
                continue
            answer = client.request(method, path, json=json.loads(body) if body.strip() else None)
            assert answer.status_code == 200, f"{method} {path}: {answer.text}"
            assert "x-bough-ignored-fields" not in answer.headers, path


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_every_program_runs(running: tuple[Server, int], number: int, tmp_path: Path) -> None:
    server, port = running
    program = PROGRAMS[number].replace("http://127.0.0.1:30000", server.url)
    script = tmp_path / "program.py"
    script.write_text(program.replace("127.0.0.1:30001", f"127.0.0.1:{port}"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
