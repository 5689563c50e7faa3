"""/v1/files and /v1/batches with the official client; and what is left after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted_server import Answer, FakeServer, endless, serving, wait_until

from bough.core.errors import Aborted, NotFound, Overloaded, Unavailable
from bough.core.messages import End, Generate
from bough.entrypoints.batches import BatchRecord, BatchRunner, BatchStore, FileStore, runner as runner_module
from bough.entrypoints.batches.files import new_file_id
from bough.entrypoints.http.app import handlers
from bough.entrypoints.http.batches import start_batches
from bough.observability import keeper as keeper_module
from bough.observability.keeper import Keeper

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(keeper_module, "_PAUSE_S", (0.01, 0.05))


@contextlib.contextmanager
def batching(directory: Path, script: Any = None, **given: Any) -> Iterator[tuple[FakeServer, openai.OpenAI]]:
    """A server that works batches off, as worker 0 does."""
    with serving(script, batch_dir=str(directory), **given) as running:

        async def begin() -> None:
            start_batches(running.service, handlers(running.service))

        async def end() -> None:
            for closer in running.service._closers:
                await closer()

        asyncio.run_coroutine_threadsafe(begin(), running._loop).result(60)
        try:
            with openai.OpenAI(
                _strict_response_validation=True, base_url=f"{running.url}/v1", api_key="any", max_retries=0
            ) as client:
                yield running, client
        finally:
            asyncio.run_coroutine_threadsafe(end(), running._loop).result(60)


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": "fake", "messages": [{"role": "user", "content": name}], **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def as_file(*lines: Any) -> io.BytesIO:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    made = io.BytesIO(text.encode())
    made.name = "../../in.jsonl"
    return made


def finished(client: openai.OpenAI, batch_id: str) -> Any:
    give_up_s = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < give_up_s, f"the batch is still {batch.status}"
        time.sleep(0.02)
    return batch


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_files(tmp_path: Path) -> None:
    with batching(tmp_path) as (running, client):
        made = client.files.create(file=as_file(line("a")), purpose="batch")
        assert (made.object, made.purpose, made.filename) == ("file", "batch", "in.jsonl")
        assert client.files.retrieve(made.id).bytes == made.bytes
        assert [each.id for each in client.files.list()] == [made.id]
        assert content(client, made.id) == [line("a")]
        kept = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)
        assert all(tmp_path in path.resolve().parents for path in kept)
        assert client.files.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(made.id)
        for name in ("file-../../etc/passwd", "..%2f..%2fetc%2fpasswd", "file-" + "0" * 32):
            assert httpx.get(f"{running.url}/v1/files/{name}/content").status_code == 404


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, "missing"),
        ({"data": {}, "files": {"file": b"x"}}, "missing"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, "purpose"),
        ({"json": {"purpose": "batch"}}, "form"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, "form"),
    ],
)
def test_wrong_uploads(tmp_path: Path, form: dict[str, Any], says: str) -> None:
    with batching(tmp_path) as (running, _):
        refused = httpx.post(f"{running.url}/v1/files", **form)
        assert refused.status_code == 400, refused.text
        assert says in refused.json()["error"]["message"]


def test_large_uploads_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bough.entrypoints.batches import files
    from bough.entrypoints.http import batches

    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(batches, "MAX_FILE_BYTES", 1000)
    with batching(tmp_path) as (running, client):
        with pytest.raises(openai.BadRequestError, match="too large"):
            client.files.create(file=as_file("x" * 2000), purpose="batch")
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # the server closes before we stop talking
            sent = httpx.post(f"{running.url}/v1/files", files={"file": b"x" * 3_000_000}, data={"purpose": "batch"})
            assert sent.status_code == 413
        assert not list(client.files.list())
        assert not list(tmp_path.rglob("*.part"))


def test_a_batch(tmp_path: Path) -> None:
    def script(message: Generate, prompt: str) -> Answer:
        return Answer(pieces=["Hello ", prompt.split("\n")[1].removesuffix("<|im_end|>")])

    with batching(tmp_path, script) as (running, client):
        lines = [
            *(line(f"n{number}") for number in range(150)),
            line("bad", temperature=-1),
            "",
            line("gone", model="x"),
        ]
        source = client.files.create(file=as_file(*lines), purpose="batch")
        made = client.batches.create(
            input_file_id=source.id, endpoint=CHAT, completion_window="24h", metadata={"why": "test"}
        )
        assert made.status == "validating"
        batch = finished(client, made.id)
        assert batch.status == "completed"
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
            152,
            150,
            2,
        )
        assert batch.metadata == {"why": "test"}
        assert batch.usage is not None
        assert batch.usage.output_tokens == sum(len(f"Hello n{number}") for number in range(150))
        assert batch.usage.input_tokens_details.cached_tokens == 2 * 150
        assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
        answers = content(client, batch.output_file_id)
        texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
        assert texts == {f"n{number}": f"Hello n{number}" for number in range(150)}
        assert all(each["response"]["status_code"] == 200 for each in answers)
        failures = {each["custom_id"]: each["response"] for each in content(client, batch.error_file_id)}
        assert {name: each["status_code"] for name, each in failures.items()} == {"bad": 400, "gone": 404}
        assert failures["bad"]["body"]["error"]["param"] == "temperature"
        assert [each.id for each in client.batches.list()] == [made.id]
        assert len(running.engine.seen) == 150
        with pytest.raises(openai.BadRequestError, match="ended"):
            client.batches.cancel(made.id)
        leftover = [path.name for path in (tmp_path / "batches").iterdir()]
        assert leftover == [f"{made.id}.json"]


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([], ["empty_file"]),
        (["{"], ["invalid_json_line"]),
        (["[]", '{"body": 1}'], ["invalid_request"] * 2),
        ([{**line("a"), "custom_id": ""}], ["missing_custom_id"]),
        ([line("a"), line("a")], ["duplicate_custom_id"]),
        ([{**line("a"), "method": "GET"}], ["invalid_method"]),
        ([line("a", url="/v1/completions")], ["invalid_url"]),
        ([line("a", stream=True)], ["invalid_request"]),
    ],
)
def test_wrong_files(tmp_path: Path, lines: list[Any], codes: list[str]) -> None:
    with batching(tmp_path) as (running, client):
        source = client.files.create(file=as_file(*lines), purpose="batch")
        batch = finished(
            client, client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h").id
        )
        assert batch.status == "failed"
        assert [error.code for error in batch.errors.data] == codes
        assert not running.engine.seen


def test_wrong_batches(tmp_path: Path) -> None:
    with batching(tmp_path) as (running, client):
        source = client.files.create(file=as_file(line("a")), purpose="batch").id
        good = {"input_file_id": source, "endpoint": CHAT, "completion_window": "24h"}
        for wrong, status in (
            ({"endpoint": "/generate"}, 400), ({"completion_window": "1h"}, 400), ({"input_file_id": "file-1"}, 404),
            ({"metadata": {"a": "x" * 600}}, 400), ({"metadata": {"a": 1}}, 400),
        ):  # fmt: skip
            assert httpx.post(f"{running.url}/v1/batches", json={**good, **wrong}).status_code == status
        assert httpx.get(f"{running.url}/v1/batches/batch_x").status_code == 404
        for limit in ("0", "10001", "-1", "many", "9" * 5000):
            assert httpx.get(f"{running.url}/v1/batches", params={"limit": limit}).status_code == 400


def test_cancelling(tmp_path: Path) -> None:
    with batching(tmp_path, Answer(pieces=["x"] * 20, delay_s=0.01)) as (_, client):
        source = client.files.create(file=as_file(*(line(str(i)) for i in range(2000))), purpose="batch")
        made = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(made.id).request_counts.completed)  # type: ignore[union-attr]
        assert client.batches.cancel(made.id).status == "cancelling"
        batch = finished(client, made.id)
        assert batch.status == "cancelled"
        answered = len(content(client, batch.output_file_id))
        undone = content(client, batch.error_file_id)
        assert answered + len(undone) == 2000
        assert {each["error"]["code"] for each in undone} == {"batch_cancelled"}


def test_a_restart_goes_on_and_tells_every_line_once(tmp_path: Path) -> None:
    lines = [line(str(number)) for number in range(300)]
    asked = itertools.count()

    def script(*_: Any) -> Answer:
        return Answer() if next(asked) < 60 else endless()

    with batching(tmp_path, script) as (running, client):
        source = client.files.create(file=as_file(*lines), purpose="batch")
        made = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
        part = tmp_path / "batches" / f"{made.id}.out.jsonl"
        wait_until(lambda: part.exists() and part.read_bytes().count(b"\n") > 40)
        before = len(running.engine.seen)
    assert 40 < before < 300
    with part.open("ab") as torn:
        torn.write(b'{"custom_id": "7", "resp')  # as a crash may leave it
    with batching(tmp_path) as (running, client):
        batch = finished(client, made.id)
        assert batch.status == "completed"
        assert batch.request_counts.completed == 300
        assert batch.usage is not None
        assert batch.usage.output_tokens == 300 * len("Hello there.")
        told = [each["custom_id"] for each in content(client, batch.output_file_id)]
        assert sorted(told, key=int) == [str(number) for number in range(300)]
        assert len(running.engine.seen) < 300


def test_lines_that_an_operator_aborts_are_asked_again(tmp_path: Path) -> None:
    asked = itertools.count()

    def script(*_: Any) -> Answer:
        return endless() if next(asked) < 3 else Answer()

    with batching(tmp_path, script) as (running, client):
        lines = [line("a"), line("b"), line("c")]
        source = client.files.create(file=as_file(*lines), purpose="batch")
        made = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: len(running.engine.seen) == 3)
        told = httpx.post(f"{running.url}/abort_request", json={"abort_all": True}).json()
        assert told["aborted"] == 3
        batch = finished(client, made.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 3, 0)
        answers = [each["response"]["body"]["choices"][0] for each in content(client, batch.output_file_id)]
        assert [each["finish_reason"] for each in answers] == ["stop"] * 3
        assert {each["message"]["content"] for each in answers} == {"Hello there."}


def test_a_draining_server_leaves_lines_for_the_next_one(tmp_path: Path) -> None:
    """Those under way may end; those that are cut stay unanswered, and no others are begun."""
    cut = End(reason="abort", message="the answer was cut off", status=503, code="engine_unavailable")
    held = threading.Event()

    def script(message: Generate, prompt: str) -> Answer:
        return Answer(held=held, end=cut if "cut" in prompt else None)

    with batching(tmp_path, script, max_queued_requests=4) as (running, client):
        lines = [line("one"), line("cut"), *(line(str(number)) for number in range(20))]
        source = client.files.create(file=as_file(*lines), purpose="batch")
        made = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: len(running.engine.seen) == 4)

        async def drain() -> None:
            running.service.drain()
            held.set()
            await running.service.drained()

        asyncio.run_coroutine_threadsafe(drain(), running._loop).result(60)
        assert len(running.engine.seen) == 4, "no others were begun"
        batch = client.batches.retrieve(made.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("in_progress", 3, 0)
    with batching(tmp_path) as (running, client):
        batch = finished(client, made.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 22)
        told = [each["custom_id"] for each in content(client, batch.output_file_id)]
        assert sorted(told) == sorted(each["custom_id"] for each in lines)
        assert len(running.engine.seen) == 19


@pytest.mark.parametrize("busy", [Overloaded.status, Unavailable.status, Aborted.status])
async def test_busy_servers_are_asked_again(tmp_path: Path, busy: int) -> None:
    asked = 0

    async def call(endpoint: str, body: dict[str, Any], tenant: str) -> tuple[int, str, dict[str, Any]]:
        nonlocal asked
        asked += 1
        return (busy if asked == 1 else 200), "id", {"n": asked}

    files, batches = FileStore(tmp_path), BatchStore(tmp_path)
    source = files.add([json.dumps(line("a")).encode()], filename="x", purpose="batch")
    batch = batches.create(source, CHAT, {})
    runner = BatchRunner(files, batches, call, frozenset({CHAT}))
    runner.start()
    await until(lambda: batches.get(batch.id).status == "completed")
    await runner.close()
    assert batches.get(batch.id).completed == 1
    assert asked == 2


async def until(done: Any) -> None:
    for _ in range(1500):
        if done():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it does not happen")


async def test_two_servers_on_one_directory_answer_every_line_once(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def caller(name: str) -> Any:
        async def call(endpoint: str, body: dict[str, Any], tenant: str) -> tuple[int, str, dict[str, Any]]:
            asked.append((name, body["messages"][0]["content"]))
            await asyncio.sleep(0.005)
            return 200, "id", {}

        return call

    files, batches = FileStore(tmp_path), BatchStore(tmp_path)
    lines = [json.dumps(line(str(number))).encode() + b"\n" for number in range(40)]
    source = files.add(lines, filename="x", purpose="batch")
    runners = [BatchRunner(files, BatchStore(tmp_path), caller(name), frozenset({CHAT}), at_once=4) for name in "ab"]
    for each in runners:
        each.start()
    first = batches.create(source, CHAT, {})
    await until(lambda: batches.get(first.id).status == "completed")
    assert sorted(int(number) for _, number in asked) == list(range(40))
    await runners[0].close()
    second = batches.create(source, CHAT, {})
    await until(lambda: batches.get(second.id).status == "completed")
    assert {name for name, _ in asked[40:]} == {"b"}, "the other one takes over"
    await runners[1].close()


async def test_nobody_takes_over_while_a_batch_is_being_finalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(*_: Any) -> tuple[int, str, dict[str, Any]]:
        return 200, "id", {}

    begun, may_end, finalize = threading.Event(), threading.Event(), BatchRunner._finalize

    def slowly(*arguments: Any) -> None:
        begun.set()
        may_end.wait(60)
        finalize(*arguments)

    monkeypatch.setattr(BatchRunner, "_finalize", slowly)
    files, batches = FileStore(tmp_path), BatchStore(tmp_path)
    batch = batches.create(files.add([json.dumps(line("a")).encode()], filename="x", purpose="batch"), CHAT, {})
    runner = BatchRunner(files, batches, call, frozenset({CHAT}))
    runner.start()
    await until(begun.is_set)
    closing = asyncio.ensure_future(runner.close())
    await asyncio.sleep(0.05)
    assert batches.own() is None, "it still writes"
    may_end.set()
    await asyncio.wait_for(closing, 20)
    right = batches.own()
    assert right is not None
    os.close(right)
    assert batches.get(batch.id).status == "completed"


async def test_a_crash_between_taking_a_file_over_and_noting_it(tmp_path: Path) -> None:
    files = FileStore(tmp_path)
    part = tmp_path / "batches.out"
    for crashes in (False, True):
        part.write_bytes(b"answers\n")
        name = new_file_id()
        if crashes:
            part.rename(tmp_path / "files" / f"{name}.data")
        for _ in range(2):
            files.adopt(part, name, filename="out.jsonl", purpose="batch_output")
        assert files.get(name).bytes == 8
        assert files.path(files.get(name)).read_bytes() == b"answers\n"
    files.delete(files.get(name))
    files.adopt(part, name, filename="out.jsonl", purpose="batch_output")
    with pytest.raises(NotFound):
        files.get(name)


async def test_abandoned_uploads_are_removed(tmp_path: Path) -> None:
    files, batches = FileStore(tmp_path), BatchStore(tmp_path)
    old, new = (tmp_path / "files" / f"file-{letter * 32}.part" for letter in "ab")
    for each in (old, new):
        each.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    runner = BatchRunner(files, batches, lambda *_: asyncio.sleep(0), frozenset({CHAT}))  # type: ignore[arg-type,return-value]
    runner.start()
    await until(lambda: not old.exists())
    await runner.close()
    assert new.exists()


async def test_a_full_disk_stops_no_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(*_: Any) -> tuple[int, str, dict[str, Any]]:
        return 200, "id", {}

    files, batches = FileStore(tmp_path), BatchStore(tmp_path)
    batch = batches.create(files.add([json.dumps(line("a")).encode()], filename="x", purpose="batch"), CHAT, {})
    save, refused = BatchStore.save, []

    def full(self: BatchStore, batch: Any) -> None:
        if len(refused) < 3:
            refused.append(batch.status)
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, batch)

    monkeypatch.setattr(BatchStore, "save", full)
    keeper = Keeper()
    runner = BatchRunner(files, batches, call, frozenset({CHAT}), keeper=keeper)
    runner.start()
    await until(lambda: batches.get(batch.id).status not in ("validating", "in_progress", "finalizing"))
    assert "batches" in keeper.troubles(), "it shows in /readyz"
    await runner.close()
    assert len(refused) == 3
    assert batches.get(batch.id).status == "completed", "a machine's shortage is no fault of the batch"


@pytest.mark.parametrize("where", ["own", "unfinished", "part"])
async def test_no_descriptors_end_no_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Wherever it needs one: at its start, between batches, within one."""

    async def call(*_: Any) -> tuple[int, str, dict[str, Any]]:
        return 200, "id", {}

    files, batches = FileStore(tmp_path), BatchStore(tmp_path)
    work, refused = getattr(BatchStore, where), []

    def none_left(self: BatchStore, *arguments: Any) -> Any:
        if len(refused) < 3:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return work(self, *arguments)

    monkeypatch.setattr(BatchStore, where, none_left)
    batch = BatchRecord(id="batch_" + "0" * 32, endpoint=CHAT, input_file_id="", created_at=0, expires_at=2**40)
    batch.input_file_id = files.add([json.dumps(line("a")).encode()], filename="x", purpose="batch").id
    batches.save(batch)
    runner = BatchRunner(files, batches, call, frozenset({CHAT}))
    runner.start()
    await until(lambda: batches.get(batch.id).status == "completed")
    await runner.close()
    assert len(refused) == 3


