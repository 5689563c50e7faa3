"""What a server says when it is ready is true: its addresses answer, its curl line works, its numbers can be asked for."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess

import httpx
import pytest
from serving import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["", "s3cret"], ids=["no key", "key"])
def started(request: pytest.FixtureRequest):
    flags = ["--api-key", request.param, "-v"] if request.param else []
    with Server("--context-length", "192", *flags) as server:
        yield server, request.param


def test_every_address_of_the_banner_answers(started: tuple[Server, str]) -> None:
    server, key = started
    told = server.log()
    assert re.search(r"bough [\d.]+ is ready after [\d.]+ s", told)
    assert ("required" if key else "only this machine can connect") in re.search(r"  key +(.*)", told)[1]
    assert re.search(r"  model +\S+ on cpu, float32; context 192 tokens", told)
    assert re.search(r"  weights +none read: they are drawn at random", told)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(headers=headers, follow_redirects=True, timeout=60) as client:
        for name in ("playground", "docs", "metrics"):
            address = re.search(rf"  {name} +(http\S+)", told)[1]
            assert client.get(address).status_code == 200, address
        api = re.search(r"  API +(http\S+)  \(OpenAI\)", told)[1]
        assert client.get(f"{api}/models").status_code == 200


def test_the_curl_line_of_the_banner_works(started: tuple[Server, str]) -> None:
    server, key = started
    line = re.search(r"^  (curl .*)$", server.log(), re.MULTILINE)[1]
    assert ("authorization" in line) == bool(key)
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    words = [word.replace("$BOUGH_API_KEY", key) for word in shlex.split(line)]
    done = subprocess.run([*words, "-s", "-m", "60"], capture_output=True, text=True, timeout=90, check=True)
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] > 0, answer


def test_the_decisions_and_the_memory_table_can_be_asked_for(started: tuple[Server, str]) -> None:
    server, key = started
    told = server.log()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    info = httpx.get(f"{server.url}/server_info", headers=headers, timeout=60).json()["engine"]
    names = [row[0] for row in info["memory"]]
    assert names == ["weights", "KV cache", "graphs", "activations", "other", "free"]
    verbose = bool(key)
    in_log = [bool(re.search(rf"^ *{name} +[\d.-]+ [KMGT]?i?B", told, re.MULTILINE)) for name in names[1:]]
    assert in_log == [verbose] * len(in_log), "the log has the table under -v only"
    assert ("requests of the full 192 tokens fit at once" in told) == verbose
    assert ("decided: page_size" in told) == verbose
    assert any(line.startswith("page_size") and "(" in line for line in info["decisions"])
