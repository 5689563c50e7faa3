"""The speed-up of speculative decoding on this device: tokens per second with a draft head of real cost and simulated
acceptance, compared with none.

    bough bench speculation                              # Llama-3.1-8B's shapes with dummy weights; tiny ones on a CPU
    bough bench speculation --rates 0.8 0.7 0.6 --batch-size 1 32 --markdown
    bough bench speculation --only batches               # parts: batches, verify, draft, numbers
    bough bench speculation --only numbers               # which number of drafts pays best, for several models

Weights are random, so no draft of theirs would be right: whether a draft counts is drawn instead, by `--rates` (of a draft
whose predecessors are right), on the device, at the place where tokens are drawn. Everything else is done as in a server:
an EAGLE-3 head of one layer drafts, the number of drafts follows what pays, graphs and overlap are on. "off" is the same
engine without drafts (*batches*). Then steps of fixed kinds are timed: those that verify drafts which cost nothing, beside a
plain one (*verify*), and what one more draft of the head takes, with a vocabulary of 32,000 tokens and with all (*draft*).
One engine serves all of that. *numbers*, which is made only if it is named, times steps of each fixed number of drafts for
several kinds of models and drafters, and says which number would yield most tokens per second with the given rates. Prompts
lie in the cache. Every measurement is printed as a line of JSON at once (with --markdown to stderr), and all of them at the
end.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
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
from bough.layers.batch import Batch
from bough.layers.decoder import Decoder
from bough.layers.draft_heads import Made, StateHead, TargetHead
from bough.runner.inputs import StepTensors
from bough.runner.proposing import Drafting, Proposer, Reads
from bough.scheduler.drafting import Drafter
from bough.speculative.device import DeviceDrafter
from bough.speculative.proposers.heads import HeadProposer

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
MOE: Final[Json] = {
    **_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 32768, "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""DeepSeek-V2-Lite's sizes in the form of DeepSeek-V3, with a layer that drafts."""
