"""What HTTP costs: the same closed-loop requests, streamed by `bough serve` and by `bough.Engine` in Python.

    bough bench http benchmarks/models/llama-3.1-8b --load-format dummy

Each client sends its next request when it has the last token of the one before. Prompts are random token ids, of which no
two begin alike. Both stream, because prompts get smaller steps beside answers that are streamed; the ratio is the server's
rate over the engine's. CPU shares are of one core each. A model without a tokenizer gets one of its size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from bough.bench.dialects import Dialect
from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.bench.http_stream import StreamingClient
from bough.bench.load import BenchRequest, ClientShare, drive, run_async
from bough.bench.prompts import BenchPrompt
from bough.config.command_line import CommandParser
from bough.config.server_args import build_config
from bough.core.errors import BoughError

Json = dict[str, Any]
_START_S = 300.0
_WORD_IDS = (1000, 9000)
"""Ids of prompts."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`clients` send `requests` in all, one after the other each."""

    clients: int
    requests: int
    tokens_in: int
    tokens_out: int

    @staticmethod
    def parse(text: str) -> ClosedLoop:
        numbers = [int(part) for part in text.split(":")]
        if len(numbers) != 4 or min(numbers) < 1:
            raise argparse.ArgumentTypeError("must be CLIENTS:REQUESTS:TOKENS_IN:TOKENS_OUT")
        return ClosedLoop(*numbers)

    def prompts(self, seed: int) -> list[list[int]]:
        """Different for every seed."""
        rng = np.random.default_rng([seed, *map(int, asdict(self).values())])
        found: list[list[int]] = rng.integers(*_WORD_IDS, (self.requests, self.tokens_in)).tolist()
        return found


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench http",
        usage="bough bench http [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--loops", type=ClosedLoop.parse, nargs="+", metavar="CLIENTS:REQUESTS:IN:OUT",
                      default=[ClosedLoop(256, 512, 1024, 128), ClosedLoop(512, 1024, 64, 256)],
                      help="(default: 256:512:1024:128 512:1024:64:256)")  # fmt: skip
    made.add_argument("--client-processes", type=int, default=4, metavar="N", help="that send requests (default: 4)")
    made.add_argument("--backend", choices=("native", "openai"), default="openai", help="route (default: openai)")
    made.add_argument("--repeats", type=int, default=1, metavar="N", help="of each loop; the fastest counts")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return made


def main() -> None:
    options, settings = parse_with_settings(parser(), sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="bough-bench-") as folder:
        settings = with_tokenizer(settings, Path(folder))
        with served(settings) as server:
            over_http = []
            for loop in options.loops:
                over_http.append(best(options.repeats, lambda seed, loop=loop: server.run(loop, seed, options)))
                if not options.json:
                    print(f"{_words(loop)}: HTTP {over_http[-1]['tokens_per_s']:.0f} tokens/s", flush=True)
        rows: list[Json] = []
        for loop, http, engine in zip(options.loops, over_http, run_direct(settings, options), strict=True):
            numbers = {f"engine_{name}": value for name, value in engine.items()}
            ratio = round(http["tokens_per_s"] / engine["tokens_per_s"], 4)
            rows.append({**asdict(loop), **http, **numbers, "ratio": ratio})
            if not options.json:
                _print(loop, rows[-1])
    if options.json:
        print(json.dumps(rows))


def _print(loop: ClosedLoop, row: Json) -> None:
    print(
        f"{_words(loop)}: HTTP {row['tokens_per_s']:.0f} tokens/s ({row['seconds']:.2f} s), engine "
        f"{row['engine_tokens_per_s']:.0f} ({row['engine_seconds']:.2f} s), ratio {row['ratio']:.3f}; first token "
        f"{row['ttft_ms']:.0f} ms, client {row['client_busy']:.2f} of a core"
    )
    for name, share in sorted(row["cpu"].items()):
        print(f"    {name:<28} {share:.2f} of a core", flush=True)


def _words(loop: ClosedLoop) -> str:
    return f"{loop.clients} clients, {loop.requests} requests of {loop.tokens_in} in and {loop.tokens_out} out"


def best(repeats: int, run: Any) -> Json:
    """Of several runs with prompts of their own."""
    found: list[Json] = [run(seed) for seed in range(1, repeats + 1)]
    return min(found, key=lambda each: each["seconds"])


# -- through HTTP ---------------------------------------------------------------------------------


