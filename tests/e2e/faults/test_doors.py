"""What a running server opens, and to whom: ports, sockets, files, keys, caches."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import ROOT, Server, body

from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with Server("--api-key", "k3y", "--admin-api-key", "b0ss", "--isolate-cache", "--api-workers", "2") as server:
        yield server


def family(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def listening(server: Server) -> set[tuple[str, int]]:
    """Addresses that any process of the server listens on, from the kernel's own tables."""
    inodes = set()
    for process in family(server):
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                try:
                    target = os.readlink(descriptor)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{server.process.pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                address, port = columns[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_only_the_api_port_listens_and_only_here(locked: Server) -> None:
    port = int(locked.url.rpartition(":")[2])
    assert listening(locked) == {("0100007F", port)}


def private_directory(server: Server) -> Path:
    for process in family(server):
        command = process.cmdline()
        if "bough.engine" in command:
            return Path(command[command.index("bough.engine") + 1])
    raise AssertionError("no engine")


def test_the_private_directory_is_private(locked: Server) -> None:
    directory = private_directory(locked)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.iterdir():
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue  # a file that was being written has its name now
        if not stat.S_ISSOCK(mode):
            assert stat.S_IMODE(mode) & 0o077 == 0 or path.name.startswith("fault"), path.name
    launch = (directory / "launch.json").read_text()
    assert stat.S_IMODE((directory / "launch.json").stat().st_mode) == 0o600
    assert "k3y" in launch, "the key is in there, which is why nobody else may read it"


def test_keys_are_not_on_any_command_line_of_the_children(locked: Server) -> None:
    children = family(locked)[1:]
    assert len(children) >= 2, "the engine and the detokenizer at least"
    for process in children:
        assert "k3y" not in " ".join(process.cmdline())


def test_garbage_on_the_sockets_between_processes_is_dropped(locked: Server, tmp_path: Path) -> None:
    """Among it a pickle that would leave a file behind if anybody loaded it."""
    canary = tmp_path / "canary"
    bomb = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."

    def open_door(path: str) -> bool:
        with socket.socket(socket.AF_UNIX) as push:
            return push.connect_ex(path) == 0

    for name in ("engine", "detok", "api.0", "api.1"):
        path = f"{private_directory(locked)}/{name}"
        assert until(lambda path=path: open_door(path), 120), "the second worker comes later"
        garbage = (b"", b"\x00" * 1000, bomb, b"\x80\x04" + bomb, os.urandom(500), b"\x81\xa4type\xa8generate")
        with socket.socket(socket.AF_UNIX) as push:
            push.connect(path)
            for frame in garbage:
                push.sendall(len(frame).to_bytes(8, "little") + frame)
        for frame in garbage:  # not even framed
            with socket.socket(socket.AF_UNIX) as push, contextlib.suppress(ConnectionError):
                push.connect(path)
                push.sendall(frame * 3)
    answer = locked.ask(body(), headers={"authorization": "Bearer k3y"})
    assert answer.status_code == 200
    sent = httpx.post(f"{locked.url}/generate", content=bomb, headers={"authorization": "Bearer k3y"}, timeout=60)
    assert sent.status_code == 400
    assert until(lambda: "dropped a message" in locked.log(), 60)
    assert not canary.exists()


def cached(server: Server, key: str, salt: str | None = None) -> int:
    request = body("A long and winding road leads to a door. " * 20, tokens=2)
    if salt is not None:
        request["cache_salt"] = salt
    answer = server.ask(request, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    count: int = answer.json()["meta_info"]["cached_tokens"]
    return count


def test_caches_are_isolated_by_key_and_by_salt(locked: Server) -> None:
    assert cached(locked, "k3y") == 0
    assert cached(locked, "k3y") > 0
    assert cached(locked, "b0ss") == 0, "another key finds nothing of the first one's"
    assert cached(locked, "b0ss") > 0
    assert cached(locked, "k3y", salt="pepper") == 0
    assert cached(locked, "k3y", salt="pepper") > 0
    assert cached(locked, "k3y", salt="cumin") == 0


def test_admin_routes_need_the_admin_key(locked: Server) -> None:
    def post(path: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(locked.url + path, headers=headers, timeout=60).status_code

    for path in ("/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"):
        assert post(path, "") == 401
        assert post(path, "k3y") == 401
    assert post("/pause_generation", "b0ss") == 200
    assert locked.status("/readyz") == 200
    assert post("/continue_generation", "b0ss") == 200
    assert locked.ask(body(), headers={"authorization": "Bearer k3y"}).status_code == 200


def test_profiles_stay_where_the_operator_wants_them(tmp_path: Path) -> None:
    with Server("--admin-api-key", "b0ss", "--profile-dir", str(tmp_path / "profiles")) as server:
        boss = {"authorization": "Bearer b0ss"}

        def post(path: str, **fields: Any) -> httpx.Response:
            return httpx.post(server.url + path, json=fields, headers=boss, timeout=60)

        for name in ("/etc", "../up", "a/b", ".hidden", "x" * 100):
            refused = post("/start_profile", output_dir=name)
            assert refused.status_code in (400, 409), refused.text
        assert post("/stop_profile").status_code == 409
        assert post("/start_profile", output_dir="mine", num_steps=5).status_code == 200
        assert post("/start_profile").status_code == 409, "one at a time"
        assert server.ask(body(tokens=30)).status_code == 200
        told = post("/stop_profile").json()
        file = Path(told["file"])
        assert file.parent == tmp_path / "profiles" / "mine"
        assert file.stat().st_size > 1000
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert told["top"][0]["microseconds"] > 0
        assert 5 <= told["num_steps"] <= 10


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_public_address_without_a_key_is_refused(host: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bough", "serve", "--host", host, "--port", "0"],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "refusing to listen" in ended.stderr
    assert "--api-key" in ended.stderr


def fuzz(*options: str, within_s: float) -> None:
    """Requests that the OpenAPI document gives rise to, and others: none is answered with 5xx. Answers are kept short by the
    context, since not every dialect's request says how long they may be."""
    command = shutil.which("schemathesis", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("schemathesis is not installed")
    with (
        Server("--context-length", "128", "--max-queued-requests", "40") as server,
        tempfile.TemporaryDirectory() as place,
    ):
        ended = subprocess.run(
            [command, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--request-timeout", "60",
             "--suppress-health-check", "all", *options],
            capture_output=True, text=True, timeout=within_s, check=False, cwd=place,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-1000:]
        assert server.ask(body()).status_code == 200
        assert "Traceback" not in server.log(), server.log()[-4000:]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_schema_driven_fuzzer_finds_no_5xx() -> None:
    fuzz("--max-examples", "25", within_s=1700)