TINY_MOE: Final[Json] = {
    **MOE, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip
MIMO_7B: Final[Json] = {
    **_COMMON, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680,
    "max_position_embeddings": 32768, "rope_theta": 640000, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
"""A dense model that is published with a layer that drafts."""
TINY_MIMO: Final[Json] = {
    **MIMO_7B, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}  # fmt: skip
GLM_AIR: Final[Json] = {
    **_COMMON, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 20, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "vocab_size": 151552,
    "max_position_embeddings": 32768, "rope_theta": 1000000, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
"""GLM-4.5-Air with 20 of its 46 layers, which fit into 141 GB: its layer that drafts weighs 2.3 times as much beside a step
as in the whole model, so that the best number of drafts there is this one or a larger one."""
TINY_GLM: Final[Json] = {
    **GLM_AIR, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 512, "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip
SMALL_MODEL: Final[Json] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
"""What Llama-3.2-1B has otherwise than the model that it drafts for."""
PARTS: Final = ("batches", "verify", "draft", "numbers")
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


class WholeVocabulary:
    """A `StateHead` that drafts by the target's output head what another one would draft by its own."""

    target_ids_V: Tensor | None = None

    def __init__(self, head: StateHead, target: TargetHead) -> None:
        self._head, self._target = head, target
        self.num_layers, self.last_layer = head.num_layers, head.last_layer

    def features(self, states: list[Tensor]) -> Tensor:
        return self._head.features(states)

    def run(self, ids_T: Tensor, states_TD: Tensor, batch: Batch) -> Made:
        return self._head.run(ids_T, states_TD, batch)

    def logits(self, ready_RD: Tensor) -> Tensor:
        return self._target.logits(ready_RD)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what drafts for it, of which numbers of drafts are compared."""

    name: str
    algorithm: str
    target: Json
    draft: Json | None
    """None: the model brings it along."""


def cases(*, tiny: bool) -> list[Case]:
    dense, moe = (TINY, TINY_MOE) if tiny else (LLAMA_8B, MOE)
    mimo, glm = (TINY_MIMO, TINY_GLM) if tiny else (MIMO_7B, GLM_AIR)
    small = {**dense, "num_hidden_layers": 1} if tiny else {**dense, **SMALL_MODEL}
    vocab = min(_SMALL_VOCAB, int(dense["vocab_size"]) // 4)
    return [
        Case("moe", "NEXTN", moe, None),
        Case("nextn", "NEXTN", mimo, None),
        Case("nextn-moe", "NEXTN", glm, None),
        Case("standalone", "STANDALONE", dense, small),
        Case("dense", "EAGLE3", dense, head_config(dense, vocab)),
    ]


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
        self.most = max(_MANY, len(options.rates))
        """Drafts of a request."""
        self.target = LLAMA_8B if self.is_cuda and not options.tiny else TINY
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        self._engine: DirectEngine | None = None

    def open(
        self,
        draft: Json | None,
        most: int,
        proposer: Proposer | None = None,
        *,
        algorithm: str = "EAGLE3",
        target: Json | None = None,
    ) -> None:
        """An engine that makes up to `most` drafts of a request; the one before is gone. `draft`: None, if the target brings
        along what drafts."""
        self._engine = None
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        folder = self._folder / str(time.monotonic_ns())
        folder.mkdir()
        settings: Json = {"device": "cuda" if self.is_cuda else "cpu", "context_length": self._context()}
        settings |= {"max_running_requests": max(*self._asked.batch_size, self._asked.verify_rows)}
        settings["schedule_conservativeness"] = 0.0
        settings |= {"speculative_algorithm": algorithm, "speculative_num_steps": most}
        if self.is_cuda:
            settings["mem_fraction_static"] = 0.85
        else:
            settings |= {"dtype": "float32", "cpu_threads": 1}  # products are tiny
            settings |= {"max_total_tokens": 2 * settings["max_running_requests"] * self._context()}
        if draft is not None:
            (folder / "draft").mkdir()
            (folder / "draft" / "config.json").write_text(json.dumps(draft))
            settings["speculative_draft_model_path"] = str(folder / "draft")
        target = target or self.target
        if "n_routed_experts" in target:
            settings["dummy_routing"] = "uniform"
        self._engine = engine = DirectEngine(target, folder, proposer=proposer, **settings)
        engine.runner.forward.rule = SimulatedAcceptance(self._asked.rates, engine.vocab, engine.device)
        self._reach = engine.queues.drafter.reach if engine.queues.drafter is not None else lambda count: 0
        engine.fill_kv()

    def use(self, proposer: Proposer) -> None:
        """From now on it drafts, in place of what did so far."""
        runner = self._now.runner
        runner.clear()
        runner.forward.proposer = proposer
        if runner.graphs is not None:
            runner.graphs.forget()

    def _context(self) -> int:
        """Room for the prompt, and for all steps that are run in a row."""
        return int(self._asked.input_len + (self._asked.warm_turns + self._asked.turns + 64) * (1 + self.most))

    def fix(self, drafts: int) -> None:
        """From now on, always this number of drafts; 0: adaptive again, up to the number of rates."""
        most = drafts or len(self._asked.rates)
        slots = self._now.limits.num_slots
        self.drafter = DeviceDrafter(most, slots, adaptive=not drafts, reach=self._reach)

    @property
    def drafter(self) -> Drafter | None:
        return self._now.queues.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        """None: nothing is drafted."""
        self._now.queues.drafter = drafter

    @property
    def proposer(self) -> Proposer:
        found = self._now.runner.forward.proposer
        assert found is not None, "opened with one"
        return found

    def whole_vocabulary(self) -> Proposer:
        """What the engine's head would be without an output head of its own."""
        proposer, model = self.proposer, self._now.runner.forward.model
        assert isinstance(proposer, HeadProposer), "opened with a head"
        assert isinstance(model, Decoder), "it has an output head"
        return HeadProposer([WholeVocabulary(proposer.heads[0], model)], proposer.taps, self._now.vocab)

    @property
    def _now(self) -> DirectEngine:
        assert self._engine is not None, "opened before"
        return self._engine

    def measure(self, rows: int) -> StepsMeasured:
        """Steps of `rows` requests, once the policy has chosen and their graphs are there."""
        asked, engine = self._asked, self._now
        adapts = isinstance(self.drafter, DeviceDrafter) and self.drafter.adaptive
        for _ in range(2 if adapts else 1):
            self._begin(rows)
            for _ in range(4):
                engine.timed_turns(max(1, asked.warm_turns // (4 if adapts else 32)))
                engine.settle_down()
            engine.drop_all()
        self._begin(rows)
        engine.timed_turns(4)
        before, began = self._said(), time.perf_counter()
        engine.timed_turns(asked.turns)
        after, seconds = self._said(), time.perf_counter() - began
        self._check(len(engine.queues.running) == rows)
        engine.drop_all()
        return StepsMeasured(1000 * seconds / asked.turns, (after - before) / (rows * asked.turns))

    @staticmethod
    def _check(goes_on: object) -> None:
        if not goes_on:
            raise RuntimeError("requests have ended before their steps were timed: a step has failed")

    def _begin(self, rows: int) -> None:
        engine, asked = self._now, self._asked
        prompts = [self._prompt(row) for row in range(rows)]
        for prompt in prompts:
            engine.pretend_cached(prompt)
        most = (asked.warm_turns + asked.turns + 32) * (1 + self.most)
        engine.submit(prompts, SamplingParams(temperature=0.0, max_new_tokens=most, ignore_eos=True))
        while len(engine.queues.running) < rows:
            engine.turn()
            self._check(len(engine.queues.running) or not engine.queues.idle)

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
        "--warm-turns", type=int, default=160, metavar="N",
        help="steps before them, twice, where the number of drafts is not fixed; else an eighth (default: 160)",
    )  # fmt: skip
    made.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS[:3]), metavar="PART",
                      help=f"parts that are measured: {', '.join(PARTS)} (default: all but the last)")  # fmt: skip
    made.add_argument("--case", nargs="+", choices=[case.name for case in cases(tiny=True)], metavar="NAME",
                      help="of numbers: which models and drafters (default: all)")  # fmt: skip
    made.add_argument("--markdown", action="store_true", help="print tables")
    return made


def main() -> None:
    options = parser().parse_args(sys.argv[1:])
    if not all(0 <= rate <= 1 for rate in options.rates) or not 1 <= len(options.rates) <= 8:
        raise ConfigError(what="--rates must be one to eight shares between 0 and 1", param="rates")
    if min(*options.batch_size, options.turns, options.verify_rows, options.input_len, options.warm_turns) < 1:
        raise ConfigError(what="sizes must be at least 1", why="nothing would be measured")
    began = time.perf_counter()

    def tell(line: Json) -> None:
        line["after_s"] = round(time.perf_counter() - began, 1)
        print(json.dumps(line), file=sys.stderr if options.markdown else sys.stdout, flush=True)

    found = run(Bench(options), options, tell)
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(_tables(found) if options.markdown else json.dumps(found), flush=True)


Tell = Callable[[Json], None]


def run(bench: Bench, options: argparse.Namespace, tell: Tell = lambda line: None) -> Json:
    """The measurements that were asked for, those with goals first; results are rounded. Each is printed at once."""
    found: Json = {
        "device": torch.cuda.get_device_name() if bench.is_cuda else "cpu",
        "shapes": "llama-3.1-8b" if bench.target is LLAMA_8B else "tiny",
        "rates": options.rates,
        "input_len": options.input_len,
    }
    parts = set(options.only)
    if parts - {"numbers"}:
        found["draft_vocab"] = vocab = min(_SMALL_VOCAB, int(bench.target["vocab_size"]) // 4)
        bench.open(head_config(bench.target, vocab), bench.most)
        tell({"opened": "EAGLE3"})
    plain: dict[int, StepsMeasured] = {}
    if "batches" in parts:
        found["batches"] = _batches(bench, sorted(set(options.batch_size)), plain, tell)
    head = bench.proposer if parts - {"numbers"} else None
    free: tuple[StepsMeasured, StepsMeasured] | None = None
    if "verify" in parts:
        found["verify"] = _verify(bench, options.verify_rows, plain, tell)
    if "draft" in parts and head is not None:
        bench.use(FreeProposer())
        free = _few_and_many(bench)
        bench.use(head)
        found["draft_ms"] = {}
        for name in ("reduced", "full"):
            if name == "full":
                bench.use(bench.whole_vocabulary())
            few, many = _few_and_many(bench)
            found["draft_ms"][name] = round((many.ms - few.ms - (free[1].ms - free[0].ms)) / (_MANY - _FEW), 4)
            tell({"draft": name, "ms": found["draft_ms"][name]})
    if "numbers" in parts:
        found["numbers"] = _numbers(bench, options, tell)
    return found


def _batches(bench: Bench, sizes: list[int], plain: dict[int, StepsMeasured], tell: Tell) -> list[Json]:
    """Tokens per second with drafts as many as pay, beside none. Notes steps without drafts in `plain`."""
    bench.fix(0)
    adaptive, found = bench.drafter, []
    for rows in sizes:
        bench.drafter = None
        off = plain[rows] = bench.measure(rows)
        tell({"off": rows, "step_ms": round(off.ms, 3), "tokens_per_s": round(rows * off.tokens_per_s, 1)})
        bench.drafter = adaptive
        on = bench.measure(rows)
        found.append(
            {
                "rows": rows,
                "off_tokens_per_s": round(rows * off.tokens_per_s, 1),
                "on_tokens_per_s": round(rows * on.tokens_per_s, 1),
                "ratio": round(on.tokens_per_s / off.tokens_per_s, 3),
                "off_step_ms": round(off.ms, 3),
                "on_step_ms": round(on.ms, 3),
                "tokens_per_step": round(on.per_step, 3),
            }
        )
        tell(dict(found[-1]))
    return found


def _verify(bench: Bench, rows: int, plain: dict[int, StepsMeasured], tell: Tell) -> list[Json]:
    """Steps that verify drafts which cost nothing, beside plain ones."""
    if rows not in plain:
        bench.drafter = None
        plain[rows] = bench.measure(rows)
    bench.use(FreeProposer())
    found = []
    for tokens in _VERIFY_GOALS:
        bench.fix(tokens - 1)
        steps = bench.measure(rows)
        found.append(
            {
                "rows": rows,
                "tokens": tokens,
                "ms": round(steps.ms, 3),
                "plain_ms": round(plain[rows].ms, 3),
                "ratio": round(steps.ms / plain[rows].ms, 3),
            }
        )
        tell({"verify": dict(found[-1])})
    return found


def _numbers(bench: Bench, options: argparse.Namespace, tell: Tell) -> list[Json]:
    """For each case and batch size: what steps take by their number of drafts, and which number yields most."""
    found = []
    rates = np.array(options.rates)
    for case in cases(tiny=bench.target is TINY):
        if options.case is not None and case.name not in options.case:
            continue
        bench.open(case.draft, len(rates), algorithm=case.algorithm, target=case.target)
        tell({"opened": case.name})
        for rows in sorted(set(options.batch_size)):
            bench.drafter = None
            ms = [bench.measure(rows).ms]
            for drafts in range(1, 1 + len(rates)):
                bench.fix(drafts)
                ms.append(bench.measure(rows).ms)
            expected = np.concatenate(([1.0], 1.0 + np.cumsum(np.cumprod(rates))))
            gain = expected / np.array(ms) * ms[0]
            found.append(
                {
                    "case": case.name,
                    "algorithm": case.algorithm,
                    "rows": rows,
                    "ms": [round(each, 3) for each in ms],
                    "gain": [round(float(each), 3) for each in gain],
                    "best": int(gain.argmax()),
                }
            )
            tell({"numbers": dict(found[-1])})
    return found


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
    head = f"EAGLE-3 head with {found['draft_vocab']:,} tokens, " if "draft_vocab" in found else ""
    lines = [
        f"{found['shapes']} shapes, dummy weights, {found['device']}; {head}acceptance {rates}, {found['input_len']} tokens "
        f"in the cache; {found['seconds']} s",
    ]
    if "batches" in found:
        lines += ["", "| batch | off, tok/s | on, tok/s | ratio | wanted | off, ms | on, ms | tokens per step |"]
        lines.append("|---|---|---|---|---|---|---|---|")
    for each in found.get("batches", ()):
        wanted = _GOALS.get(each["rows"], "") if is_real else ""
        lines.append(
            f"| {each['rows']} | {each['off_tokens_per_s']} | {each['on_tokens_per_s']} | {each['ratio']} | {wanted} | "
            f"{each['off_step_ms']} | {each['on_step_ms']} | {each['tokens_per_step']} |"
        )
    if "verify" in found:
        lines += ["", "| step | ms | plain, ms | ratio | wanted |", "|---|---|---|---|---|"]
    for each in found.get("verify", ()):
        wanted = _VERIFY_GOALS[each["tokens"]] if is_real else ""
        lines.append(
            f"| verify {each['rows']} x {each['tokens']} | {each['ms']} | {each['plain_ms']} | {each['ratio']} | {wanted} |"
        )
    if "draft_ms" in found:
        lines += ["", "| one draft, batch 1 | ms | wanted |", "|---|---|---|"]
        for (name, ms), wanted in zip(found["draft_ms"].items(), _DRAFT_GOALS_MS, strict=True):
            lines.append(f"| {name} vocabulary | {ms} | {wanted if is_real else ''} |")
    if "numbers" in found:
        lines += ["", "| what drafts | batch | ms of a step with 0, 1, 2 ... drafts | beside none | best |"]
        lines.append("|---|---|---|---|---|")
    for each in found.get("numbers", ()):
        ms, gain = (" / ".join(map(str, each[name])) for name in ("ms", "gain"))
        lines.append(f"| {each['case']} ({each['algorithm']}) | {each['rows']} | {ms} | {gain} | {each['best']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