async def test_batches_expire(tmp_path: Path) -> None:
    async def call(*_: Any) -> tuple[int, str, dict[str, Any]]:
        raise AssertionError("nothing is asked after the window")

    files, batches = FileStore(tmp_path), BatchStore(tmp_path)
    source = files.add([json.dumps(line("a")).encode()], filename="x", purpose="batch")
    batch = batches.create(source, CHAT, {})
    batch.expires_at = batch.created_at - 1
    batches.save(batch)
    runner = BatchRunner(files, batches, call, frozenset({CHAT}))
    runner.start()
    await until(lambda: batches.get(batch.id).status == "expired")
    await runner.close()
    ended = batches.get(batch.id)
    assert ended.status == "expired"
    assert ended.error_file_id is not None
    assert "batch_expired" in files.path(files.get(ended.error_file_id)).read_text()


def test_without_a_directory_there_are_no_files(server: FakeServer) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches")):
        refused = httpx.request(method, server.url + path)
        assert refused.status_code == 400
        assert "--batch-dir" in refused.json()["error"]["message"]


def test_tenants_are_apart(tmp_path: Path) -> None:
    with batching(tmp_path, api_key=["mine=a", "theirs=b"]) as (running, _):
        mine, theirs = ({"authorization": f"Bearer {each}"} for each in "ab")
        form: dict[str, Any] = {"files": {"file": as_file(line("a"))}, "data": {"purpose": "batch"}}
        made = httpx.post(f"{running.url}/v1/files", headers=mine, **form).json()
        assert httpx.get(f"{running.url}/v1/files/{made['id']}", headers=mine).status_code == 200
        assert httpx.get(f"{running.url}/v1/files/{made['id']}", headers=theirs).status_code == 404
        assert httpx.get(f"{running.url}/v1/files", headers=theirs).json()["data"] == []


