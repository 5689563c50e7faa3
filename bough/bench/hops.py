"""The latency that each process adds to a single request, on a simulated device.

    bough bench hops --device-ms 4.4 --prompt 512

Requests come one at a time, a few milliseconds apart, through `Engine.generate` with token ids and no tokenizer. `overhead`
is the whole time less the device's. `--batch` then submits many prompts at once: how long until the first step is launched,
and until the engine has them all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bough.config.command_line import CommandParser
from bough.launch import Programs
from bough.offline import Engine

Json = dict[str, Any]

VOCAB = 128_256
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
"""Nothing of it is computed."""
_HOPS = ("call to engine", "engine to launch", "device", "device to sent", "sent to answer")


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench hops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device-ms", type=float, default=4.4, help="a step's time on the device (%(default)s)")
    made.add_argument("--spin-ms", type=float, default=2.0, help="busy part of the engine's waits (%(default)s)")
    made.add_argument("--requests", type=int, default=200, help="number of single requests (%(default)s)")
    made.add_argument("--gap-ms", type=float, default=5.0, help="milliseconds between requests (%(default)s)")
    made.add_argument("--prompt", type=int, nargs="+", default=[512, 2048], help="tokens per prompt (%(default)s)")
    made.add_argument("--batch", type=int, default=512, help="prompts of the batch; 0: none (%(default)s)")
    made.add_argument("--batch-prompt", type=int, default=1024, help="tokens per prompt of the batch (%(default)s)")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return made


def main() -> None:
    options = parser().parse_args()
    results: list[Json] = [
        lone(options.requests, length, options.gap_ms / 1e3, options.device_ms, options.spin_ms)
        for length in options.prompt
    ]
    if options.batch:
        results.append(batch(options.batch, options.batch_prompt, options.device_ms, options.spin_ms))
    for result in results:
        print(json.dumps(result) if options.json else _table(result), flush=True)


def lone(requests: int, length: int, gap_s: float, device_ms: float, spin_ms: float) -> Json:
    """The same prompt again and again, so that all but its last token is cached after the first time."""
    rng = random.Random(1)
    prompt = [rng.randrange(1000, 32000) for _ in range(length)]
    began, ended = [], []
    with _Clocked(device_ms, spin_ms) as clocked:
        _answer(clocked.engine, [prompt], 1)
        for _ in range(requests):
            time.sleep(gap_s)
            began.append(time.monotonic())
            _answer(clocked.engine, [prompt], 1)
            ended.append(time.monotonic())
    times = clocked.times()
    rows = list(zip(*([*each[-requests:]] for each in times.values()), strict=True))
    hops: dict[str, list[float]] = {name: [] for name in _HOPS}
    overhead = []
    for start, (received, launched, computed, sent), end in zip(began, rows, ended, strict=True):
        points = (start, received, launched, computed, sent, end)
        for name, before, after in zip(_HOPS, points, points[1:], strict=False):
            hops[name].append(after - before)
        overhead.append(end - start - device_ms / 1e3)
    return {
        "prompt": length,
        "requests": requests,
        "us": {name: _spread(values) for name, values in {**hops, "overhead": overhead}.items()},
    }


def batch(prompts: int, length: int, device_ms: float, spin_ms: float) -> Json:
    """Many prompts at once."""
    rng = random.Random(2)
    ids = [[rng.randrange(1000, 32000) for _ in range(length)] for _ in range(prompts)]
    with _Clocked(device_ms, spin_ms) as clocked:
        for seed in range(3):
            _answer(clocked.engine, [[seed + 1] * 64], 4)
        time.sleep(0.05)
        start = time.monotonic()
        _answer(clocked.engine, ids, 1)
        end = time.monotonic()
    times = clocked.times()
    launched = [each for each in times["launched"] if each > start]
    received = [each for each in times["received"] if each > start]
    gaps = [after - before for before, after in itertools.pairwise(launched)]
    return {
        "batch": prompts,
        "prompt": length,
        "ms": {
            "until the first step is launched": 1e3 * (launched[0] - start),
            "until the engine has all": 1e3 * (max(received) - start),
            "until all are answered": 1e3 * (end - start),
            "of that on the device": device_ms * len(launched),
            "longest time between two launches": 1e3 * max(gaps, default=0.0),
        },
    }


class _Clocked:
    """An engine with a simulated device, for the duration of a `with`; its times are available afterwards."""

    def __init__(self, device_ms: float, spin_ms: float) -> None:
        self._directory = tempfile.TemporaryDirectory()
        root = Path(self._directory.name)
        (root / "config.json").write_text(json.dumps(_CONFIG))
        self._file = root / "times.json"
        self.engine = Engine(
            programs=Programs(engine=("-m", "bough.bench.hops_engine", str(self._file), str(device_ms), str(spin_ms))),
            model_path=str(root),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_running_requests=512,
        )

    def __enter__(self) -> _Clocked:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    def times(self) -> dict[str, list[float]]:
        times: dict[str, list[float]] = json.loads(self._file.read_text())
        self._directory.cleanup()
        return times


def _answer(engine: Engine, ids: list[list[int]], new: int) -> None:
    engine.generate(input_ids=ids, sampling_params={"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True})


def _spread(seconds: list[float]) -> dict[str, float]:
    in_order = sorted(seconds)
    return {
        "min": round(1e6 * in_order[0], 1),
        "median": round(1e6 * statistics.median(in_order), 1),
        "p90": round(1e6 * in_order[int(0.9 * len(in_order))], 1),
    }


def _table(result: Json) -> str:
    if "us" in result:
        head = f"{result['requests']} lone prompts of {result['prompt']}, us"
        lines = [f"{head:<40}{'min':>10}{'median':>10}{'p90':>10}"]
        lines += [
            f"{name:<40}{s['min']:>10.0f}{s['median']:>10.0f}{s['p90']:>10.0f}" for name, s in result["us"].items()
        ]
        return "\n".join(lines)
    lines = [f"{result['batch']} prompts of {result['prompt']} at once, ms"]
    return "\n".join(lines + [f"{name:<40}{value:>10.1f}" for name, value in result["ms"].items()])


if __name__ == "__main__":
    main()
