"""Every route is closed by default; admin routes do not exist without their key."""

from __future__ import annotations

import httpx
import pytest
from scripted_server import FakeServer, serving

from bough.entrypoints.http.app import ROUTES
from bough.entrypoints.http.security import OPEN_PATHS, is_page


def every_route() -> list[tuple[str, str]]:
    paths = [
        (path.replace("{model:path}", "fake").replace("{file}", "app.js"), method)
        for spec in ROUTES
        for path in spec.paths
        for method in spec.methods
    ]
    return [*paths, ("/openapi.json", "GET"), ("/nothing", "GET")]


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic s3cret"},
        {"authorization": "s3cret"},
        {"authorization": "Bearer"},
        {"x-api-key": "wrong"},
        {"authorization": "Bearer wrong", "x-api-key": "s3cret"},
    ],
)
def test_without_the_key_nothing_opens(header: dict[str, str]) -> None:
    with serving(api_key="s3cret", admin_api_key="s4cret") as running, httpx.Client(base_url=running.url) as client:
        for path, method in every_route():
            response = client.request(method, path, headers=header)
            if path in OPEN_PATHS:
                assert response.status_code == 200
            elif is_page(path):
                assert response.status_code == (307 if path in ("/ui", "/docs") else 200)
            else:
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD" and not path.startswith("/api/"):
                    assert response.json()["error"]["type"] == "authentication_error"
    assert not running.engine.seen


def test_the_key_opens_normal_routes_only() -> None:
    with serving(api_key="s3cret", admin_api_key="s4cret") as running, httpx.Client(base_url=running.url) as client:
        client.headers["authorization"] = "Bearer s3cret"
        assert client.get("/v1/models").status_code == 200
        assert client.post("/pause_generation").status_code == 401
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 403
        client.headers["authorization"] = "Bearer s4cret"
        assert client.get("/v1/models").status_code == 200
        assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
        wrong = client.post("/pause_generation", json={"mode": "sideways"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")
        assert client.post("/continue_generation").status_code == 200
        assert client.post("/start_profile", json={"num_steps": 3}).status_code == 200
        assert client.post("/start_profile", json={"num_steps": -3}).status_code == 400
        assert client.post("/stop_profile").status_code == 200
        told = client.post("/configure_logging", json={"log_level": "debug", "log_requests": True}).json()
        assert (told["log_level"], told["log_requests"], running.service.log_requests) == ("debug", True, True)
        assert client.post("/configure_logging", json={"log_level": "warning"}).json()["log_requests"] is True
        assert client.post("/configure_logging", json={"log_level": "loud"}).status_code == 400
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 200


def test_admin_routes_do_not_exist_without_their_key(server: FakeServer) -> None:
    for spec in ROUTES:
        if spec.admin:
            for headers in ({}, {"authorization": "Bearer guess"}):
                response = httpx.post(server.url + spec.paths[0], headers=headers)
                assert response.status_code == 404
                assert "--admin-api-key" in response.json()["error"]["message"]
    assert not server.engine.calls or all(
        type(call).__name__ not in ("Pause", "Profile") for call in server.engine.calls
    )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "[", "10.0.0.1"]
)
def test_other_names_are_refused_without_a_key(server: FakeServer, host: str) -> None:
    refused = httpx.get(f"{server.url}/v1/models", headers={"host": host})
    assert refused.status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:30000", "127.0.0.1:1", "[::1]:5"])
def test_own_names_are_fine(server: FakeServer, host: str) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"host": host}).status_code == 200


def test_foreign_pages_are_refused_without_a_key(server: FakeServer) -> None:
    def post(origin: str) -> int:
        return httpx.post(f"{server.url}/generate", json={"text": "a"}, headers={"origin": origin}).status_code

    assert post("https://evil.example") == 403
    assert post("null") == 403
    assert post(server.url) == 200  # its own pages


def test_insecure_takes_any_name() -> None:
    with serving(insecure=True) as running:
        assert httpx.get(f"{running.url}/v1/models", headers={"host": "lan-box"}).status_code == 200


def test_cors_only_for_named_origins() -> None:
    with serving(cors_origins="https://app.example") as running:
        ask = {"access-control-request-method": "POST"}
        good = httpx.options(f"{running.url}/generate", headers={**ask, "origin": "https://app.example"})
        assert good.headers["access-control-allow-origin"] == "https://app.example"
        bad = httpx.options(f"{running.url}/generate", headers={**ask, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in bad.headers
        answer = httpx.post(f"{running.url}/generate", json={"text": "a"}, headers={"origin": "https://app.example"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_no_cors_by_default(server: FakeServer) -> None:
    headers = {"origin": server.url, "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(f"{server.url}/generate", headers=headers).headers


def test_huge_headers(server: FakeServer) -> None:
    response = httpx.get(f"{server.url}/v1/models", headers={f"x-{i}": "y" * 1000 for i in range(70)})
    assert response.status_code in (400, 431)


def test_every_answer_has_an_id_of_its_own(server: FakeServer) -> None:
    ids = {httpx.get(f"{server.url}/health").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5
    assert all(len(each) == 32 for each in ids)


def test_isolated_caches_differ_by_key() -> None:
    with serving(isolate_cache=True) as running:
        for key in ("a", "a", "b", ""):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            httpx.post(f"{running.url}/generate", json={"text": "x"}, headers=headers)
        spaces = [message.namespace for message in running.engine.seen]
    assert spaces[0] == spaces[1] != spaces[2]
    assert spaces[3] == ""
    assert all("Bearer" not in space for space in spaces)
