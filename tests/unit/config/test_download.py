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
WANTED = len(FILES["config.json"]) + len(FILES["model.safetensors"])


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

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
            for at in range(0, len(data), 2_500_000):
                self.wfile.write(data[at : at + 2_500_000])
                if len(data) > 2_500_000:
                    time.sleep(0.1)


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
    environ = {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environ},
    )


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
