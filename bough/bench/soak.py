"""Mixed traffic for minutes, and leaks afterwards: memory per request, open files, threads, pages.

    bough bench soak --minutes 10 --check

Starts a server on a tiny random model (or MODEL), sends it everything clients send (whole answers and streams, stop
strings, log-probabilities, several answers, bad requests, connections that break off) and watches its processes.
Memory is RssAnon + VmSwap: what a process alone holds. Its slope is fitted over requests, after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from bough.bench.http_stream import StreamingClient
from bough.config.command_line import CommandParser
from bough.config.default_model import default_model_path
from bough.core.errors import BoughError

MOST_BYTES_A_REQUEST = 1024.0
WARM_UP = 0.3
"""Part of the run that is not fitted: pools, caches and arenas fill up."""
_SAMPLE_S = 1.0
_START_S = 180.0
_REST_S = 60.0
"""Seconds for the server to finish with clients that have disconnected."""
_TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49_152,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
_WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "seven",
    "green",
    "quickly",
    "under",
    "bridge",
    "music",
    "window",
    "paper",
]


# -- the server -----------------------------------------------------------------------------------


@contextlib.contextmanager
def served(model: str, flags: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A `bough serve` of its own: its address and its process."""
    with tempfile.TemporaryDirectory() as directory:
        if not model:
            Path(directory, "config.json").write_text(json.dumps(_TINY))
            model = directory
            flags = ["--tokenizer", str(default_model_path()), "--load-format", "dummy", "--dtype", "float32", *flags]
        log = Path(directory, "log.txt")
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "bough", "serve", model, "--port", "0", "--max-total-tokens", "16384", *flags],
                stdout=file, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        try:
            yield _address(process, log), psutil.Process(process.pid)
            if process.poll() is not None:
                raise BoughError(what="the server ended during the soak", why=log.read_text()[-1000:])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up and process.poll() is None:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise BoughError(what="the server to be soaked did not start", why=log.read_text()[-1000:])


# -- traffic --------------------------------------------------------------------------------------


class Traffic:
    """Clients of all kinds, from one seed."""

    def __init__(self, url: str, seed: int) -> None:
        self.done = 0
        self.statuses: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._client = StreamingClient(url)

    async def run(self, clients: int, seconds: float, least: int = 0) -> None:
        """Sends requests for `seconds` and until `least` requests are done."""
        give_up = time.monotonic() + seconds
        await asyncio.gather(*(self._one(give_up, least) for _ in range(clients)))
        self._client.close()

    async def _one(self, give_up: float, least: int) -> None:
        while time.monotonic() < give_up or self.done < least:
            path, fields, leaves_s = self._request()
            body = msgspec.json.encode(fields)
            try:
                asked = self._client.request("POST", path, body, lambda piece: None)
                status = await asyncio.wait_for(asked, leaves_s or 120)
                self.statuses[str(status)] += 1
            except TimeoutError:
                self.statuses["left"] += 1
            except (ConnectionError, OSError) as error:
                self.statuses[f"broken: {type(error).__name__}"] += 1
            self.done += 1

    def _text(self) -> str:
        shared = f"Document {self._rng.randrange(6)}. " + "All work and no play makes a dull day. " * 8
        own = " ".join(self._rng.choice(_WORDS) for _ in range(self._rng.choice([3, 20, 80])))
        return shared + own if self._rng.random() < 0.5 else own

    def _request(self) -> tuple[str, dict[str, Any], float]:
        """Path, body, and seconds after which the client leaves (0: it stays)."""
        rng = self._rng
        tokens = rng.choice([1, 4, 16, 48])
        leaves_s = rng.choice([0.005, 0.03, 0.1]) if rng.random() < 0.15 else 0.0
        stream = rng.random() < 0.5
        kind = rng.random()
        if kind < 0.05:
            return "/generate", {"text": 5, "sampling_params": {"temperature": "hot"}}, 0.0
        if kind < 0.4:
            sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": rng.choice([0, 1])}
            if rng.random() < 0.2:
                sampling["stop"] = [rng.choice(_WORDS)]
            if rng.random() < 0.1:
                sampling["n"] = 2
            fields = {"text": self._text(), "sampling_params": sampling, "stream": stream}
            if rng.random() < 0.15:
                fields |= {"return_logprob": True, "top_logprobs_num": 2}
            return "/generate", fields, leaves_s
        if kind < 0.6:
            return "/v1/completions", {"prompt": self._text(), "max_tokens": tokens, "stream": stream}, leaves_s
        messages = [{"role": "user", "content": self._text()}]
        fields = {"messages": messages, "max_tokens": tokens, "stream": stream}
        if rng.random() < 0.05:
            fields["response_format"] = {"type": "json_object"}
        return "/v1/chat/completions", fields, leaves_s


