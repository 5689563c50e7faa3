"""As much of the hub as bough asks for: what a repository holds, and its files, whole or in part."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf")


class FakeHub:
    """A hub on this machine. `files` are those of every repository whose name is in `repos`."""

    def __init__(self, files: dict[str, bytes], repos: tuple[str, ...] = ("our/model",)) -> None:
        self.files = files
        self.repos = repos
        self.sent: list[tuple[str, int, int]] = []
        """(file, first byte, bytes) of every answer with a body."""
        self.before_sending: Callable[[str, bytes], bytes | None] | None = None
        """May change what is sent of a file; None: the connection breaks after half of it."""
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def environ(self, cache: Any) -> dict[str, str]:
        """Variables with which a process asks this hub."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
            "HF_HUB_DOWNLOAD_TIMEOUT": "120",
        }  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def entry(self, name: str, key: str) -> dict[str, Any]:
        data = self.files[name]
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, Any] = {key: name, "size": len(data), "oid": git, "blobId": git}
        if name.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 130}
        return entry

    def etag(self, name: str) -> str:
        entry = self.entry(name, "name")
        return str(entry["lfs"]["sha256"] if "lfs" in entry else entry["oid"])


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not path.startswith("/api/"):
            return self._file(body=True)
        repo = re.sub(r"^/api/models/|/(tree|revision)/.*$", "", path)
        if repo not in self.hub.repos:
            return self._json({"error": "Repository not found"}, 404, {"x-error-code": "RepoNotFound"})
        if "/tree/" in path:
            return self._json([self.hub.entry(name, "path") | {"type": "file"} for name in self.hub.files])
        siblings = [self.hub.entry(name, "rfilename") for name in self.hub.files]
        return self._json({"id": repo, "sha": COMMIT, "siblings": siblings})

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def _file(self, *, body: bool) -> None:
        name = unquote(re.sub(r"^/.+?/resolve/[^/]+/", "", urlsplit(self.path).path))
        if name not in self.hub.files:
            self.send_error(404)
            return
        whole = self.hub.files[name]
        first, last = 0, len(whole) - 1
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
            first, last = int(asked[1]), min(last, int(asked[2] or last))
        data = whole[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("etag", f'"{self.hub.etag(name)}"')
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("accept-ranges", "bytes")
        self.send_header("content-length", str(len(data)))
        if asked:
            self.send_header("content-range", f"bytes {first}-{last}/{len(whole)}")
        self.end_headers()
        if not body:
            return
        changed = data if self.hub.before_sending is None else self.hub.before_sending(name, data)
        if changed is None:
            changed = data[: len(data) // 2]
            self.close_connection = True
        self.hub.sent.append((name, first, len(changed)))
        try:
            self.wfile.write(changed)
        except OSError:
            return
        if len(changed) < len(data):
            self.wfile.flush()
            self.connection.close()
