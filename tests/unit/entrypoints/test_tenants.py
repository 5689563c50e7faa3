"""What one client makes, another can't reach, by whatever route and under whatever name.

Routes, their fields and the server's stores are found in the code: one that is new fails here until it is listed.
"""

from __future__ import annotations

import enum
import re
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from scripted_server import Answer, FakeServer, serving, wait_until

from bough.core.messages import Recall
from bough.entrypoints.grpc import bough_pb2 as pb
from bough.entrypoints.http.app import ROUTES

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SAME_ID = "item_of_mine"


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Answers to prompts with the word "wait" come when it is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def running(held: threading.Event, tmp_path: Path) -> Iterator[FakeServer]:
    def script(_: Any, prompt: str) -> Answer:
        return Answer(held=held if "wait" in prompt else None)

    keys = ["mine=a", "theirs=b"]
    with serving(script, api_key=keys, admin_api_key="boss", batch_dir=str(tmp_path)) as server:
        yield server


@pytest.fixture
def mine(running: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, headers={"authorization": "Bearer a"}) as client:
        yield client


@pytest.fixture
def theirs(running: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, headers={"authorization": "Bearer b"}) as client:
        yield client


# -- routes and their fields ----------------------------------------------------------------------


def upload(client: httpx.Client) -> str:
    line = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}'
    made = client.post("/v1/files", files={"file": line.encode()}, data={"purpose": "batch"})
    return str(made.json()["id"])


