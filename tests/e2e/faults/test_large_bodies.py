"""Bodies as large as the server takes, made to be hard to read: nobody else waits for them, and their memory comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
from serving import Server, quickest
from tiny_vision import make_seeing, make_tokenizer

from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SIZE = 15 * 1024 * 1024
WORDS = b"The quick brown fox jumps over 12 lazy dogs, and then it sleeps. "


def filled(head: bytes, filler: bytes, tail: bytes, size: int = SIZE) -> bytes:
    return head + filler * ((size - len(head) - len(tail)) // len(filler)) + tail


BODIES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "a long text": ("/tokenize", lambda: filled(b'{"prompt": "', WORDS, b'"}', SIZE // 8), 200),
    "escapes": ("/generate", lambda: filled(b'{"text": "', b"\\n\\u00e9", b'"}'), 400),
    "half a million ids": ("/detokenize", lambda: b'{"tokens": [' + b"1234," * 500_000 + b"1]}", 200),
    "objects": ("/v1/completions", lambda: filled(b'{"prompt": "a", "x": [', b"{},", b"1]}"), 400),
}
LONG: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "the longest text": ("/tokenize", lambda: filled(b'{"prompt": "', WORDS, b'"}'), 200),
    "a text without words": ("/tokenize", lambda: filled(b'{"prompt": "', b"a", b'"}'), 400),
    "two million ids": ("/detokenize", lambda: b'{"tokens": [' + b"1234," * 2_000_000 + b"1]}", 200),
    "eight million ids": ("/detokenize", lambda: filled(b'{"tokens": [', b"1,", b"1]}"), 400),
    "depth": ("/generate", lambda: filled(b'{"text": "a", "x": [', b"[" * 58 + b"]" * 58 + b",", b"1]}"), 400),
    "texts": ("/v1/responses", lambda: filled(b'{"input": "a", "x": [', b'"ab",', b"1]}"), 400),
}


class Probes:
    """Asks again and again, over several connections, and notes how long each answer took."""

    def __init__(self, server: Server) -> None:
        self.seconds: list[float] = []
        self._url = server.url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(4)]

    def __enter__(self) -> Probes:
        for thread in self._threads:
            thread.start()
        assert until(lambda: len(self.seconds) > 8, 60)
        self.seconds.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._over.is_set():
                began = time.monotonic()
                client.get("/livez")
                self.seconds.append(time.monotonic() - began)
                time.sleep(0.005)

    @property
    def p99_s(self) -> float:
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]


def api_memory(server: Server) -> int:
    """Bytes that the API workers have: the server's own process, and its second worker."""
    pids = [server.process.pid, server.children["entrypoints.http"]]
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


@pytest.fixture(scope="module")
def warm(steady: Server) -> Server:
    """A server whose workers have what they make once: tables of the tokenizer, threads, and so on."""
    words = filled(b'{"prompt": "', WORDS, b'"}', 300_000)
    ids = b'{"tokens": [' + b"1234," * 60_000 + b"1]}"
    for _ in range(16):  # connections: the kernel gives each to one of the two workers
        for path, raw in (("/tokenize", words), ("/detokenize", ids), ("/generate", b'{"text": 1}')):
            httpx.post(steady.url + path, content=raw, timeout=120)
    return steady


@pytest.mark.parametrize("kind", [*BODIES, *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)])
def test_large_bodies_delay_no_other_request(warm: Server, kind: str) -> None:
    path, make, status = {**BODIES, **LONG}[kind]
    raw = make()
    assert len(raw) <= 16 * 1024 * 1024
    judge(warm, path, raw, status)


LARGER = 63 * 1024 * 1024
"""What a server of a model that sees takes: its pictures are in the bodies."""
_CHAT = b'{"model": "m", "messages": [{"role": "user", "content": ['
_PICTURE = b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,'
WITH_MEDIA: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "a picture": ("/v1/chat/completions", lambda: filled(_CHAT + _PICTURE, b"AAAA", b'"}}]}]}', LARGER), 400),
    "many pictures": (
        "/v1/chat/completions", lambda: filled(_CHAT, _PICTURE + b'AAAA"}},', b'{"type": "text"}]}]}', LARGER), 400,
    ),
    "a native picture": ("/generate", lambda: filled(b'{"text": "a", "image_data": "', b"AAAA", b'"}', LARGER), 400),
    "a long text": ("/generate", lambda: filled(b'{"text": "', WORDS, b'"}', LARGER), 400),
    "ids": ("/generate", lambda: filled(b'{"input_ids": [', b"1,", b"1]}", LARGER), 400),
    "objects": ("/v1/completions", lambda: filled(b'{"prompt": "a", "x": [', b"{},", b"1]}", LARGER), 400),
}  # fmt: skip


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("seeing")
    make_seeing("qwen3_vl", folder)
    make_tokenizer(folder)
    more = ("--tokenizer", str(folder), "--load-format", "auto", "--context-length", "256", "--page-size", "4")
    with Server("--model-path", str(folder), *more, "--api-workers", "2", "--served-model-name", "m") as server:
        for _ in range(16):
            httpx.post(f"{server.url}/generate", json={"text": "a", "image_data": "AAAA"}, timeout=120)
        yield server


@pytest.mark.long
@pytest.mark.parametrize("kind", WITH_MEDIA)
def test_large_bodies_with_media_delay_no_other_request(seeing: Server, kind: str) -> None:
    path, make, status = WITH_MEDIA[kind]
    judge(seeing, path, make(), status)


def judge(server: Server, path: str, raw: bytes, status: int) -> None:
    """Sends the body beside probes. These are quick, and the memory that it takes is bounded and comes back."""
    before, most = api_memory(server), 0

    def p99_s() -> float:
        nonlocal most
        done = threading.Event()
        replies: list[httpx.Response] = []

        def send() -> None:
            replies.append(httpx.post(server.url + path, content=raw, timeout=120))
            done.set()

        with Probes(server) as probes:
            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            while not done.wait(0.05):
                most = max(most, api_memory(server))
            thread.join(60)
        assert replies[0].status_code == status, replies[0].text[:300]
        return probes.p99_s

    assert quickest(p99_s, 0.1) < 0.1
    assert most - before < 8 * len(raw), "while it is read"
    assert until(lambda: api_memory(server) - before < len(raw), 60), "afterwards"
