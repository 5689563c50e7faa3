"""One server or library under test, in a process of its own: prints a JSON object a line as results come.

Run by `cpu_peers.py`, under whichever Python has the library. Every contender computes the same five rows; rates are
output tokens over the whole time of a request, prompt included, except for prefill, which is prompt tokens over the time to
the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]
"""Generates exactly the given number of tokens, greedily, for each prompt, all prompts at once."""

SINGLE_IN, SINGLE_OUT = 128, 128
PREFILL = 1024
STREAMS, SHARED, OWN, STREAM_OUT = 16, 512, 64, 64

_dice = random.Random(0)


def ids(count: int) -> list[int]:
    return [_dice.randrange(100, 40_000) for _ in range(count)]


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def measure(generate: Generate, rounds: int) -> None:
    """All the rates, each the best of some rounds: other programs' noise only ever makes a run slower."""
    for _ in range(rounds):
        begin = time.perf_counter()
        generate([ids(SINGLE_IN)], SINGLE_OUT)
        tell(row="single", value=SINGLE_OUT / (time.perf_counter() - begin))
        begin = time.perf_counter()
        generate([ids(PREFILL)], 1)
        tell(row="prefill", value=PREFILL / (time.perf_counter() - begin))
        shared = ids(SHARED)
        prompts = [shared + ids(OWN) for _ in range(STREAMS)]
        begin = time.perf_counter()
        generate(prompts, STREAM_OUT)
        tell(row="streams", value=STREAMS * STREAM_OUT / (time.perf_counter() - begin))


def bough(args: argparse.Namespace) -> None:
    import bough

    def generate(prompts: Prompts, count: int) -> None:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        assert all(len(answer["output_ids"]) == count for answer in answers)

    settings = dict(pair.split("=", 1) for pair in args.setting)
    tell(version=bough.__version__)
    with bough.Engine(model_path=args.model, **settings) as engine:
        generate([ids(16)], 1)
        tell(event="first token")
        measure(generate, args.rounds)


def llama_server(args: argparse.Namespace) -> None:
    """llama.cpp's own server, which batches. Its slots don't share what they have computed: every stream does its own."""
    port = random.randrange(20_000, 40_000)
    command = [
        args.program, "-m", args.model, "--port", str(port), "-t", str(args.threads), "-tb", str(args.threads),
        "-np", str(STREAMS), "-c", str(STREAMS * 1280), "--no-webui", "--log-disable",
    ]  # fmt: skip
    tell(version=llama_version(args.program))
    begin = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def post(prompt: list[int], count: int) -> dict[str, Any]:
        body = {
            "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": True,
            "response_fields": ["tokens_predicted"],  # answers to random prompts are no valid UTF-8, which it would refuse
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return dict(json.load(answer))

    def generate(prompts: Prompts, count: int) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            for answer in pool.map(lambda prompt: post(prompt, count), prompts):
                assert answer["tokens_predicted"] == count

    try:
        while True:
            try:
                post(ids(16), 1)
                break
            except OSError:
                assert server.poll() is None, "llama-server ended"
                time.sleep(0.01)
        tell(event="first token", start_s=time.perf_counter() - begin)
        measure(generate, args.rounds)
    finally:
        server.terminate()
        server.wait()


def llama_version(program: str) -> str:
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (told.stdout + told.stderr).splitlines() if line.startswith("version")]
    return lines[0].removeprefix("version:").strip() if lines else ""


def llama_cpp_python(args: argparse.Namespace) -> None:
    """The Python binding: one request after the other."""
    from llama_cpp import Llama, __version__

    tell(version=__version__)
    model = Llama(args.model, n_ctx=2048, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    def generate(prompts: Prompts, count: int) -> None:
        for prompt in prompts:
            tokens = model.generate(prompt, temp=0.0)
            for _ in range(count):
                next(tokens)

    generate([ids(16)], 1)
    tell(event="first token")
    measure(generate, args.rounds)


def transformers(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, __version__

    tell(version=f"{__version__}, torch {torch.__version__}")
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

    @torch.inference_mode()
    def generate(prompts: Prompts, count: int) -> None:
        given = torch.tensor(prompts)
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == given.shape[1] + count

    generate([ids(16)], 1)
    tell(event="first token")
    measure(generate, args.rounds)


def vllm(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams, __version__

    tell(version=__version__)
    model = LLM(
        model=args.model, dtype=args.dtype, max_model_len=2048, max_num_seqs=STREAMS, skip_tokenizer_init=True,
        enable_prefix_caching=True,
    )  # fmt: skip

    def generate(prompts: Prompts, count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers = model.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == count for answer in answers)

    generate([ids(16)], 1)
    tell(event="first token")
    measure(generate, args.rounds)


CONTENDERS = {
    "bough": bough,
    "llama-server": llama_server,
    "llama-cpp-python": llama_cpp_python,
    "transformers": transformers,
    "vllm": vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--model", default="")
    parser.add_argument("--program", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--setting", action="append", default=[])
    args = parser.parse_args()
    CONTENDERS[args.contender](args)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
