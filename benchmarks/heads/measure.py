"""What heads accept when they are served: tokens per step and per second on prompts that they have not learned from.

    python benchmarks/heads/measure.py benchmarks/heads --device cuda --answers FILE

`--answers`: what `bough train-draft --save-answers` has written, whose first prompts were held back; without it, the chat
questions of benchmarks/speculation.py are asked. One request at a time and 16 at once; greedy and at temperature 0.7; all
drafts verified (`--no-speculative-adaptive`), beside the same engine without drafts. Greedy answers are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import bough
from bough.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from speculation import CHAT, CHAT_ML

ALGORITHMS = {"LlamaForCausalLMEagle3": "EAGLE3", "MedusaModel": "MEDUSA"}


def prompts_of(path: str, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    if not path:
        return [tokenizer.encode(CHAT_ML.format(each), add_special_tokens=False) for each in CHAT]
    lines = Path(path).read_text().splitlines()[:count]
    return [json.loads(line)["prompt_ids"] for line in lines]


def ask(engine: bough.Engine, prompts: list[list[int]], batch: int, temperature: float, most: int) -> dict[str, Any]:
    steps = tokens = 0
    outputs = []
    began = time.monotonic()
    for at in range(0, len(prompts), batch):
        some = prompts[at : at + batch]
        params = [{"temperature": temperature, "max_new_tokens": most, "sampling_seed": n} for n in range(len(some))]
        for answer in engine.generate(input_ids=some, sampling_params=params):
            meta = answer["meta_info"]
            outputs.append(answer["output_ids"])
            tokens += meta["completion_tokens"] - 1
            steps += meta.get("spec_verify_ct", meta["completion_tokens"] - 1)
    return {"outputs": outputs, "per_step": tokens / max(1, steps), "rate": tokens / (time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--answers", default="")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    asked = parser.parse_args()
    heads = sorted(path.parent for path in asked.heads.glob("*/config.json"))
    plain: dict[tuple[int, float], dict[str, Any]] = {}
    print("| head | batch | temperature | tokens per step | tok/s | beside off | same greedy answers |\n|" + "---|" * 7)
    for head in [None, *heads]:
        settings: dict[str, Any] = {"device": asked.device, "context_length": 2048, "max_total_tokens": 1 << 16}
        if asked.model != "default":
            settings["model_path"] = asked.model
        if head is not None:
            architecture = json.loads((head / "config.json").read_text())["architectures"][0]
            settings |= {
                "speculative_algorithm": ALGORITHMS[architecture],
                "speculative_draft_model_path": str(head),
                "speculative_adaptive": False,
            }
        with bough.Engine(**settings) as engine:
            assert engine.tokenizer is not None
            prompts = prompts_of(asked.answers, asked.prompts, engine.tokenizer)
            for batch in (1, 16):
                ask(engine, prompts[:batch], batch, 0.0, 16)
                for temperature in (0.0, 0.7):
                    some = prompts[: max(8, batch)]
                    found = ask(engine, some, batch, temperature, asked.max_tokens)
                    off = plain.setdefault((batch, temperature), found)
                    same = sum(a == b for a, b in zip(found["outputs"], off["outputs"], strict=True))
                    print(
                        f"| {'off' if head is None else head.name} | {batch} | {temperature} | {found['per_step']:.2f} | "
                        f"{found['rate']:.0f} | {found['rate'] / off['rate']:.2f} | "
                        f"{f'{same} of {len(some)}' if not temperature else ''} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
