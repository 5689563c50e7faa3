"""Every route is closed by default; admin routes do not exist without their key."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from scripted_server import FakeServer, serving

from bough.config.check import check_exposure
from bough.config.server_args import load_config
from bough.core.errors import ConfigError
from bough.entrypoints.http.app import ROUTES
from bough.entrypoints.http.metrics import open_metrics_port
from bough.entrypoints.http.security import OPEN_PATHS, is_page
from bough.entrypoints.http.sockets import bind


def every_route() -> list[tuple[str, str]]:
    paths = [
        (path.replace("{model:path}", "fake").replace("{file:path}", "app.js"), method)
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
    """A tenant is a name, however its key is sent."""
    keys = ["one=a", "one=c", "two=b"]
    with serving(isolate_cache=True, api_key=keys, admin_api_key="boss") as running:
        for headers in (
            {"authorization": "Bearer a"},
            {"authorization": "bearer a"},
            {"authorization": "BEARER   a"},
            {"x-api-key": "a"},
            {"authorization": "Bearer c"},
            {"authorization": "Bearer b"},
            {"authorization": "Bearer boss"},
        ):
            assert httpx.post(f"{running.url}/generate", json={"text": "x"}, headers=headers).status_code == 200
        spaces = [message.namespace for message in running.engine.seen]
        tenants = [message.tenant for message in running.engine.seen]
    assert tenants == ["one"] * 5 + ["two", "admin"]
    assert len(set(spaces[:5])) == 1
    assert len(set(spaces)) == 3
    with serving(api_key=keys) as running:
        for key in "ab":
            httpx.post(f"{running.url}/generate", json={"text": "x"}, headers={"x-api-key": key})
        assert [message.namespace for message in running.engine.seen] == ["", ""], "shared unless asked for otherwise"


def browsers() -> list[tuple[dict[str, str], bool]]:
    """Headers of a GET, and whether it may change something."""
    return [
        ({}, True),
        ({"user-agent": "curl/8.5"}, True),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, False),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "OWN"}, False),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, False),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "OWN"}, True),
        ({"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"}, False),
        ({"user-agent": "Mozilla/5.0", "origin": "OWN"}, True),
    ]


@pytest.mark.parametrize(("headers", "may"), browsers())
def test_no_page_has_a_browser_change_anything_by_a_get(server: FakeServer, headers: dict[str, str], may: bool) -> None:
    sent = {name: server.url if value == "OWN" else value for name, value in headers.items()}
    for path in [path for spec in ROUTES if spec.get_changes for path in spec.paths]:
        assert httpx.get(server.url + path, headers=sent).status_code == (200 if may else 403)
        if "origin" not in headers:
            assert httpx.post(server.url + path, headers={**sent, "origin": server.url}).status_code == 200


def test_every_get_that_changes_something_is_known() -> None:
    """A GET that sends the engine more than a question is marked as such."""
    with serving(api_key="a", admin_api_key="b") as running:
        for spec in ROUTES:
            if "GET" in spec.methods:
                running.engine.calls.clear()
                path = spec.paths[0].replace("{model:path}", "fake").replace("{file}", "app.js").replace("{id}", "x")
                httpx.get(running.url + path, headers={"x-api-key": "b"})
                changed = {type(call).__name__ for call in running.engine.calls} - {"GetInfo", "Look", "Recall"}
                assert bool(changed) == spec.get_changes, path


def test_the_ordinary_key_opens_admin_routes_where_the_operator_says_so() -> None:
    with serving(api_key="s3cret", admin_with_api_key=True) as running, httpx.Client(base_url=running.url) as client:
        assert client.post("/continue_generation").status_code == 401
        client.headers["authorization"] = "Bearer s3cret"
        assert client.post("/continue_generation").status_code == 200
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
        running.engine.picture = {"rows": []}
        assert client.get("/v1/loads?include=requests").status_code == 200
    with pytest.raises(ConfigError, match="--admin-with-api-key without --api-key"):
        check_exposure(load_config({"admin_with_api_key": True}, environ={}).config)


def test_internal_state() -> None:
    with serving(admin_api_key="s4cret") as running, httpx.Client(base_url=running.url) as client:
        client.headers["authorization"] = "Bearer s4cret"
        told = client.post("/set_internal_state", json={"server_args": {"log_requests": True}}).json()
        assert (told["updated"], told["server_args"]["log_requests"], running.service.log_requests) == (
            True,
            True,
            True,
        )
        refused = client.post("/set_internal_state", json={"server_args": {"log_requests": False, "page_size": 1}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "server_args.page_size")
        assert running.service.log_requests is True


def test_keys_for_metrics() -> None:
    with serving(api_key="s3cret", metrics_api_key="m3trics") as running, httpx.Client(base_url=running.url) as client:
        for key, metrics, models in (("", 401, 401), ("m3trics", 200, 401), ("s3cret", 200, 200), ("no", 401, 401)):
            headers = {"authorization": f"Bearer {key or 'none'}"}
            assert client.get("/metrics", headers=headers).status_code == metrics
            assert client.get("/v1/models", headers=headers).status_code == models


def test_a_port_for_metrics_needs_no_key_and_has_nothing_else() -> None:
    with serving(api_key="s3cret") as running:
        sock = bind("127.0.0.1", 0, flag="--metrics-port")
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        opening = open_metrics_port(running.service, sock)
        asyncio.run_coroutine_threadsafe(opening, running._loop).result(60)
        assert "bough:" in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/v1/models").status_code == 404
        assert httpx.post(f"{url}/metrics").status_code == 404
        assert httpx.get(f"{url}/metrics", headers={"host": "evil.example"}).status_code == 403
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        closer = running.service._closers[-1]
        asyncio.run_coroutine_threadsafe(closer(), running._loop).result(60)  # type: ignore[arg-type]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/metrics")
    with pytest.raises(ConfigError, match="--metrics-port with --no-metrics"):
        load_config({"metrics_port": 9000, "metrics": False}, environ={})


@pytest.mark.parametrize("given", [{}, {"cors_origins": "https://app.example"}, {"api_key": "s3cret"}])
def test_preflights_say_what_the_call_would_be_told(given: dict[str, str]) -> None:
    with serving(**given) as running:
        foreign = {"origin": "https://evil.example"}
        asked = httpx.options(f"{running.url}/generate", headers={**foreign, "access-control-request-method": "POST"})
        assert asked.status_code == 403
        assert "--cors-origins" in asked.json()["error"]["message"]
        if "api_key" not in given:
            called = httpx.post(f"{running.url}/generate", json={"text": "a"}, headers=foreign)
            assert called.json() == asked.json()


def test_two_slashes_are_one(server: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1//chat/completions", "//v1/chat///completions"):
        assert httpx.post(server.url + path, json=body).status_code == 200
    with serving(api_key="s3cret", admin_api_key="s4cret") as running:
        headers = {"authorization": "Bearer s3cret"}
        assert httpx.post(f"{running.url}//continue_generation", headers=headers).status_code == 401
        assert httpx.get(f"{running.url}//v1//models").status_code == 401