# -- watching -------------------------------------------------------------------------------------


@dataclass
class Series:
    """One process over time."""

    requests: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def slope(self) -> float:
        """Bytes a request, fitted over what comes after the warm-up."""
        first = int(len(self.requests) * WARM_UP)
        x, y = np.array(self.requests[first:], float), np.array(self.bytes[first:], float)
        if len(x) < 3 or x[-1] == x[0]:
            return 0.0
        return float(np.polyfit(x, y, 1)[0])


def held_bytes(pid: int) -> int:
    """RssAnon + VmSwap."""
    found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return 1024 * sum(map(int, found))


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[command.index("-m") + 1].removeprefix("bough.") if "-m" in command else str(process.pid)


async def watch(parent: psutil.Process, traffic: Traffic, seconds: float) -> dict[str, Series]:
    """Samples every process of the server once per second."""
    family = {"api": parent, **{_name(child): child for child in parent.children(recursive=True)}}
    family.pop("bough", None)
    series = {name: Series() for name in family}
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        for name, process in family.items():
            each = series[name]
            each.requests.append(traffic.done)
            each.bytes.append(held_bytes(process.pid))
            each.files.append(process.num_fds())
            each.threads.append(process.num_threads())
        await asyncio.sleep(_SAMPLE_S)
    return series


async def soak(
    url: str, parent: psutil.Process, *, seconds: float, clients: int, least: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Runs the traffic, `least` requests or more, and returns what was seen."""
    traffic = Traffic(url, seed)
    watching = asyncio.create_task(watch(parent, traffic, seconds))
    await traffic.run(clients, seconds, least)
    series = await watching
    client = StreamingClient(url)
    pages = await at_rest(client)
    client.close()
    return {
        "seconds": round(seconds, 1),
        "requests": traffic.done,
        "statuses": dict(sorted(traffic.statuses.items())),
        "pages": pages,
        "processes": {
            name: {
                "bytes_per_request": round(each.slope(), 1),
                "mib_first": round(each.bytes[int(len(each.bytes) * WARM_UP)] / 2**20, 1),
                "mib_last": round(each.bytes[-1] / 2**20, 1),
                "files": [each.files[int(len(each.files) * WARM_UP)], each.files[-1]],
                "threads": [each.threads[int(len(each.threads) * WARM_UP)], each.threads[-1]],
            }
            for name, each in series.items()
        },
    }


async def at_rest(client: StreamingClient) -> dict[str, Any]:
    """The page counts when no page is held; with a leak this is never reached."""
    give_up = time.monotonic() + _REST_S
    while True:
        await asyncio.sleep(1.0)
        pages: dict[str, Any] = (await client.call("GET", "/server_info"))["internal_states"][0]["pages"]
        if not pages["held"] or time.monotonic() > give_up:
            return pages


def verdict(seen: dict[str, Any], *, clients: int) -> list[str]:
    """The problems found, as text."""
    wrong = [
        f"{count} x {status}" for status, count in seen["statuses"].items() if status[:1] == "5" or "broken" in status
    ]
    pages = seen["pages"]
    if pages["held"] or pages["repairs"] or pages["free"] + pages["cached"] != pages["total"]:
        wrong.append(f"pages are missing: {pages}")
    for name, each in seen["processes"].items():
        if each["bytes_per_request"] > MOST_BYTES_A_REQUEST:
            wrong.append(f"{name} grows by {each['bytes_per_request']:.0f} bytes a request")
        if each["files"][1] > each["files"][0] + 2 * clients + 20:
            wrong.append(f"{name} has {each['files'][1]} files open, {each['files'][0]} after the warm-up")
        if each["threads"][1] > each["threads"][0] + 8:
            wrong.append(f"{name} has {each['threads'][1]} threads, {each['threads'][0]} after the warm-up")
    return wrong


def main() -> int:
    parser = CommandParser(
        prog="bough bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="", help="a model to serve; default: a tiny random one")
    parser.add_argument("--minutes", type=float, default=10.0, help="duration in minutes (%(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic (%(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a check fails")
    options, flags = parser.parse_known_args()
    with served(options.model, flags) as (url, process):
        seconds = 60 * options.minutes
        seen = asyncio.run(soak(url, process, seconds=seconds, clients=options.clients, seed=options.seed))
    print(json.dumps(seen, indent=1))
    wrong = verdict(seen, clients=options.clients)
    for line in wrong:
        print(line)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