def batch(client: httpx.Client) -> str:
    asked = {"input_file_id": upload(client), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(client.post("/v1/batches", json=asked).json()["id"])


def message_batch(client: httpx.Client) -> str:
    params = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    made = client.post("/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]})
    return str(made.json()["id"])


def response(client: httpx.Client, **fields: Any) -> str:
    item = {"type": "message", "role": "user", "id": SAME_ID, "content": f"secret of {client.headers['authorization']}"}
    return str(client.post("/v1/responses", json={"input": [item], **fields}).json()["id"])


def by_path(make: Callable[[httpx.Client], str]) -> Callable[..., None]:
    """Only the owner gets what `{id}` names."""

    def check(path: str, method: str, mine: httpx.Client, theirs: httpx.Client, **_: Any) -> None:
        url = path.replace("{id}", make(mine))
        assert theirs.request(method, url).status_code == 404
        assert mine.request(method, url).status_code in (200, 400), "400: it can't be cancelled any more, but is there"

    return check


def own_name(
    path: str, running: FakeServer, mine: httpx.Client, theirs: httpx.Client, held: threading.Event, **_: Any
) -> None:
    """The same rid of two tenants is two names: neither is in the other's way, and neither ends the other's request."""
    texts: dict[str, Any] = {
        "/v1/completions": {"prompt": "wait", "max_tokens": 5},
        "/generate": {"text": "wait"},
        "/v1/responses": {"input": "wait"},
        "/v1/messages": {"messages": [{"role": "user", "content": "wait"}], "max_tokens": 5},
    }
    asked = {**texts.get(path, {"messages": [{"role": "user", "content": "wait"}]}), "rid": "r"}
    got: dict[str, httpx.Response] = {}

    def ask(name: str, client: httpx.Client) -> threading.Thread:
        thread = threading.Thread(target=lambda: got.update({name: client.post(path, json=asked)}))
        thread.start()
        return thread

    threads = [ask("mine", mine)]
    wait_until(lambda: running.service.engine_client.num_live == 1)
    assert theirs.post("/abort_request", json={"rid": "r"}).json()["aborted"] == 0
    again = mine.post(path, json=asked)
    assert again.status_code == 400, "while it is under way, and within the tenant"
    assert "rid" in again.text
    threads.append(ask("theirs", theirs))
    wait_until(lambda: running.service.engine_client.num_live == 2)
    held.set()
    for thread in threads:
        thread.join(60)
    assert {name: reply.status_code for name, reply in got.items()} == {"mine": 200, "theirs": 200}
    assert mine.post(path, json=asked).status_code == 200, "the name is free again"


def previous(path: str, mine: httpx.Client, theirs: httpx.Client, **_: Any) -> None:
    asked = {"input": "b", "previous_response_id": response(mine)}
    assert theirs.post(path, json=asked).status_code == 404
    assert mine.post(path, json=asked).status_code == 200


def item_reference(path: str, mine: httpx.Client, theirs: httpx.Client, **_: Any) -> None:
    """An item is neither read nor overwritten by others who know its id."""
    response(mine)
    asked = {"input": [{"type": "item_reference", "id": SAME_ID}, {"role": "user", "content": "repeat it"}]}
    assert theirs.post(path, json=asked).status_code == 400
    assert mine.post(path, json=asked).status_code == 200
    their_own = theirs.get(f"/v1/responses/{response(theirs)}/input_items").json()["data"][0]
    made = mine.post("/v1/responses", json=asked).json()["id"]
    read = mine.get(f"/v1/responses/{made}/input_items", params={"order": "asc"}).json()["data"][0]
    assert read["id"] == their_own["id"] == SAME_ID
    assert read["content"] != their_own["content"]


def input_file(mine: httpx.Client, theirs: httpx.Client, **_: Any) -> None:
    asked = {"input_file_id": upload(mine), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert theirs.post("/v1/batches", json=asked).status_code == 404


def session(path: str, mine: httpx.Client, theirs: httpx.Client, **_: Any) -> None:
    assert mine.post("/open_session", json={"session_id": "s"}).json() == "s"
    asked = {"text": "a", "session_params": {"id": "s"}}
    assert theirs.post("/generate", json=asked).status_code == 404
    assert theirs.post("/close_session", json={"session_id": "s"}).status_code == 404
    assert theirs.post("/open_session", json={"session_id": "s"}).json() == "s", "their names are their own"
    assert theirs.post("/close_session", json={"session_id": "s"}).status_code == 200
    assert mine.post("/generate", json=asked).status_code == 200


def joined(running: FakeServer, mine: httpx.Client, theirs: httpx.Client, **_: Any) -> None:
    """The engine is asked for names that no other tenant can give, and for joined contexts in namespaces of their own."""
    asked = {"dst_rid": "p", "src_rids": ["x"]}
    for client in (mine, theirs):
        client.post("/concate_and_append_request", json=asked)
        client.post("/generate", json={"text": "a", "session_params": {"id": "join-0"}})
    recalls = [call for call in running.engine.calls if isinstance(call, Recall)]
    assert [call.names for call in recalls] == [("mine\np", "mine\nx"), ("",), ("theirs\np", "theirs\nx"), ("",)]
    assert recalls[1].namespace != recalls[3].namespace
    mine.post("/generate", json={"text": "a", "rid": "kept", "sampling_params": {"max_new_tokens": 0}})
    last = running.engine.seen[-1]
    assert (last.keep, last.tenant, last.rid) == (True, "mine", "kept"), "kept under its owner's name"


def aborted(running: FakeServer, mine: httpx.Client, theirs: httpx.Client, held: threading.Event, **_: Any) -> None:
    got: list[httpx.Response] = []
    asked = {"text": "wait", "rid": "r"}
    thread = threading.Thread(target=lambda: got.append(mine.post("/generate", json=asked)))
    thread.start()
    wait_until(lambda: running.service.engine_client.num_live == 1)
    assert theirs.post("/abort_request", json={"rid": "r"}).json()["aborted"] == 0
    assert theirs.post("/abort_request", json={"abort_all": True}).status_code == 403
    assert running.service.engine_client.num_live == 1
    boss = {"authorization": "Bearer boss"}
    assert httpx.post(f"{running.url}/abort_request", json={"rid": "r"}, headers=boss).json()["aborted"] == 1
    thread.join(60)
    assert got[0].json()["meta_info"]["finish_reason"]["type"] == "abort"


def pooled_name(path: str, method: str, **_: Any) -> None:
    """Pooled requests reach the engine under their owner's name, too."""
    task = "classify" if path in ("/classify", "/v1/classify", "/v1/moderations") else "embed"
    pooling = {"task": task, "family": "Qwen3", "modes": ["last"], "width": 4, "labels": ["a", "b", "c", "d"]}
    asked: dict[str, Any] = {"rid": "r", **POOLED.get(path, {"input": "a"})}
    with serving(facts={"pooling": pooling}, api_key="mine=a") as pools:
        reply = httpx.request(method, pools.url + path, json=asked, headers={"x-api-key": "a"})
        assert reply.status_code == 200, reply.text
        assert {each.tenant for each in pools.engine.seen} == {"mine"}


POOLED = {
    "/encode": {"text": "a"},
    "/classify": {"text": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


NAMES: dict[tuple[str, str], Callable[..., None]] = {
    ("/v1/chat/completions", "rid"): own_name,
    ("/v1/completions", "rid"): own_name,
    ("/generate", "rid"): own_name,
    ("/v1/responses", "rid"): own_name,
    ("/v1/messages", "rid"): own_name,
    ("/generate", "session_params"): session,
    ("/v1/responses", "previous_response_id"): previous,
    ("/v1/responses", "input"): item_reference,
    ("/v1/responses/input_tokens", "previous_response_id"): previous,
    ("/v1/responses/input_tokens", "input"): item_reference,
    ("/v1/responses/{id}", "id"): by_path(response),
    ("/v1/responses/{id}/cancel", "id"): by_path(lambda client: response(client, background=True)),
    ("/v1/responses/{id}/input_items", "id"): by_path(response),
    ("/v1/files/{id}", "id"): by_path(upload),
    ("/v1/files/{id}/content", "id"): by_path(upload),
    ("/v1/batches", "input_file_id"): input_file,
    ("/v1/batches/{id}", "id"): by_path(batch),
    ("/v1/batches/{id}/cancel", "id"): by_path(batch),
    ("/v1/messages/batches/{id}", "id"): by_path(message_batch),
    ("/v1/messages/batches/{id}/cancel", "id"): by_path(message_batch),
    ("/v1/messages/batches/{id}/results", "id"): by_path(message_batch),
    ("/abort_request", "rid"): aborted,
    ("/open_session", "session_id"): session,
    ("/close_session", "session_id"): session,
    ("/concate_and_append_request", "src_rids"): joined,
    ("/concate_and_append_request", "dst_rid"): joined,
    **{
        (path, "rid"): pooled_name
        for path in (
            "/v1/embeddings", "/encode", "/classify", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/moderations"
        )
    },
}  # fmt: skip
"""What every field that names something of a tenant's is checked by."""

TOKEN_IDS = frozenset(
    {
        "stop_token_ids",
        "allowed_token_ids",
        "input_ids",
        "label_token_ids",
        "return_token_ids",
        "return_prompt_token_ids",
    }
)
ALSO_NAMES = frozenset({"session_params", "conversation", "input"})
"""Fields whose values may name things, though they are not called so."""
NOTHING_NAMED = {
    ("/add_external_corpus", "corpus_id"): "corpora belong to the server; admin key",
    ("/remove_external_corpus", "corpus_id"): "corpora belong to the server; admin key",
    ("/v1/responses", "conversation"): "refused: there are none",
    ("/v1/responses/input_tokens", "conversation"): "counted, and read from nowhere",
    ("/v1/responses/input_tokens", "rid"): "no request is made",
    **{
        (path, "input"): "texts"
        for path in ("/v1/embeddings", "/v1/classify", "/v1/moderations", "/api/embed", "/api/embeddings")
    },
}


def naming_fields() -> set[tuple[str, str]]:
    found = set()
    for spec in ROUTES:
        names = [name for name in re.findall(r"{(\w+)", spec.paths[0]) if name not in ("model", "file")]
        if spec.body is not None:
            names += [field.encode_name for field in msgspec.structs.fields(spec.body)]
        for name in names:
            if name not in TOKEN_IDS and (re.search(r"(^|_)r?ids?$", name) or name in ALSO_NAMES):
                found.add((spec.paths[0], name))
    return found


def test_every_field_that_names_something_is_checked() -> None:
    assert naming_fields() == {*NAMES, *NOTHING_NAMED}


@pytest.mark.parametrize(("path", "field"), sorted(NAMES))
def test_names_of_others_mean_nothing(
    path: str,
    field: str,
    running: FakeServer,
    mine: httpx.Client,
    theirs: httpx.Client,
    held: threading.Event,
) -> None:
    methods = {method for spec in ROUTES if spec.paths[0] == path for method in spec.methods} - {"PUT"}
    for method in sorted(methods, reverse=True):
        NAMES[path, field](path=path, method=method, running=running, mine=mine, theirs=theirs, held=held)


def test_listings_show_ones_own_only(running: FakeServer, mine: httpx.Client, theirs: httpx.Client) -> None:
    batch(mine)
    listings = ["/v1/files", "/v1/batches"]
    assert sorted(spec.paths[0] for spec in ROUTES if spec.about.startswith("List the ")) == sorted(
        [*listings, "/v1/models"]
    ), "a new listing is checked here"
    for path in listings:
        assert len(mine.get(path).json()["data"]) == 1
        assert theirs.get(path).json()["data"] == []


def test_grpc_fields_that_name_something() -> None:
    """Calls over gRPC make the same requests, with the same caller: a new field is looked at here."""
    service = pb.DESCRIPTOR.services_by_name["Bough"]
    found = {
        (method.name, field.name)
        for method in service.methods
        for field in method.input_type.fields
        if re.search(r"(^|_)r?ids?$", field.name) and field.name != "input_ids"
    }
    assert found == {
        ("Generate", "rid"), ("Embed", "rid"), ("Classify", "rid"), ("Abort", "rid"),
        ("GenerateMany", "abort_rid"),  # requests of the same stream
        ("Detokenize", "ids"),  # of tokens
    }  # fmt: skip


# -- stores ---------------------------------------------------------------------------------------

BY_TENANT = {
    "ResponseStore._kept", "ResponseStore._sizes", "ResponseStore._items", "Sessions._sessions", "EngineClient._names",
}  # fmt: skip
"""Keyed by tenant and id."""
NOT_BY_TENANT = {
    "EngineClient._streams": "by ids that the server makes, never read from a request",
    "EngineClient._places": "the same",
    "EngineClient._calls": "the same",
    "EngineClient._turns": "the same",
    "EngineClient._unpaid": "the same",
    "EngineClient._leases": "the same",
    "EngineClientStats.ended": "counters",
    "AdapterRegistry._numbers": "the operator's adapters, which every tenant may name",
    "StoredResponse.response": "what a store holds",
    "_Session.turns": "by the requests of one session",
    "Joins._known": "by cache namespace, which has the owner's name in it",
    "Keyring._named": "the keys themselves",
    "Keys.by_digest": "the keys themselves",
    "KeyUsage._cells": "counters by name of key",
    "Keeper._kept": "background tasks",
    "Service._others": "the server's own processes",
    "Reloads._actions": "what SIGHUP has read again",
    "RequestMeter._live": "by ids that the server makes",
    "RequestMeter._ended": "counters",
    "Telemetry._responses": "counters",
    "Sheet._first": "counters",
    "Boards._open": "counters",
    "ServedModel.facts": "about the model",
    "ServedModel.markers": "about the model",
    "ServedModel.sampling_defaults": "about the model",
    "ServedModel.template_defaults": "about the model",
}


def stores(root: object) -> set[str]:
    """Every mapping that an object of ours holds, by class and attribute."""
    found: set[str] = set()
    seen: set[int] = set()
    left = [root]
    while left:
        each = left.pop()
        kind = type(each)
        if id(each) in seen or not kind.__module__.startswith("bough.") or isinstance(each, enum.Enum):
            continue
        if kind.__module__.startswith(("bough.config.concerns", "bough.tokenizer")):
            continue
        seen.add(id(each))
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        fields = [
            *getattr(each, "__dict__", {}),
            *(slots if not isinstance(slots, str) else ()),
            *getattr(kind, "__struct_fields__", ()),
        ]
        for name in fields:
            value = getattr(each, name, None)
            if isinstance(value, dict | types.MappingProxyType):
                found.add(f"{kind.__name__}.{name}")
                left.extend(value.values())
            elif isinstance(value, list | tuple | set | frozenset):
                left.extend(value)
            else:
                left.append(value)
    return found


def test_every_store_is_known(running: FakeServer, mine: httpx.Client) -> None:
    response(mine)
    mine.post("/open_session", json={})
    assert stores(running.service) == {*BY_TENANT, *NOT_BY_TENANT}, (
        "a new store is keyed by tenant, or listed with a reason"
    )
    for name in BY_TENANT - {"EngineClient._names"}:
        holder = running.service.responses if name.startswith("Response") else running.service.engine_client.sessions
        keys = list(getattr(holder, name.partition(".")[2]))
        assert keys
        assert all(tenant == "mine" and isinstance(each, str) for tenant, each in keys), name
