"""The speed-up of speculative decoding on this device: tokens per second with a draft head of real cost and simulated
acceptance, compared with none.

    bough bench speculation                              # Llama-3.1-8B's shapes with dummy weights; tiny ones on a CPU
    bough bench speculation --rates 0.8 0.7 0.6 --batch-size 1 32 --markdown

Weights are random, so no draft of theirs would be right: whether a draft counts is drawn instead, by `--rates` (of a draft
whose predecessors are right), on the device, at the place where tokens are drawn. Everything else is done as in a server:
an EAGLE-3 head of one layer drafts, the number of drafts follows what pays, graphs and overlap are on. "off" is the same
engine without drafts. Then steps of fixed kinds are timed: those that verify drafts which cost nothing, beside a plain one,
and what one more draft of the head takes, with a vocabulary of 32,000 tokens and with all. Prompts lie in the cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bough.bench.direct_engine import DirectEngine
from bough.config.command_line import CommandParser
from bough.core.errors import ConfigError
from bough.core.sampling import SamplingParams
from bough.core.step import I64
from bough.kernels.step_start import SlotState
from bough.runner.inputs import StepTensors
from bough.runner.proposing import Drafting, Proposer, Reads
from bough.speculative.device import DeviceDrafter

Json = dict[str, Any]
_COMMON: Final[Json] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False,
                        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 5e5}  # fmt: skip
LLAMA_8B: Final[Json] = {
    **_COMMON, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
TINY: Final[Json] = {
    **_COMMON, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}  # fmt: skip
_GOALS: Final = {1: 1.9, 16: 1.7, 64: 1.4}
"""Tokens per second beside off, by batch size, with the default rates on an H200."""
_VERIFY_GOALS: Final = {4: 1.55, 2: 1.12}
_DRAFT_GOALS_MS: Final = (0.26, 0.48)
_SMALL_VOCAB: Final = 32000
_FEW, _MANY = 1, 5
"""Drafts of the steps whose difference is what drafts take."""


class SimulatedAcceptance:
    """An `AcceptRule`: drafts are right as often as they should be. The same for a request's place whatever is beside it."""

    needs_odds = False

    def __init__(self, rates: list[float], vocab: int, device: torch.device) -> None:
        self._rates = torch.tensor(rates, device=device)
        self._vocab = vocab

    def redraw(self, drawn_L: Tensor, logits_LV: Tensor, tensors: StepTensors, state: SlotState) -> Tensor:
        count, slots_T = len(drawn_L), tensors.token_slots_T
        at, counter = tensors.sample_at_L[:count].long(), tensors.counter_L[:count].long()
        following = (at + 1).clamp_max(len(slots_T) - 1)
        slot = slots_T[at].long()
        is_draft = (slots_T[following] == slots_T[at]) & (following > at)
        place = (counter - state.num_output[slot]).clamp(0, len(self._rates) - 1)
        mixed = (counter * 2654435761 + slot * 40503 + 12345) & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 16)) * 73244475 & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 16)) & 0xFFFF
        right = mixed < self._rates[place] * 0x10000
        draft = tensors.ids_T[following]
        return torch.where(is_draft, torch.where(right, draft, (draft + 1) % self._vocab), drawn_L)


class FreeProposer:
    """Drafts that cost nothing, to see what their verification takes."""

    reads = Reads()
    num_layers = 0

    def propose(self, step: Drafting) -> list[Tensor]:
        return [torch.zeros_like(step.rows.last_R)] * step.count


@dataclass(frozen=True, slots=True)
class StepsMeasured:
    """Steps of one batch size."""

    ms: float
    """Milliseconds per step."""
    per_step: float
    """Tokens per request and step."""

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.per_step / self.ms


