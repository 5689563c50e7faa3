"""Speculative decoding with the default model on the CPU, beside the same engine without. Run by hand:

    python benchmarks/speculation.py --method NGRAM --method SUFFIX
    python benchmarks/speculation.py --method SUFFIX@9 --method SUFFIX@17 --sets rewrite
    python benchmarks/speculation.py --method MEDUSA=benchmarks/heads/smollm2-135m-instruct-medusa --sets chat

All engines run at the same time, with one thread each, and answer by turns: every prompt is asked of each engine before the
next one. What is compared is the CPU time of the engine's process, which depends little on what else the machine does: of
answers, whose prompt was computed by a request before, and of both. One request at a time, greedy. *rewrite*: prompts whose
answers repeat much of them (summarise, correct, extend, extract); *chat*: questions. A turn has a cache namespace of its
own, so that neither prompts nor drafts come from what an earlier turn has left. The answers of all engines must be the same.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bough

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


class Method:
    """An engine that is measured."""

    def __init__(self, name: str, engine: bough.Engine) -> None:
        self.name = name
        self.engine = engine
        self._pid = engine.get_all_child_pids()[0]
        self.seconds: dict[str, list[float]] = {each: [] for each in SETS}
        """Of each turn, for the answers to all prompts of a set."""
        self.prompts: dict[str, list[float]] = {each: [] for each in SETS}
        """The same, for the prompts."""
        self.tokens: dict[str, int] = dict.fromkeys(SETS, 0)
        self.steps: dict[str, int] = dict.fromkeys(SETS, 0)

    @classmethod
    def start(cls, spec: str) -> Method:
        """`spec`: the algorithm, tokens that a step verifies of a request behind an @, what drafts for it behind a =."""
        name, _, path = spec.partition("=")
        algorithm, _, tokens = name.partition("@")
        settings: dict[str, Any] = {"speculative_algorithm": algorithm, "cpu_threads": 1, "context_length": 2048}
        if path:
            settings["speculative_draft_model_path"] = path
        if tokens:
            settings["speculative_num_draft_tokens"] = int(tokens)
        return cls(name, bough.Engine(**settings))

    def ask(self, name: str, text: str, max_tokens: int, namespace: str) -> list[int]:
        """Answers a prompt of the set `name`, and adds what that took to the newest turn."""
        before = self._cpu_s()
        self.engine.generate(text, {"temperature": 0, "max_new_tokens": 1}, cache_salt=namespace)
        between = self._cpu_s()
        params = {"temperature": 0, "max_new_tokens": max_tokens}
        answer = self.engine.generate(text, params, cache_salt=namespace)
        self.prompts[name][-1] += between - before
        self.seconds[name][-1] += self._cpu_s() - between
        meta = answer["meta_info"]
        self.tokens[name] += meta["completion_tokens"] - 1
        self.steps[name] += meta.get("spec_verify_ct", meta["completion_tokens"] - 1)
        ids: list[int] = answer["output_ids"]
        return ids

    def _cpu_s(self) -> float:
        """Time that the threads of the engine's process have had a CPU (Linux)."""
        tasks = Path(f"/proc/{self._pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--method", action="append", help="ALGORITHM, ALGORITHM@DRAFT_TOKENS, ALGORITHM=PATH; may be repeated (NGRAM)"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=[*SETS])
    asked = parser.parse_args()
    with ExitStack() as stack:
        methods = [Method.start(each) for each in ("none", *(asked.method or ["NGRAM"]))]
        for method in methods:
            stack.enter_context(method.engine)
            method.engine.generate("Hello", {"temperature": 0, "max_new_tokens": 4})
        for turn in range(asked.turns):
            for name in asked.sets:
                for method in methods:
                    method.seconds[name].append(0.0)
                    method.prompts[name].append(0.0)
                for number, prompt in enumerate(SETS[name]):
                    at = (turn + number) % len(methods)
                    said = [
                        method.ask(name, CHAT_ML.format(prompt), asked.max_tokens, f"turn {turn}")
                        for method in methods[at:] + methods[:at]
                    ]
                    assert all(each == said[0] for each in said), f"answers to {prompt[:40]!r} differ"
    print("| prompts | drafts | tokens per CPU s | beside off, median of turns | with prompts | tokens per step |")
    print("|" + "---|" * 6)
    for name in asked.sets:
        off = methods[0]
        for method in methods:
            answers = _ratio(off.seconds[name], method.seconds[name])
            both = _ratio(_sums(off, name), _sums(method, name))
            rate = method.tokens[name] / sum(method.seconds[name])
            per_step = method.tokens[name] / max(1, method.steps[name])
            print(f"| {name} | {method.name} | {rate:.1f} | {answers:.3f} | {both:.3f} | {per_step:.2f} |")


def _sums(method: Method, name: str) -> list[float]:
    return [prompts + answers for prompts, answers in zip(method.prompts[name], method.seconds[name], strict=True)]


def _ratio(off: list[float], on: list[float]) -> float:
    """How much faster: the median over the turns."""
    return statistics.median(base / mine for base, mine in zip(off, on, strict=True))


if __name__ == "__main__":
    main()
