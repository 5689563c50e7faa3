"""The playground's files and its state route, as a browser and as a stranger would ask for them."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from scripted_server import FakeServer, serving

from bough.entrypoints.http.ui import routes

STATIC = Path(routes.__file__).parent / "static"
ROW = {"rid": "ui-0123456789abcdef", "phase": "running", "prompt_tokens": 5}


def policy(response: httpx.Response) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in response.headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


def test_the_page_and_everything_it_names_is_there(server: FakeServer) -> None:
    page = httpx.get(f"{server.url}/ui", follow_redirects=True)
    assert page.url.path == "/ui/"
    assert page.headers["content-type"].startswith("text/html")
    named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    modules = [name for file in STATIC.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', file.read_text())]
    assert len(set(named)) >= 4
    for name in {*named, *modules}:
        found = httpx.get(urljoin(str(page.url), name))
        assert found.status_code == 200, name
        assert found.headers["x-content-type-options"] == "nosniff"


def test_the_bundle_is_small_and_needs_nobody_else() -> None:
    own = [path for path in STATIC.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in own) < 150_000
    for path in own:
        text = path.read_text()
        assert not re.search(r"(src|href|url\(|import|from)\s*=?\s*[\"'(]?(https?:)?//", text), path.name
        assert not re.search(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page), "inline code or style"


def test_vendored_files_are_what_their_packages_hold(server: FakeServer) -> None:
    record = json.loads((STATIC / "vendor" / "vendor.json").read_text())
    sums = {name: digest for package in record for name, digest in package["files"].items()}
    there = {
        path.relative_to(STATIC / "vendor").as_posix() for path in (STATIC / "vendor").rglob("*") if path.is_file()
    }
    assert there - {"vendor.json"} == set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest, name
    for package in record:
        assert any(name.endswith("LICENSE") for name in package["files"]), package["name"]
    font = next(name for name in sums if name.endswith(".woff2"))
    assert httpx.get(f"{server.url}/ui/vendor/{font}").headers["content-type"] == "font/woff2"
    assert policy(httpx.get(f"{server.url}/ui/"))["font-src"] == "'self'"


def test_browsers_that_open_the_bare_address_are_led_to_the_page(server: FakeServer) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    moved = httpx.get(f"{server.url}/", headers=browser)
    assert (moved.status_code, moved.headers["location"]) == (307, "ui/")
    assert httpx.get(f"{server.url}/").json()["name"] == "bough", "programs get what they always did"
    with serving(api_key="s3cret") as keyed:
        assert httpx.get(f"{keyed.url}/", headers=browser, follow_redirects=True).status_code == 200
        assert httpx.get(f"{keyed.url}/").status_code == 401
    with serving(ui=False) as plain:
        assert httpx.get(f"{plain.url}/", headers=browser).json()["name"] == "bough"


def test_the_policy_allows_its_own_files_only(server: FakeServer) -> None:
    for path in ("/ui/", "/ui/app.js", "/ui/style.css", "/ui"):
        allowed = policy(httpx.get(server.url + path))
        assert allowed["default-src"] == "'none'"
        assert allowed["script-src"] == allowed["style-src"] == allowed["connect-src"] == "'self'"
        assert allowed["frame-ancestors"] == allowed["base-uri"] == allowed["form-action"] == "'none'"


@pytest.mark.parametrize(
    ("api", "origin"),
    [
        ("https://api.example.com/v1", "https://api.example.com"),
        ("http://10.0.0.7:8000/v1/", "http://10.0.0.7:8000"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("https://a.example; script-src *", ""),
        ("https://user:pass@a.example/v1", ""),
        ("javascript:alert(1)", ""),
        ("https://*", ""),
        ("https://a.example:99999999/v1", ""),
        ("//a.example", ""),
        ("https://a.example\r\nx: y", ""),
        ("", ""),
    ],
)
def test_another_api_opens_one_origin_and_nothing_else(server: FakeServer, api: str, origin: str) -> None:
    response = httpx.get(f"{server.url}/ui/", params={"api": api})
    assert policy(response)["connect-src"] == f"'self' {origin}".strip()
    assert policy(response)["script-src"] == "'self'"
    assert set(policy(response)) == set(policy(httpx.get(f"{server.url}/ui/")))


def test_the_redirect_keeps_prefix_and_query(server: FakeServer) -> None:
    moved = httpx.get(f"{server.url}/ui", params={"api": "https://a.example/v1"})
    assert moved.status_code == 307
    target = urljoin("https://proxy.example/llm/ui", moved.headers["location"])
    assert target.startswith("https://proxy.example/llm/ui/?api=")


@pytest.mark.parametrize("name", ["nothing.js", "routes.py", "..%2froutes.py", "%2e%2e/routes.py", "static/app.js"])
def test_only_its_files_are_served(server: FakeServer, name: str) -> None:
    assert httpx.get(f"{server.url}/ui/{name}").status_code == 404


def test_files_are_not_sent_twice(server: FakeServer) -> None:
    first = httpx.get(f"{server.url}/ui/app.js")
    again = httpx.get(f"{server.url}/ui/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_off_with_one_flag() -> None:
    with serving(ui=False) as running:
        for path in ("/ui", "/ui/", "/ui/app.js", "/ui/state", "/docs"):
            assert httpx.get(running.url + path).status_code == 404
        assert "/ui/state" not in httpx.get(f"{running.url}/openapi.json").json()["paths"]


def test_state_needs_the_key_and_hides_ids() -> None:
    with serving(api_key="s3cret", admin_api_key="s4cret") as running:
        running.engine.picture = {"rows": [ROW, {**ROW, "rid": "a"}], "spans": []}

        def rids(key: str) -> list[str]:
            found = httpx.get(f"{running.url}/ui/state", headers={"authorization": f"Bearer {key}"})
            assert found.status_code == 200
            return [row["rid"] for row in found.json()["rows"]]

        assert httpx.get(f"{running.url}/ui/state").status_code == 401
        assert rids("s4cret") == [ROW["rid"], "a"]
        assert rids("s3cret") == ["ui-01234…", "…"]


def test_the_text_of_spans_is_for_admins() -> None:
    with serving(api_key="s3cret", admin_api_key="s4cret") as running:
        tokenizer = running.engine.engine_client.tokenizer
        ids = tokenizer.encode("A secret prompt")
        span = {"id": 1, "parent": 0, "tokens": 99, "first_ids": [*ids, 2**40]}
        running.engine.picture = {"rows": [], "spans": [span]}

        def span_for(key: str) -> dict[str, Any]:
            found = httpx.get(f"{running.url}/ui/state", headers={"authorization": f"Bearer {key}"}).json()
            return dict(found["spans"][0])

        assert span_for("s4cret")["text"].endswith("A secret prompt")
        assert span_for("s3cret") == {"id": 1, "parent": 0, "tokens": 99, "text": None}


def test_a_server_without_keys_hides_nothing_from_its_machine() -> None:
    with serving() as running:
        running.engine.picture = {"rows": [ROW], "spans": []}
        found = httpx.get(f"{running.url}/ui/state")
        assert found.json()["rows"] == [ROW]
        assert found.headers["cache-control"] == "no-store"
        refused = httpx.get(f"{running.url}/ui/state", headers={"host": "evil.example"})
        assert refused.status_code == 403
        assert httpx.get(f"{running.url}/ui/", headers={"host": "evil.example"}).status_code == 403


def test_many_watchers_cost_the_engine_as_much_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.entrypoints.http.ui.routes._FRESH_S", 30.0)  # longer than the watchers need together
    with serving() as running:
        running.engine.picture = {"rows": [], "spans": []}

        def ask(_: Any) -> int:
            return httpx.get(f"{running.url}/ui/state").status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(40))) == {200}
        assert len(running.engine.calls) == 1
