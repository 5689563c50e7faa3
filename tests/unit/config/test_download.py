"""A model comes from a hub that takes its time: how many bytes are there is told on the way, and is right."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from bough.config import download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": save({"x": np.zeros(10_000_000, np.float32)}),
    "original/model.safetensors": bytes(5_000_000),
    "picture.png": bytes(100),
}
PART = 11_000_000
"""More than the client reads at a time."""
WANTED = len(FILES["config.json"]) + len(FILES["model.safetensors"])


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for. A large file comes in three parts: the second once the download was told
    of, the third once its speed was, for which it must have grown in between."""

    said: Path
    """Where the downloading process says so."""

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if not self.path.startswith("/api/"):
            return self._file(body=True)
        if "/tree/" in self.path:
            return self._json([self._entry(name, "path") | {"type": "file"} for name in FILES])
        return self._json(
            {"id": "our/model", "sha": COMMIT, "siblings": [self._entry(name, "rfilename") for name in FILES]}
        )

    def _entry(self, name: str, key: str) -> dict[str, Any]:
        digest = hashlib.sha256(FILES[name]).hexdigest()
        entry: dict[str, Any] = {key: name, "size": len(FILES[name])}
        for blob in ("oid", "blobId"):
            entry[blob] = digest[:40]
        if name.endswith(".safetensors"):
            entry["lfs"] = {"sha256": digest, "oid": digest, "size": len(FILES[name]), "pointerSize": 130}
        return entry

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, *, body: bool) -> None:
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if name not in FILES:
            self.send_error(404)
            return
        data, digest = FILES[name], hashlib.sha256(FILES[name]).hexdigest()
        self.send_response(200)
        self.send_header("etag", f'"{digest if name.endswith(".safetensors") else digest[:40]}"')
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("accept-ranges", "bytes")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[:PART])
            for at, told in enumerate(("downloading our/model ...", "s left"), start=1):
                give_up_s = time.monotonic() + 60
                while len(data) > PART and told not in Hub.said.read_text() and time.monotonic() < give_up_s:
                    time.sleep(0.02)
                self.wfile.write(data[at * PART : (at + 1) * PART if at == 1 else None])


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


SCRIPT = """
import sys
from bough.cli import progress
from bough.config.server_args import build_config
from bough.launch import located

progress._LINE_EVERY_S = 0.0
told = []
shown = progress.Progress()
def hear(done, total):
    told.append((done, total))
    shown.show("downloading our/model", done, total)

config = located(build_config(model="our/model"), hear)
print(config.model.served_model_name, config.model.model, *(f"{done}/{total}" for done, total in told))
"""


def fetch(hub: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environ = {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
               "HF_HUB_DOWNLOAD_TIMEOUT": "120"}  # fmt: skip
    Hub.said = cache / "said"
    with Hub.said.open("w") as said:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            timeout=150,
            check=False,
            env={**os.environ, **environ},
        )
    done.stderr = Hub.said.read_text()
    return done


def test_bytes_are_told_while_they_come(hub: str, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    name, path, *told = done.stdout.split()
    assert name == "our/model"
    assert sorted(each.name for each in Path(path).iterdir()) == ["config.json", "model.safetensors"]
    numbers = [tuple(map(int, each.split("/"))) for each in told]
    assert {total for _, total in numbers} == {WANTED}, "what is not wanted does not count"
    parts = [part for part, _ in numbers]
    assert parts == sorted(parts)
    assert parts[-1] == WANTED
    assert any(0 < part < WANTED for part in parts), "not only at the end"
    assert re.search(r"^downloading our/model: [\d.]+ MiB of 38\.15 MiB", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"MiB/s, \d+ s left$", done.stderr, re.MULTILINE), done.stderr
    assert "%|" not in done.stderr, "one bar is enough"

    again = fetch(hub, tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.split()) == 2, "what is there is not told again"


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    done = fetch("http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert "our/model is not on this machine and the hub can't be reached" in done.stderr


def test_the_watchers_last_word_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([0, 10])

    def present(*_: Any) -> int:
        at = next(looks)
        time.sleep(0.15 * at)  # a busy machine: longer than between two looks
        return at

    monkeypatch.setattr(download, "_sizes", lambda *_: {"a": 10})
    monkeypatch.setattr(download, "_present", present)
    told: list[tuple[int, int]] = []
    with download._watched("our/model", "", [], [], lambda *bytes: told.append(bytes)):
        pass
    assert told == [(10, 10)]
