"""The host's work per step, without the device, by phase.

    bough bench host --rows 64 256
    bough bench host --rows 64 --model MODEL --schema strings records --device-ms 5

With a MODEL, of which only the tokenizer and the sizes are read, rows follow a JSON schema (those of `bough bench
grammar`), beside rows that follow none. `--device-ms` gives the simulated device a time for each step, so that time per
token shows whether the host keeps up: everything it does for a step must fit into that time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable

import numpy as np
from msgspec import structs

from bough.bench.fake_runner import NullRunner
from bough.bench.paced_runner import PacedRunner
from bough.bench.schemas import SCHEMAS
from bough.cache.prefix import PrefixCache
from bough.config.command_line import CommandParser
from bough.config.concerns import SchedulerConfig
from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError
from bough.core.messages import Generate, ToDetokenizer, ToEngine, pack_ids
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.core.step import Runner, RunnerLimits, SpanCosts
from bough.engine.control import Hooks
from bough.engine.loop import Laps, Loop
from bough.grammar import Grammars, Settings, Vocabulary
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues
from bough.tokenizer import load_tokenizer

_VOCAB = 32000


class _Inbox:
    """Gives its messages once, then nothing."""

    def __init__(self, messages: list[ToEngine]) -> None:
        self.messages = messages
        self.closed = False

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.messages = self.messages, []
        return messages


class _Outbox:
    def __init__(self) -> None:
        self.count = 0

    def send(self, message: ToDetokenizer) -> None:
        self.count += 1


def measure(
    rows: int = 256,
    steps: int = 500,
    prompt_len: int = 128,
    *,
    shared_len: int = 0,
    page_size: int = 16,
    depth: int = 1,
    waiting: int = 0,
    vocab_size: int = _VOCAB,
    grammars: Grammars | None = None,
    schema: str = "",
    make_runner: Callable[[RunnerLimits], Runner] = NullRunner,
    around: Callable[[Callable[[], None]], None] | None = None,
) -> dict[str, float]:
    """Decodes `rows` requests for `steps` steps on a runner that costs nothing, or on the one that is made.

    Returns microseconds a step: `step_us` in all (median), `step_p99_us`, and the mean of each phase. `shared_len`
    tokens of every prompt are the same; `waiting` more requests find no slot. Rows follow the JSON `schema`, if there
    is one. `around` is called with each iteration of the loop, which it must run.
    """
    new_tokens = 8 * steps + 63
    sampling = SamplingParams(
        max_new_tokens=new_tokens,
        ignore_eos=True,
        grammar=GrammarSpec(kind="json_schema", source=schema) if schema else None,
    )
    asks = _asks(rows + waiting, prompt_len, shared_len, vocab_size, sampling)
    runner_limits = _runner_limits(rows, prompt_len + new_tokens + 1, page_size, vocab_size)
    limits = Limits.of(runner_limits, SchedulerConfig(tpot_target_ms=0.0, schedule_conservativeness=0.0))
    queues = Queues(limits, grammars)
    loop = Loop(
        runner=make_runner(runner_limits),
        queues=queues,
        cache=PrefixCache(num_pages=runner_limits.num_pages, page_size=page_size),
        limits=limits,
        inbox=_Inbox(asks),
        outbox=_Outbox(),
        depth=depth,
        hooks=Hooks(),
    )
    while len(queues.running) < rows:
        loop.turn()
    for _ in range(8):
        loop.turn()
    loop.laps = Laps()
    settled_tokens = queues.counters.output_tokens
    taken = []
    turn = loop.turn if around is None else lambda: around(loop.turn)
    for _ in range(steps):
        began = time.perf_counter()
        turn()
        taken.append(time.perf_counter() - began)
    if len(queues.running) != rows:
        raise RuntimeError(f"{len(queues.running)} of {rows} rows are left")
    settled_tokens = queues.counters.output_tokens - settled_tokens
    phases = {f"{name}_us": 1e6 * value / steps for name, value in structs.asdict(loop.laps).items()}
    return {
        "rows": rows,
        "steps": steps,
        "step_us": 1e6 * float(np.median(taken)),
        "step_p99_us": 1e6 * float(np.percentile(taken, 99)),
        "token_us": 1e6 * sum(taken) * rows / settled_tokens,
        **phases,
        "host_us": sum(phases.values()) - phases["wait_us"],
    }


def _asks(count: int, prompt_len: int, shared_len: int, vocab_size: int, sampling: SamplingParams) -> list[ToEngine]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab_size, shared_len)
    return [
        Generate(
            id=i,
            rid=str(i),
            prompt=pack_ids(np.concatenate([shared, rng.integers(0, vocab_size, prompt_len - shared_len)])),
            sampling=sampling,
        )
        for i in range(count)
    ]


def _runner_limits(rows: int, context: int, page_size: int, vocab_size: int) -> RunnerLimits:
    per_slot = -(-context // page_size)
    return RunnerLimits(
        num_slots=rows,
        num_pages=rows * per_slot + 2,
        page_size=page_size,
        pages_per_slot=per_slot,
        context_length=context,
        max_step_tokens=max(8192, 2 * rows),
        vocab_size=vocab_size,
        spans=SpanCosts(),
    )


def measure_paced(
    rows: int,
    steps: int,
    *,
    device_ms: float,
    queueing_us: float,
    grammars: Grammars,
    vocab_size: int,
    schema: str,
    profile: cProfile.Profile | None = None,
) -> dict[str, float]:
    """`measure` with a simulated device: how long it was idle per step (`idle_us`), and the time from the arrival of
    tokens to the queueing of the sampling with the masks that depend on them (`chain_us`)."""
    made: list[PacedRunner] = []

    def make_runner(limits: RunnerLimits) -> Runner:
        made.append(PacedRunner(limits, forward_s=1e-3 * device_ms, queueing_s=1e-6 * queueing_us))
        return made[0]

    started: list[tuple[float, float]] = []

    def around(turn: Callable[[], None]) -> None:
        if not started:
            started.append((made[0].idle_s, made[0].chain_s))
        if profile is None:
            turn()
        else:
            profile.runcall(turn)

    facts = measure(
        rows,
        steps,
        vocab_size=vocab_size,
        grammars=grammars,
        schema=schema,
        make_runner=make_runner,
        around=around,
    )
    facts["idle_us"] = 1e6 * (made[0].idle_s - started[0][0]) / steps
    facts["chain_us"] = 1e6 * (made[0].chain_s - started[0][1]) / steps
    return facts


def main() -> None:
    parser = CommandParser(
        prog="bough bench host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--shared-len", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--waiting", type=int, default=0)
    grammar = parser.add_argument_group("rows under a grammar")
    grammar.add_argument("--model", default="", help="whose vocabulary is used (a directory with a tokenizer will do)")
    grammar.add_argument("--schema", nargs="+", choices=list(SCHEMAS), default=list(SCHEMAS))
    grammar.add_argument("--grammar-backend", default="auto", choices=["auto", "xgrammar", "llguidance"])
    grammar.add_argument("--device-ms", type=float, default=5.0, help="the device's time for a step (default: 5)")
    grammar.add_argument(
        "--queueing-us",
        type=float,
        default=150.0,
        help="the host's time to queue a launch or a sampling (default: 150)",
    )
    grammar.add_argument("--profile", action="store_true", help="print where the host's time goes, by function")
    options = parser.parse_args()
    if options.model:
        _main_grammar(options)
        return
    for rows in options.rows:
        numbers = measure(
            rows,
            options.steps,
            options.prompt_len,
            shared_len=options.shared_len,
            page_size=options.page_size,
            waiting=options.waiting,
        )
        print(json.dumps({name: round(value, 1) for name, value in numbers.items()}))


def _main_grammar(options: argparse.Namespace) -> None:
    if options.device_ms < 0 or options.queueing_us < 0:
        raise ConfigError(what="times must not be negative", why="no device takes less than no time")
    checkpoint = open_checkpoint(options.model, load_format="dummy")
    vocab_size = checkpoint.vocab
    grammars = Grammars(
        Settings(backend=options.grammar_backend),
        lambda: Vocabulary(load_tokenizer(checkpoint), vocab_size, checkpoint.eos_ids),
    )
    try:
        for rows in options.rows:
            for name in ("none", *options.schema):
                profile = cProfile.Profile() if options.profile else None
                facts = measure_paced(
                    rows,
                    options.steps,
                    device_ms=options.device_ms,
                    queueing_us=options.queueing_us,
                    grammars=grammars,
                    vocab_size=vocab_size,
                    schema=SCHEMAS.get(name, ""),
                    profile=profile,
                )
                print(json.dumps({"schema": name, **{key: round(value, 1) for key, value in facts.items()}}))
                if profile is not None:
                    pstats.Stats(profile).sort_stats("tottime").print_stats(32)
    finally:
        grammars.close()


if __name__ == "__main__":
    main()
