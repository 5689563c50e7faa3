"""Ranks and machines that die, stop or can't be reached any more, at random times under load: nothing hangs, and every
request ends exactly once."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import Cluster, Node, free_port
from test_hosts import rank_of
from tiny import make_tiny

from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]
TOKENS = 48
CLIENTS = 4
SEEN_S = {"kill rank": 5.0, "stop rank": 10.0, "kill host": 10.0, "stop host": 10.0, "partition": 12.0}
"""Until both servers have ended: what docs/parallel.md promises, the others' second to say why, and a busy machine."""
TRIALS = [
    (kind, seed) for seed in range(4) for kind in ("kill rank", "stop rank", "kill host", "stop host", "partition")
]


class BlackHole:
    """Passes connections on to `port` of 127.0.0.1, from an address of its own, until `swallow`: then bytes vanish, and
    no end hears of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.2", 0))
        self.address = f"127.0.0.2:{self._listener.getsockname()[1]}"
        self._swallows = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        self._swallows.set()

    def close(self) -> None:
        for each in (self._listener, *self._ends):
            each.close()

    def _accept(self) -> None:
        try:
            while True:
                near, _ = self._listener.accept()
                far = self._reach()
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()
        except OSError:
            return

    def _reach(self) -> socket.socket:
        give_up_s = time.monotonic() + 60
        while True:  # machine 0 may not listen yet
            try:
                return socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.05)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self._swallows.is_set():
                    target.sendall(data)
        except OSError:
            pass
        if not self._swallows.is_set():
            target.close()


@dataclass
class Client:
    """Asks again and again, until the server is gone. `ends`: how each request ended."""

    url: str
    streams: bool
    ends: list[str] = field(default_factory=list)
    asked: int = 0

    def run(self) -> None:
        while not self.ends or self.ends[-1] == "whole":
            self.asked += 1
            self.ends.append(self._ask())

    def _ask(self) -> str:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": [5, 17, 99, self.asked % 100], "sampling_params": sampling, "stream": self.streams}
        try:
            if self.streams:
                return self._stream(body)
            reply = httpx.post(f"{self.url}/generate", json=body, timeout=60)
            if reply.status_code == 200:
                assert len(reply.json()["output_ids"]) == TOKENS
                return "whole"
            assert reply.status_code == 503, reply.text
            return "told"
        except httpx.TimeoutException:
            return "hangs"
        except httpx.TransportError:
            return "cut"

    def _stream(self, body: dict[str, object]) -> str:
        """What a stream ends with; more than one end is one too many."""
        ends: list[str] = []
        with httpx.stream("POST", f"{self.url}/generate", json=body, timeout=60) as reply:
            if reply.status_code != 200:
                assert reply.status_code == 503
                return "told"
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    ends.append("told")
                elif event["meta_info"]["finish_reason"] is not None:
                    assert event["meta_info"]["completion_tokens"] == TOKENS
                    ends.append("whole")
        assert len(ends) <= 1, ends
        return ends[0] if ends else "cut"


def signal_all(node: Node, number: signal.Signals) -> None:
    """To a machine's server and its ranks."""
    server = psutil.Process(node.process.pid)
    for each in (*server.children(recursive=True), server):
        each.send_signal(number)


@contextmanager
def cluster_for(kind: str, model: Path) -> Iterator[tuple[Cluster, Callable[[], None]]]:
    """Ranks on one machine or two, and what is done to them."""
    if kind.endswith("rank"):
        with Cluster(model, "--tp-size", "2") as served:
            number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
            yield served, lambda: rank_of(served.nodes[0], 1).send_signal(number)
        return
    port = free_port()
    hole = BlackHole(port)
    meeting = [f"127.0.0.1:{port}", hole.address]
    served = Cluster(
        model, "--tp-size", "2", "--nnodes", "2", "--dist-secret", "a long secret",
        per_node=[("--node-rank", str(node), "--dist-init-addr", meeting[node]) for node in (0, 1)],
    )  # fmt: skip

    def strike() -> None:
        if kind == "partition":
            hole.swallow()
            return
        number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
        signal_all(served.nodes[1], number)

    try:
        with served:
            yield served, strike
    finally:
        hole.close()


@pytest.mark.parametrize(("kind", "seed"), TRIALS)
def test_nothing_hangs_and_every_request_ends_once(kind: str, seed: int, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    rng = random.Random(f"{kind} {seed}")
    with cluster_for(kind, tmp_path) as (served, strike):
        clients = [Client(served.url, streams=at % 2 == 0) for at in range(CLIENTS)]
        threads = [threading.Thread(target=each.run) for each in clients]
        for thread in threads:
            thread.start()
        assert until(lambda: all(len(each.ends) > 0 for each in clients), 60), served.nodes[0].log
        time.sleep(rng.random())
        strike()
        struck_s = time.monotonic()
        seen_s = SEEN_S[kind]
        ended = [served.nodes[0]] if kind == "stop host" else served.nodes
        assert until(lambda: all(node.process.poll() is not None for node in ended), seen_s), served.nodes[0].log
        took_s = time.monotonic() - struck_s
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a client waits for ever"
        for node in ended:
            assert node.process.returncode != 0
        if kind == "stop host":  # it finds out once it goes on
            signal_all(served.nodes[1], signal.SIGCONT)
            assert until(lambda: served.nodes[1].process.poll() is not None, 15), served.nodes[1].log
    for each in clients:
        assert len(each.ends) == each.asked, "every request ended, and once"
        assert "hangs" not in each.ends
        assert set(each.ends[:-1]) == {"whole"}
    assert "told" in {each.ends[-1] for each in clients}, [each.ends[-1] for each in clients]
    print(f"{kind}: both ended after {took_s:.1f} s, {sum(each.asked for each in clients)} requests")
