"""`--deterministic` on a GPU: bf16, the kernels that are used in earnest, and the same bits in any company."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tiny import make_tiny

import bough

COMMON = [(7 * i + 3) % 120 + 3 for i in range(150)]
WATCHED = [*COMMON, 77, 78, 79]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


def watched(engine: bough.Engine) -> Any:
    answer = engine.generate(input_ids=WATCHED, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0)
    assert isinstance(answer, dict)
    info = answer["meta_info"]
    return answer["output_ids"], info["input_token_logprobs"][1:], info["output_token_logprobs"]


def test_the_same_bits_in_any_company(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, head_dim=64, hidden_size=256, intermediate_size=512)
    rng = random.Random(5)
    settings: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_total_tokens": 8192,
        "chunked_prefill_size": 64, "deterministic": True, "log_level": "warning",
    }  # fmt: skip
    with bough.Engine(model_path=str(tmp_path), **settings) as engine, ThreadPoolExecutor(10) as pool:
        first = watched(engine)
        for _ in range(50):
            prompts = [
                [*WATCHED[: rng.randrange(1, 153)], *(rng.randrange(3, 120) for _ in range(rng.randrange(1, 60)))]
                for _ in range(rng.randrange(1, 9))
            ]
            others = [
                pool.submit(engine.generate, input_ids=prompt, sampling_params={**GREEDY, "temperature": 0.8})
                for prompt in prompts
            ]
            assert watched(engine) == first
            for other in others:
                other.result()