class MeasuredServer:
    """A running `bough serve`."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url = url
        self._process = process

    def run(self, loop: ClosedLoop, seed: int, options: argparse.Namespace) -> Json:
        """One closed loop. Raises `BoughError` if a request fails."""
        dialect = Dialect(
            name=options.backend,
            model=self._name() if options.backend == "openai" else "",
            stream=True,
            ignore_eos=True,
        )
        short = ClosedLoop(min(16, loop.clients), 32, loop.tokens_in, 8)
        self._drive(short, ~seed & 0xFFFF, dialect, 1)
        before = self._cpu_s()
        result, wall_s = self._drive(loop, seed, dialect, options.client_processes)
        after = self._cpu_s()
        failed = [each.error for each in result.outcomes if each.error]
        if failed:
            raise BoughError(what=f"{len(failed)} of {loop.requests} requests failed", why=failed[0])
        firsts = [each.first_s - each.sent_s for each in result.outcomes]
        tokens = sum(each.output_tokens for each in result.outcomes)
        if tokens != loop.requests * loop.tokens_out:
            raise BoughError(what=f"{tokens} tokens came", why=f"{loop.requests * loop.tokens_out} were asked for")
        return {
            "seconds": wall_s,
            "tokens_per_s": tokens / wall_s,
            "ttft_ms": 1e3 * float(np.median(firsts)),
            "client_busy": result.busy,
            "cpu": {name: round((after[name] - before.get(name, 0.0)) / wall_s, 3) for name in after},
        }

    def _drive(self, loop: ClosedLoop, seed: int, dialect: Dialect, processes: int) -> tuple[Any, float]:
        calls = []
        for ids in loop.prompts(seed):
            prompt = BenchPrompt(output_len=loop.tokens_out, input_len=loop.tokens_in, ids=ids)
            body = msgspec.Raw(msgspec.json.encode(dialect.body(prompt)))
            calls.append(BenchRequest(at_s=0.0, body=body, input_len=loop.tokens_in))
        share = ClientShare(
            base_url=self.url, headers={}, dialect=dialect, calls=calls, max_concurrency=loop.clients, begin_s=0.0
        )
        result = drive(share, processes)
        return result, max(each.ended_s for each in result.outcomes)

    def _name(self) -> str:
        listed = run_async(StreamingClient(self.url).call("GET", "/v1/models"))
        return str(listed["data"][0]["id"])

    def _cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by process."""
        found = {}
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times, words = process.cpu_times(), process.cmdline()
            except psutil.NoSuchProcess:
                continue
            module = words[words.index("-m") + 1] if "-m" in words else " ".join(words[:1])
            name = "API (bough serve)" if process.pid == self._process.pid else module
            found[f"{name} {process.pid}"] = float(times.user + times.system)
        return found


@contextmanager
def served(settings: Mapping[str, Any]) -> Iterator[MeasuredServer]:
    """Starts a server with an engine's settings, and ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bough", "serve", *words_of(settings), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # its greeting
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process)
        yield MeasuredServer(url, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as arguments of `bough serve`."""
    words: list[str] = []
    for name, value in {"log_level": "warning", **settings}.items():
        if name == "model_path":
            words.insert(0, str(value))
        elif isinstance(value, bool):
            words.append(("--" if value else "--no-") + name.replace("_", "-"))
        else:
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _START_S
    while True:
        try:
            run_async(StreamingClient(url).call("GET", "/health"))
            return
        except BoughError as error:
            if process.poll() is not None or time.monotonic() > give_up:
                raise BoughError(what="the server to be measured did not start", why=error.why) from error
        time.sleep(0.1)


# -- without it -----------------------------------------------------------------------------------


def run_direct(settings: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Json]:
    """The loops, on an engine that this process calls, one after the other."""
    from bough.offline import Engine

    with Engine(**settings) as engine:

        def run(loop: ClosedLoop, seed: int) -> Json:
            short = ClosedLoop(min(16, loop.clients), 32, loop.tokens_in, 8)
            run_async(_loop(engine, short, ~seed & 0xFFFF))
            seconds = run_async(_loop(engine, loop, seed))
            return {"seconds": seconds, "tokens_per_s": loop.requests * loop.tokens_out / seconds}

        for each in options.loops:
            yield best(options.repeats, lambda seed, loop=each: run(loop, seed))


async def _loop(engine: Any, loop: ClosedLoop, seed: int) -> float:
    """Seconds that it took."""
    waiting = loop.prompts(seed)[::-1]
    sampling = {"temperature": 0.0, "max_new_tokens": loop.tokens_out, "ignore_eos": True}

    async def client() -> None:
        while waiting:
            found: Json = {}
            async for event in await engine.async_generate(
                input_ids=waiting.pop(), sampling_params=sampling, stream=True
            ):
                found = event["meta_info"]
            if found.get("completion_tokens") != loop.tokens_out:
                raise BoughError(what="an answer is too short", why=str(found))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(loop.clients)))
    return time.perf_counter() - began


# -- a tokenizer ----------------------------------------------------------------------------------


def with_tokenizer(settings: Mapping[str, Any], folder: Path) -> Json:
    """The settings, with a tokenizer of the model's size where it has none."""
    config = build_config(**settings)
    model = Path(config.model.model)
    if config.model.tokenizer or not model.is_dir() or (model / "tokenizer.json").exists():
        return dict(settings)
    size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer(size)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return {**settings, "tokenizer": str(folder)}


def word_tokenizer(size: int) -> Json:
    """`tokenizer.json` of a byte-level vocabulary: bytes, and words of letters with a blank before them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in kept] + [chr(256 + number) for number in range(256 - len(kept))]
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    for place in range(len(letters), size):
        number, word = place, ""
        while number:
            number, letter = divmod(number, 26)
            word += chr(97 + letter)
        vocabulary["\u0120" + word] = place
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": vocabulary, "merges": []},
    }  # fmt: skip


if __name__ == "__main__":
    main()
