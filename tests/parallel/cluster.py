"""`bough serve` on tiny models, as one process group or several that play machines, asked over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import torch

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33], [42], [100, 90, 80, 70, 60, 50, 40], list(range(3, 40)), [7, 7, 7]]
NEW_TOKENS = 16
SETTINGS = (
    "--skip-tokenizer-init", "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1", "--no-custom-kernels",
    "--max-total-tokens", "4096", "--page-size", "4", "--max-running-requests", "16",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Node:
    """One `bough serve` process. Its output goes to a file."""

    def __init__(self, model: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bough.launch_server", str(model), "--port", str(self.port), *SETTINGS, *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            process_group=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            assert self.process.poll() is None, f"it has ended:\n{self.log}"
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"it was not ready within {timeout_s} s:\n{self.log}")

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()


class Cluster:
    """Several nodes; node 0 is asked."""

    def __init__(self, model: Path, *flags: str, per_node: Sequence[Sequence[str]] = ((),)) -> None:
        self.nodes = [Node(model, *flags, *more) for more in per_node]

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes:
                node.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = httpx.get(f"{self.url}/server_info", timeout=60).json()
        return info

    def ask(
        self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS, *, replica: int | None = None, **more: Any
    ) -> list[list[int]]:
        """Greedy answers to prompts, all at once, from any replica or from one."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **more}
        body: dict[str, Any] = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
        if replica is not None:
            body["data_parallel_rank"] = replica
        replies = httpx.post(f"{self.url}/generate", json=body, timeout=120)
        assert replies.status_code == 200, replies.text
        return [reply["output_ids"] for reply in replies.json()]

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.end()


@torch.no_grad()
def greedy(
    reference: torch.nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """What transformers answers."""
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new_tokens):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers
