"""A `bough serve` process on a tiny model, to be mistreated. Its output goes to a file, so that it never waits for us."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bough.config.default_model import default_model_path
from tests.waiting import until

ROOT = Path(__file__).parents[3]
INJECTED = Path(__file__).with_name("injected")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49_152,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
PAGES = 131_072
"""KV tokens of the server: four of the longest requests at once."""


def body(prompt: str | list[int] = "Once upon a time", tokens: int = 4, **more: Any) -> dict[str, Any]:
    """A request to /generate."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    name = "text" if isinstance(prompt, str) else "input_ids"
    return {name: prompt, "sampling_params": sampling, **more}


ENDLESS = 30_000
"""New tokens that take half a minute at least, on any machine: whoever asks for them is there until told to go."""
LONG = body(tokens=ENDLESS)


class Server:
    """Started at once; `url` answers when the constructor returns."""

    def __init__(
        self,
        *flags: str,
        environ: dict[str, str] | None = None,
        wait: bool = True,
        descriptors: int = 0,
        step_faults: str = "",
    ) -> None:
        """`descriptors`: how many each of its processes may have open, if not as many as usual. `step_faults`: steps that
        fail on purpose (see injected/sitecustomize.py)."""
        if step_faults:
            paths = os.pathsep.join(filter(None, [str(INJECTED), os.environ.get("PYTHONPATH")]))
            environ = {**(environ or {}), "PYTHONPATH": paths, "BOUGH_FAULTS": step_faults}
        self._directory = tempfile.TemporaryDirectory()
        model = Path(self._directory.name, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY))
        self._log = Path(self._directory.name, "log.txt")
        self._file = self._log.open("w")
        served = () if "--model-path" in flags else (str(model),)
        command = [
            sys.executable, "-m", "bough", "serve", *served, "--port", "0", "--tokenizer", str(default_model_path()),
            "--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1",
            "--no-custom-kernels", "--max-total-tokens", str(PAGES), *flags,
        ]  # fmt: skip
        if descriptors:
            command = ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            command, stdout=self._file, stderr=subprocess.STDOUT, cwd=ROOT, process_group=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        )  # fmt: skip
        self.url = ""
        if wait:
            found = until(
                lambda: (
                    re.search(r"(https?://(?:127\.0\.0\.1:\d+|localhost))(?:/v1|\", \"model\")", self.log())
                    or self._dead()
                ),
                240,
            )
            assert found, self.log()
            self.url = found[1]

    def _dead(self) -> None:
        assert self.process.poll() is None, self.log()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._file.close()
        self._directory.cleanup()

    @property
    def children(self) -> dict[str, int]:
        """Process ids by the module they run."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = child.cmdline()
            except psutil.Error:
                continue
            if "-m" in command:  # a process that a child is about to start still looks like it, and comes later
                found.setdefault(command[command.index("-m") + 1].removeprefix("bough."), child.pid)
        return found

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(self, request: dict[str, Any], timeout: float = 60, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=request, timeout=timeout, **more)

    def status(self, path: str = "/health") -> int:
        """0: no answer."""
        try:
            return httpx.get(self.url + path, timeout=30).status_code
        except httpx.HTTPError:
            return 0

    def state(self) -> dict[str, Any]:
        """The engine's own numbers."""
        info = httpx.get(f"{self.url}/server_info", timeout=60).json()
        state: dict[str, Any] = info["internal_states"][0]
        return state

    def live(self) -> int:
        state = self.state()
        return sum(int(state[name]) for name in ("running", "queued", "prefilling", "leaving", "compiling"))

    def held_pages(self) -> int:
        """Pages that are neither free nor cached."""
        return int(self.state()["pages"]["held"])

    def metrics(self, **labels: str) -> dict[str, float]:
        """Every metric, summed over the labels that are not named."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if all(sample.labels.get(name) == value for name, value in labels.items()):
                    name = sample.name.removeprefix("bough:")
                    found[name] = found.get(name, 0.0) + sample.value
        return found


def quickest(attempt: Callable[[], float], limit_s: float, most: int = 3) -> float:
    """The fewest seconds that `attempt` tells, which is tried again while they are too many: a machine that hiccups does
    so once, a server that is slow is so each time."""
    best = float("inf")
    for _ in range(most):
        best = min(best, attempt())
        if best < limit_s:
            break
    return best