# -- Anthropic's batches --------------------------------------------------------------------------


def test_message_batches(tmp_path: Path) -> None:
    with batching(tmp_path) as (running, others):
        client = anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0)
        params: Any = {"model": "fake", "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
        asked: Any = [{"custom_id": f"n{number}", "params": params} for number in range(5)]
        asked.append({"custom_id": "bad", "params": {**params, "temperature": -1}})
        made = client.messages.batches.create(requests=asked)
        assert (made.type, made.processing_status) == ("message_batch", "in_progress")
        wait_until(lambda: client.messages.batches.retrieve(made.id).processing_status == "ended")
        ended = client.messages.batches.retrieve(made.id)
        assert (ended.request_counts.succeeded, ended.request_counts.errored) == (5, 1)
        assert ended.ended_at is not None
        results: Any = {each.custom_id: each.result for each in client.messages.batches.results(made.id)}
        assert {name: each.type for name, each in results.items()} == {
            **{f"n{number}": "succeeded" for number in range(5)}, "bad": "errored",
        }  # fmt: skip
        assert results["n0"].message.content[0].text == "Hello there."
        assert results["bad"].error.error.type == "invalid_request_error"
        again = client.messages.batches.create(requests=asked[:1])
        assert [each.id for each in client.messages.batches.list(limit=1)] == [again.id, made.id]
        assert [each.id for each in client.messages.batches.list(before_id=made.id).data] == [again.id]
        assert others.batches.list().data == []
        assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve(made.id)


def test_cancelled_message_batches(tmp_path: Path) -> None:
    with batching(tmp_path, endless()) as (running, _):
        client = anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0)
        params: Any = {"model": "fake", "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
        made = client.messages.batches.create(requests=[{"custom_id": "a", "params": params}])
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            client.messages.batches.delete(made.id)
        wait_until(lambda: running.engine.seen)
        assert client.messages.batches.cancel(made.id).processing_status == "canceling"
        wait_until(lambda: client.messages.batches.retrieve(made.id).processing_status == "ended")
        assert client.messages.batches.retrieve(made.id).request_counts.canceled == 1
        assert [each.result.type for each in client.messages.batches.results(made.id)] == ["canceled"]


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "1 to 50000"),
        ([{"params": {}}], "requests[0].custom_id"),
        ([{"custom_id": "a", "params": {}}] * 2, "requests[1].custom_id"),
        ([{"custom_id": "a"}], "requests[0].params"),
        ([{"custom_id": "a", "params": {"stream": True}}], "requests[0].params.stream"),
    ],
)
def test_wrong_message_batches(tmp_path: Path, requests: list[Any], says: str) -> None:
    with serving(batch_dir=str(tmp_path)) as running:
        refused = httpx.post(f"{running.url}/v1/messages/batches", json={"requests": requests})
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]
