"""Speculative decoding with the default model on the CPU, beside the same engine without. Run by hand:

    python benchmarks/speculation.py --algorithm NGRAM --output benchmarks/results/speculation_cpu.md

Engines take turns in one process each, `--turns` times; the best of the turns counts. One request at a time, greedy, each
prompt once per turn. *rewrite*: prompts whose answers repeat much of them (summarise, correct, extend, extract); *chat*:
questions. The answers of both engines must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ARTICLE = (
    "The lighthouse at Port Ellery was built in 1871 after three ships were lost on the reef in a single winter. Its first "
    "keeper, Margaret Doyle, kept a diary for thirty years, in which she noted the weather, the ships that passed and the "
    "birds that rested on the gallery. The lamp burned whale oil until 1889, then kerosene, and since 1934 it has been "
    "electric. In 1962 the last keeper left, and the light was made automatic. Today the house of the keepers is a small "
    "museum, and the diary of Margaret Doyle is shown in the room where she wrote it."
)
CODE = (
    "def total(items):\n    result = 0\n    for item in items:\n        result = result + item.price * item.count\n"
    "    return result\n\ndef mean(items):\n    result = 0\n    for item in items:\n        result = result + item.price\n"
    "    return result / len(items)\n"
)
RECORDS = "\n".join(
    f"- order {1040 + i}: {name}, {count} x {what}, sent on the {3 + i}th of May"
    for i, (name, count, what) in enumerate(
        [("Anna Berg", 2, "desk lamp"), ("Omar Haddad", 1, "office chair"), ("Lucy Chen", 4, "paper tray"),
         ("Piotr Nowak", 3, "desk lamp"), ("Sara Lind", 1, "standing desk")]
    )
)  # fmt: skip
REWRITE = [
    f"Correct the spelling of this text and change nothing else:\n\n{ARTICLE}",
    f"Repeat the following article word by word:\n\n{ARTICLE}",
    f"Summarise the article, using its own sentences:\n\n{ARTICLE}",
    f"Add type hints to this code and print all of it:\n\n{CODE}",
    f"Rename the variable result to amount, and print all of the code:\n\n{CODE}",
    f"Write these orders as a numbered list, with all details:\n\n{RECORDS}",
]
CHAT = [
    "Why is the sky blue?",
    "Give me three tips for learning to swim as an adult.",
    "What is the difference between a crocodile and an alligator?",
    "Write a short poem about the first snow.",
    "How do I make a simple tomato soup?",
    "Who wrote the novel Frankenstein, and what is it about?",
]
CHAT_ML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SETS = {"rewrite": REWRITE, "chat": CHAT}


def measure(algorithm: str, max_tokens: int) -> None:
    """Prints what one engine does with all prompts, as JSON."""
    import bough

    found = {}
    with bough.Engine(speculative_algorithm=algorithm, context_length=2048) as engine:
        params = {"temperature": 0, "max_new_tokens": max_tokens}
        for name, prompts in SETS.items():
            texts = [CHAT_ML.format(prompt) for prompt in prompts]
            engine.generate(texts[0], params)
            outputs, seconds, tokens, steps = [], 0.0, 0, 0
            for text in texts:
                answer = engine.generate(text, params)
                meta = answer["meta_info"]
                outputs.append(answer["output_ids"])
                seconds += meta["decode_time"]
                tokens += meta["completion_tokens"] - 1
                steps += meta.get("spec_verify_ct", meta["completion_tokens"] - 1)
            found[name] = {"rate": tokens / seconds, "per_step": tokens / steps, "outputs": outputs}
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="NGRAM")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        measure(asked.child, asked.max_tokens)
        return
    best: dict[tuple[str, str], dict[str, float]] = {}
    outputs: dict[str, list[list[int]]] = {}
    for _ in range(asked.turns):
        for algorithm in ("none", asked.algorithm):
            command = [sys.executable, __file__, "--child", algorithm, "--max-tokens", str(asked.max_tokens)]
            began = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for name, told in json.loads(done.stdout.splitlines()[-1]).items():
                assert outputs.setdefault(name, told["outputs"]) == told["outputs"], (
                    f"{name}: {algorithm} says otherwise"
                )
                kept = best.get((name, algorithm))
                if kept is None or told["rate"] > kept["rate"]:
                    best[name, algorithm] = told
            print(f"{algorithm}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    lines = ["| prompts | off, tok/s | on, tok/s | ratio | tokens per step |", "|---|---|---|---|---|"]
    for name in SETS:
        off, on = best[name, "none"], best[name, asked.algorithm]
        ratio = on["rate"] / off["rate"]
        lines.append(f"| {name} | {off['rate']:.1f} | {on['rate']:.1f} | {ratio:.2f} | {on['per_step']:.2f} |")
    table = "\n".join(lines)
    print(table)
    if asked.output:
        asked.output.write_text(f"`python benchmarks/speculation.py --algorithm {asked.algorithm}`\n\n{table}\n")


if __name__ == "__main__":
    main()
