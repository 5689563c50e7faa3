"""A Runtime's port is its own from the start: a server takes a while until it listens, and others look for ports, too."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.request import urlopen

import bough.lang as sgl

SERVER = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port = int(sys.argv[sys.argv.index("--port") + 1])
with socket.socket() as stranger:
    if stranger.connect_ex(("127.0.0.1", port)) == 0:
        sys.exit("somebody listens already")
with socket.socket() as stranger:
    try:
        stranger.bind(("127.0.0.1", port))
    except OSError:
        pass
    else:
        sys.exit("anybody could have had the port")

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"this one")

HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


def test_nobody_else_gets_the_port_before_the_server_has_it(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script)]
    with (
        sgl.Runtime(command=command, launch_timeout=60) as runtime,
        urlopen(f"{runtime.url}/health", timeout=60) as answer,
    ):
        assert answer.read() == b"this one"
