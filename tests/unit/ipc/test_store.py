"""The ranks' meeting place, over a Unix socket and over TCP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.core.errors import ConfigError, Unavailable
from bough.ipc.link import Link, Listener, NotTrusted, connect, split_address
from bough.ipc.store import StaleRank, Store, StoreServer, wait_for_all

SECRET = "a long enough secret"


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[StoreServer, str]]:
    listener = Listener(str(tmp_path / "meet") if request.param == "unix" else "127.0.0.1:0", SECRET)
    server = StoreServer([listener], generation=3)
    yield server, listener.address
    server.close()


def test_values_are_set_read_counted_and_compared(server: tuple[StoreServer, str]) -> None:
    one, two = (Store(server[1], secret=SECRET, generation=3) for _ in range(2))
    one.set("a", b"1\0")
    assert two.get("a") == b"1\0"
    assert [one.add("n", 2), two.add("n", 3), server[0].local().add("n", 0)] == [2, 5, 5]
    assert two.check(["a", "n"])
    assert not two.check(["a", "b"])
    assert one.compare_set("c", b"", b"x") == b"x"
    assert two.compare_set("c", b"y", b"z") == b"x"
    assert two.compare_set("c", b"x", b"z") == b"z"
    assert two.count() == 3
    assert two.delete("a")
    assert not two.delete("a")


def test_who_asks_for_a_value_waits_for_it(server: tuple[StoreServer, str]) -> None:
    one, two = (Store(server[1], secret=SECRET) for _ in range(2))
    threading.Timer(0.05, lambda: two.set("late", b"!")).start()
    assert one.get("late", 10.0) == b"!"
    with pytest.raises(TimeoutError, match="never was not set"):
        one.get("never", 0.05)
    assert not one.wait(["late", "never"], 0.05)
    assert one.wait(["late"])


def test_a_rank_of_an_earlier_start_is_refused(server: tuple[StoreServer, str]) -> None:
    with pytest.raises(StaleRank, match="generation 2, the group is of generation 3"):
        Store(server[1], secret=SECRET, generation=2)
    assert Store(server[1], secret=SECRET).generation == 3


def test_those_who_are_missing_are_named(server: tuple[StoreServer, str]) -> None:
    told: list[list[str]] = []
    local = server[0].local()
    local.set("node/0", b"")
    missing = wait_for_all(local, {"node/0": "node 0", "node/1": "node 1"}, 0.1, told.append, every_s=0.02)
    assert missing == ["node 1"]
    assert told[0] == ["node 1"]
    local.set("node/1", b"")
    assert wait_for_all(local, {"node/0": "node 0", "node/1": "node 1"}, 5.0, told.append) == []


def test_a_server_that_goes_ends_the_waiting(server: tuple[StoreServer, str]) -> None:
    store = Store(server[1], secret=SECRET)
    threading.Timer(0.05, server[0].close).start()
    with pytest.raises((Unavailable, TimeoutError)):
        store.get("never")


def test_nobody_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(Unavailable, match="can't be reached") as caught:
            Store(f"127.0.0.1:{taken.getsockname()[1]}", secret=SECRET, timeout_s=0.2)
    assert "--dist-init-addr" in caught.value.fix


# -- links ---------------------------------------------------------------------------------------------------------


def linked(server_secret: str, client_secret: str) -> tuple[Link | NotTrusted, Link | NotTrusted]:
    listener = Listener("127.0.0.1:0", server_secret)
    ends: list[Link | NotTrusted] = []

    def accept() -> None:
        try:
            ends.append(listener.accept())
        except NotTrusted as error:
            ends.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        client: Link | NotTrusted = connect(listener.address, client_secret, 5.0)
    except NotTrusted as error:
        client = error
    thread.join()
    listener.close()
    return ends[0], client


def test_frames_of_all_sizes_arrive() -> None:
    server, client = linked(SECRET, SECRET)
    assert isinstance(server, Link)
    assert isinstance(client, Link)
    frames = [b"", b"x", bytes(70_000), b"end"]
    sender = threading.Thread(target=lambda: [client.send(frame) for frame in frames])
    sender.start()
    assert [server.receive() for _ in frames] == frames
    sender.join()
    server.send(b"back")
    assert client.receive() == b"back"
    client.close()
    with pytest.raises(ConnectionError):
        server.receive()


def test_who_does_not_know_the_secret_stays_out() -> None:
    server, client = linked(SECRET, SECRET + "!")
    assert isinstance(server, NotTrusted)
    assert isinstance(client, NotTrusted)
    assert "BOUGH_DIST_SECRET" in client.sentence()


def test_a_stranger_stays_out() -> None:
    listener = Listener("127.0.0.1:0", SECRET)
    stranger = socket.create_connection(("127.0.0.1", listener.port))
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64))
    with pytest.raises(NotTrusted, match="no bough"):
        listener.accept()


def test_changed_and_repeated_frames_are_found_out() -> None:
    for tamper in ("change", "repeat"):
        listener = Listener("127.0.0.1:0", SECRET)
        middle = socket.create_server(("127.0.0.1", 0))
        port = middle.getsockname()[1]
        result: list[object] = []

        def serve(listener: Listener = listener, result: list[object] = result) -> None:
            link = listener.accept()
            try:
                while True:
                    result.append(link.receive())
            except NotTrusted as error:
                result.append(error)

        def relay(listener: Listener = listener, middle: socket.socket = middle, tamper: str = tamper) -> None:
            near, _ = middle.accept()
            far = socket.create_connection(("127.0.0.1", listener.port))
            for length in (45, 32):  # both ways: a greeting with its nonce, then the proof
                far.sendall(near.recv(length, socket.MSG_WAITALL))
                near.sendall(far.recv(length, socket.MSG_WAITALL))
            data = bytearray(near.recv(4096))
            if tamper == "change":
                data[-1] ^= 1
            far.sendall(bytes(data) * (2 if tamper == "repeat" else 1))
            time.sleep(0.2)
            far.close()

        threads = [threading.Thread(target=serve), threading.Thread(target=relay)]
        for thread in threads:
            thread.start()
        connect(f"127.0.0.1:{port}", SECRET).send(b"step 5")
        for thread in threads:
            thread.join(5)
        assert isinstance(result[-1], NotTrusted), (tamper, result)
        assert result[:-1] == ([] if tamper == "change" else [b"step 5"])


@pytest.mark.parametrize("secret", ["", "short"])
def test_the_network_needs_a_secret(secret: str) -> None:
    with pytest.raises(ConfigError, match="needs a secret") as caught:
        Listener("127.0.0.1:0", secret)
    assert "BOUGH_DIST_SECRET" in caught.value.fix


@pytest.mark.parametrize("address", ["host", "host:", ":5", "host:70000", "host:x"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("[::1]:20") == ("::1", 20)
    assert split_address("node-0.svc:20") == ("node-0.svc", 20)