def head_config(target: Json, vocab: int | None) -> Json:
    """An EAGLE-3 head for a model. `vocab`: tokens that it drafts; None: all, by the model's own head."""
    return {**target, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": vocab}


class Bench:
    """Makes engines of one model, one at a time, and times them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._asked = options
        self.is_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
        self.target = LLAMA_8B if self.is_cuda and not options.tiny else TINY
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        self._engine: DirectEngine | None = None

    def open(self, draft: Json | None, most: int, proposer: Proposer | None = None) -> None:
        """An engine that makes up to `most` drafts of a request; the one before is gone."""
        self._engine = None
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        folder = self._folder / str(time.monotonic_ns())
        folder.mkdir()
        settings: Json = {"device": "cuda" if self.is_cuda else "cpu", "context_length": self._context()}
        settings |= {"max_running_requests": max(*self._asked.batch_size, self._asked.verify_rows)}
        settings["schedule_conservativeness"] = 0.0
        if self.is_cuda:
            settings["mem_fraction_static"] = 0.85
        else:
            settings |= {"dtype": "float32", "cpu_threads": 1}  # products are tiny
            settings |= {"max_total_tokens": 2 * settings["max_running_requests"] * self._context()}
        if draft is not None:
            (folder / "draft").mkdir()
            (folder / "draft" / "config.json").write_text(json.dumps(draft))
            medusa = "medusa_num_heads" in draft
            settings |= {
                "speculative_algorithm": "MEDUSA" if medusa else "EAGLE3",
                "speculative_draft_model_path": str(folder / "draft"),
                "speculative_num_steps": most,
            }
        self._engine = engine = DirectEngine(self.target, folder, proposer=proposer, **settings)
        simulated = SimulatedAcceptance(self._asked.rates, engine.vocab, engine.device)
        if draft is not None:
            engine.runner.forward.rule = simulated
        engine.fill_kv()

    def _context(self) -> int:
        """Room for the prompt, and for all steps that are run in a row."""
        return int(self._asked.input_len + (self._asked.warm_turns + self._asked.turns + 64) * (1 + _MANY))

    def fix(self, drafts: int) -> None:
        """From now on, always this number of drafts; 0: adaptive again, up to the number of rates."""
        queues, slots = self._now.queues, self._now.limits.num_slots
        most = drafts or len(self._asked.rates)
        reach = queues.drafter.reach if queues.drafter is not None else lambda count: 0
        queues.drafter = DeviceDrafter(most, slots, adaptive=not drafts, reach=reach)

    @property
    def _now(self) -> DirectEngine:
        assert self._engine is not None, "opened before"
        return self._engine

    def measure(self, rows: int) -> StepsMeasured:
        """Steps of `rows` requests, once the policy has chosen and their graphs are there."""
        asked, engine = self._asked, self._now
        for _ in range(2):
            self._begin(rows)
            for _ in range(4):
                engine.timed_turns(max(1, asked.warm_turns // 4))
                engine.settle_down()
            engine.drop_all()
        self._begin(rows)
        engine.timed_turns(4)
        before, began = self._said(), time.perf_counter()
        engine.timed_turns(asked.turns)
        after, seconds = self._said(), time.perf_counter() - began
        engine.drop_all()
        return StepsMeasured(1000 * seconds / asked.turns, (after - before) / (rows * asked.turns))

    def _begin(self, rows: int) -> None:
        engine, asked = self._now, self._asked
        prompts = [self._prompt(row) for row in range(rows)]
        for prompt in prompts:
            engine.pretend_cached(prompt)
        most = (asked.warm_turns + asked.turns + 32) * (1 + _MANY)
        engine.submit(prompts, SamplingParams(temperature=0.0, max_new_tokens=most, ignore_eos=True))
        while len(engine.queues.running) < rows:
            engine.turn()

    def _prompt(self, row: int) -> I64:
        """Whole pages and one token more."""
        size = self._now.limits.page_size
        length = max(1, self._asked.input_len // size) * size + 1
        drawn: I64 = np.random.default_rng(row).integers(3, self._now.vocab, length)
        return drawn

    def _said(self) -> int:
        """Tokens of all requests so far, as the device knows them."""
        return int(self._now.runner.forward.state.num_output[:-1].sum())


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--tiny", action="store_true", help="tiny shapes, on a GPU too")
    made.add_argument("--rates", type=float, nargs="+", default=[0.75, 0.65, 0.55], metavar="P",
                      help="how often a draft is right whose predecessors are (default: 0.75 0.65 0.55)")  # fmt: skip
    made.add_argument("--batch-size", type=int, nargs="+", default=[1, 16, 64], metavar="N")
    made.add_argument("--verify-rows", type=int, default=64, metavar="N", help="requests of the verifying steps")
    made.add_argument("--input-len", type=int, default=1024, metavar="N", help="cached prompt tokens (default: 1024)")
    made.add_argument("--turns", type=int, default=200, metavar="N", help="number of timed steps (default: 200)")
    made.add_argument(
        "--warm-turns", type=int, default=160, metavar="N", help="steps before the timed ones, twice (default: 160)"
    )
    made.add_argument("--markdown", action="store_true", help="print tables")
    return made


def main() -> None:
    options = parser().parse_args(sys.argv[1:])
    if not all(0 <= rate <= 1 for rate in options.rates) or not 1 <= len(options.rates) <= 8:
        raise ConfigError(what="--rates must be one to eight shares between 0 and 1", param="rates")
    if min(*options.batch_size, options.turns, options.verify_rows, options.input_len, options.warm_turns) < 1:
        raise ConfigError(what="sizes must be at least 1", why="nothing would be measured")
    began = time.perf_counter()
    found = run(Bench(options), options)
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(_tables(found) if options.markdown else json.dumps(found))


def run(bench: Bench, options: argparse.Namespace) -> Json:
    """All measurements; results are rounded."""
    sizes = sorted(set(options.batch_size))
    bench.open(None, 0)
    off = {rows: bench.measure(rows) for rows in sizes}
    plain = off.get(options.verify_rows) or bench.measure(options.verify_rows)
    steps: dict[str, tuple[StepsMeasured, StepsMeasured]] = {}
    vocab = min(_SMALL_VOCAB, int(bench.target["vocab_size"]) // 4)
    bench.open(head_config(bench.target, vocab), max(_MANY, len(options.rates)))
    bench.fix(0)
    on = {rows: bench.measure(rows) for rows in sizes}
    steps["reduced"] = _few_and_many(bench)
    bench.open(head_config(bench.target, None), _MANY)
    steps["full"] = _few_and_many(bench)
    medusa = {"medusa_num_heads": _MANY, "medusa_num_layers": 1, "vocab_size": bench.target["vocab_size"],
              "hidden_size": bench.target["hidden_size"]}  # fmt: skip
    bench.open(medusa, _MANY, FreeProposer())
    free = _few_and_many(bench)
    verified = {}
    for tokens in _VERIFY_GOALS:
        bench.fix(tokens - 1)
        verified[tokens] = bench.measure(options.verify_rows)
    verifying = free[1].ms - free[0].ms
    return {
        "device": torch.cuda.get_device_name() if bench.is_cuda else "cpu",
        "shapes": "llama-3.1-8b" if bench.target is LLAMA_8B else "tiny",
        "rates": options.rates,
        "input_len": options.input_len,
        "batches": [
            {
                "rows": rows,
                "off_tokens_per_s": round(rows * off[rows].tokens_per_s, 1),
                "on_tokens_per_s": round(rows * on[rows].tokens_per_s, 1),
                "ratio": round(on[rows].tokens_per_s / off[rows].tokens_per_s, 3),
                "off_step_ms": round(off[rows].ms, 3),
                "on_step_ms": round(on[rows].ms, 3),
                "tokens_per_step": round(on[rows].per_step, 3),
            }
            for rows in sizes
        ],
        "verify": [
            {
                "rows": options.verify_rows,
                "tokens": tokens,
                "ms": round(each.ms, 3),
                "plain_ms": round(plain.ms, 3),
                "ratio": round(each.ms / plain.ms, 3),
            }
            for tokens, each in verified.items()
        ],
        "draft_ms": {
            name: round((many.ms - few.ms - verifying) / (_MANY - _FEW), 4) for name, (few, many) in steps.items()
        },
        "draft_vocab": vocab,
    }


def _few_and_many(bench: Bench) -> tuple[StepsMeasured, StepsMeasured]:
    """Steps of one request with few and with many drafts."""
    found = []
    for drafts in (_FEW, _MANY):
        bench.fix(drafts)
        found.append(bench.measure(1))
    return found[0], found[1]


def _tables(found: Json) -> str:
    is_real = found["shapes"] != "tiny"
    rates = " / ".join(map(str, found["rates"]))
    lines = [
        f"{found['shapes']} shapes, dummy weights, {found['device']}; EAGLE-3 head with {found['draft_vocab']:,} tokens, "
        f"acceptance {rates}, {found['input_len']} tokens in the cache; {found['seconds']} s",
        "",
        "| batch | off, tok/s | on, tok/s | ratio | wanted | off, ms | on, ms | tokens per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found["batches"]:
        wanted = _GOALS.get(each["rows"], "") if is_real else ""
        lines.append(
            f"| {each['rows']} | {each['off_tokens_per_s']} | {each['on_tokens_per_s']} | {each['ratio']} | {wanted} | "
            f"{each['off_step_ms']} | {each['on_step_ms']} | {each['tokens_per_step']} |"
        )
    lines += ["", "| step | ms | plain, ms | ratio | wanted |", "|---|---|---|---|---|"]
    for each in found["verify"]:
        wanted = _VERIFY_GOALS[each["tokens"]] if is_real else ""
        lines.append(
            f"| verify {each['rows']} x {each['tokens']} | {each['ms']} | {each['plain_ms']} | {each['ratio']} | {wanted} |"
        )
    lines += ["", "| one draft, batch 1 | ms | wanted |", "|---|---|---|"]
    for (name, ms), wanted in zip(found["draft_ms"].items(), _DRAFT_GOALS_MS, strict=True):
        lines.append(f"| {name} vocabulary | {ms} | {wanted if is_real else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
