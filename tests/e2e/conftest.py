"""Real processes on a tiny model with random weights and the default model's tokenizer: starts in seconds, computes in
milliseconds. Tests that need sense in the answers use the default model itself."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import bough
from bough.config.default_model import default_model_path

ROOT = Path(__file__).parents[2]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49_152,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


ENDLESS = 14_000
"""New tokens that take a dozen seconds at least, on any machine, and fit four times: a request that is there until told to
go, even if the machine stands still for a while before it is."""


@pytest.fixture(scope="session")
def tiny_settings() -> Iterator[dict[str, Any]]:
    """Settings of a server or an Engine on the tiny model."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(TINY))
        yield {
            "model_path": directory,
            "tokenizer": str(default_model_path()),
            "load_format": "dummy",
            "dtype": "float32",
            "device": "cpu",
            "max_total_tokens": 65_536,
            "custom_kernels": False,
            "cpu_threads": 1,
        }


@pytest.fixture(scope="session")
def tiny_engine(tiny_settings: dict[str, Any]) -> Iterator[bough.Engine]:
    with bough.Engine(**tiny_settings) as engine:
        yield engine


class Server:
    """A `bough serve` process."""

    def __init__(self, settings: dict[str, Any], *extra: str) -> None:
        flags = [part for name, value in settings.items() for part in _flag(name, value)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bough.launch_server", "--port", "0", *flags, *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            process_group=0,
        )
        self.lines: list[str] = []
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", line)
            if found:
                os.set_blocking(self.process.stdout.fileno(), False)
                return found[1]
        raise AssertionError("the server did not start:\n" + "".join(self.lines))

    @property
    def children(self) -> dict[str, int]:
        """Process ids by name."""
        named: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = " ".join(child.cmdline())
            except psutil.Error:
                continue  # it has ended meanwhile
            for name in ("bough.engine", "bough.detokenizer", "bough.entrypoints.http"):
                if f"-m {name}" in command:  # what a child is about to start still looks like it, and comes later
                    named.setdefault(name.removeprefix("bough."), child.pid)
        return named

    def live(self) -> int:
        info = httpx.get(f"{self.url}/server_info", timeout=60).json()
        state = info["internal_states"][0] if "internal_states" in info else info["engine"]
        return int(state["running"]) + int(state["queued"]) + int(state["prefilling"])

    def rest(self) -> str:
        """What it has printed since."""
        assert self.process.stdout is not None
        return self.process.stdout.read() or ""

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{name.replace('_', '-')}"]
    return [flag, str(value)]


@pytest.fixture
def server(tiny_settings: dict[str, Any]) -> Iterator[Server]:
    made = Server(tiny_settings)
    yield made
    made.end()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """Starts servers with any settings; they end with the test."""
    made: list[Server] = []

    def make(settings: dict[str, Any], *extra: str) -> Server:
        made.append(Server(settings, *extra))
        return made[-1]

    yield make
    for each in made:
        each.end()


def free_port() -> int:
    """One that no client's connection is given meanwhile: those come from the system's own range."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, lowest // 2), lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
