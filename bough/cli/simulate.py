"""`bough simulate MODEL`: simulates how a fleet of GPUs serves traffic, with the real scheduler and a cost model of the
GPUs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from bough.config.command_line import CommandParser
from bough.config.concerns import LoadBalance
from bough.config.layout import Layout
from bough.config.spreads import Spread, spreads
from bough.config.step_cost import HARDWARE, FleetModel
from bough.core.errors import ConfigError

if TYPE_CHECKING:
    from bough.bench.fleet import FleetResult
    from bough.bench.fleet_trace import Arrival
    from bough.config.model_facts import ModelFacts

MOST_REQUESTS = 100_000
MOST_RANKS = 4096


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough simulate",
        description="Simulates engines that serve MODEL (a directory with a config.json) on GPUs: the real scheduler, "
        "prefix cache and load balancing, with step times from a cost model of the hardware. It was never compared with "
        "measurements on several GPUs; benchmarks/fleet.md has the error on one.",
        usage="bough simulate MODEL [--gpu h200] [--tp-size 8 ... | --sweep RANKS] [--rate R | --trace FILE]",
        allow_abbrev=False,
    )
    made.add_argument("model", metavar="MODEL", help="a directory with a config.json, or that file")
    made.add_argument("--gpu", choices=list(HARDWARE), default="h200", help="kind of GPU of all ranks (default: h200)")
    for name, what in (
        ("tp", "ranks that split each layer"),
        ("pp", "pipeline stages"),
        ("ep", "groups of ranks that hold different experts"),
        ("dp", "replicas of the engine"),
        ("attn-dp", "replicas of attention"),
        ("attn-cp", "groups that share the KV cache of sequences"),
    ):
        made.add_argument(f"--{name}-size", type=int, default=1, help=f"{what} (default: 1)")
    made.add_argument("--alltoall", action="store_true", help="send tokens only to the ranks of their experts")
    made.add_argument(
        "--sweep", type=int, default=0, metavar="RANKS", help="compare all configurations for this number of GPUs"
    )
    made.add_argument("--fp8", action="store_true", help="weights in FP8")
    made.add_argument("--load-balance-method", choices=get_args(LoadBalance), default="prefix")
    made.add_argument("--rate", type=float, default=math.inf, help="requests per second (default: all at once)")
    made.add_argument("--requests", type=int, default=512, help="number of requests (default: 512)")
    made.add_argument("--prompt-tokens", type=int, default=1000, help="median length (default: 1000)")
    made.add_argument("--output-tokens", type=int, default=200, help="median length (default: 200)")
    made.add_argument(
        "--shared-tokens",
        type=int,
        default=0,
        help="tokens of each prompt that are one of eight shared prefixes (default: 0)",
    )
    made.add_argument("--trace", type=Path, help="file with one request per line, as JSON; also Mooncake's traces")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true", help="print results as JSON")
    return made


def run(argv: Sequence[str]) -> int:
    options = parser().parse_args(list(argv))
    _check(options)
    facts = read_facts(Path(options.model))
    arrivals = _traffic(options)
    found: list[tuple[Spread, FleetResult]] = []
    left_out: list[tuple[Spread, ConfigError]] = []
    for spread in _asked(options, facts):
        try:
            found.append((spread, simulate(facts, spread, options, arrivals)))
        except ConfigError as error:
            if not options.sweep:
                raise
            left_out.append((spread, error))
    if not found:
        raise (
            left_out[0][1]
            if left_out
            else ConfigError(
                what=f"there is no way to spread the model over {options.sweep} GPUs", fix="choose another number"
            )
        )
    found.sort(key=lambda pair: -pair[1].output_tokens_s)
    if options.json:
        print(json.dumps([{"flags": spread.flags, **asdict(result)} for spread, result in found], indent=1))
        return 0
    print(table(found))
    for spread, refusal in left_out:
        print(f"left out: {spread.flags}: {refusal.what}")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name, most in (("requests", MOST_REQUESTS), ("prompt_tokens", 1 << 20), ("output_tokens", 1 << 20)):
        if not 1 <= getattr(options, name) <= most:
            raise ConfigError(
                what=f"--{name.replace('_', '-')} is {getattr(options, name)}", fix=f"choose 1 to {most:,}"
            )
    sizes = [
        options.tp_size,
        options.pp_size,
        options.ep_size,
        options.dp_size,
        options.attn_dp_size,
        options.attn_cp_size,
    ]
    if min(sizes) < 1 or max(*sizes, options.sweep) > MOST_RANKS or options.sweep < 0:
        raise ConfigError(what="a size is out of range", fix=f"choose sizes from 1 to {MOST_RANKS}")
    if options.sweep and max(sizes) > 1:
        raise ConfigError(what="--sweep tries all sizes", why="a size was given, too", fix="leave one of them out")
    if not options.rate > 0:
        raise ConfigError(what=f"--rate is {options.rate:g}", fix="choose a rate above 0")
    if not 0 <= options.shared_tokens < options.prompt_tokens:
        raise ConfigError(what="--shared-tokens must be less than --prompt-tokens", fix="choose fewer")


def read_facts(path: Path) -> ModelFacts:
    """The model facts of a config.json. Raises ConfigError."""
    from bough.models.registry import facts_of

    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            what=f"can't read {file}", why=str(error), fix="give a directory with a config.json"
        ) from error
    return facts_of(config)


def _traffic(options: argparse.Namespace) -> list[Arrival]:
    from bough.bench.fleet_trace import made_up, read_trace

    if options.trace is not None:
        return read_trace(options.trace, options.requests)
    return made_up(
        options.requests,
        rate=options.rate,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.output_tokens,
        shared_tokens=options.shared_tokens,
        seed=options.seed,
    )


def _asked(options: argparse.Namespace, facts: ModelFacts) -> list[Spread]:
    if options.sweep:
        return spreads(facts, options.sweep, HARDWARE[options.gpu].per_machine)
    layout = Layout(
        tp=options.tp_size,
        pp=options.pp_size,
        ep=options.ep_size,
        dp=options.attn_dp_size,
        cp=options.attn_cp_size,
        whole_shared=options.alltoall,
    )
    if layout.pp > 1 and layout.dp * layout.cp > 1:
        raise ConfigError(
            what="stages can't be combined with --attn-dp-size or --attn-cp-size", fix="leave one of them out"
        )
    return [Spread(layout, options.dp_size)]


def simulate(
    facts: ModelFacts, spread: Spread, options: argparse.Namespace, arrivals: Sequence[Arrival]
) -> FleetResult:
    """Raises ConfigError if the model does not fit, or a request."""
    from bough.bench.fleet import Fleet

    model = FleetModel(facts, spread.layout, HARDWARE[options.gpu], weight_bytes=1.0 if options.fp8 else 2.0)
    longest = max(len(each.prompt) + each.new_tokens for each in arrivals) + 1
    if longest > min(facts.max_context, model.room_tokens):
        raise ConfigError(
            what=f"a request has {longest:,} tokens",
            why=f"the model's context is {facts.max_context:,}, and KV of {model.room_tokens:,} tokens fits",
            fix="simulate shorter requests, or more ranks for each engine",
        )
    return Fleet(model, spread.replicas, longest, options.load_balance_method).run(arrivals)


def table(found: Sequence[tuple[Spread, FleetResult]]) -> str:
    """Results as text, one parallel configuration per line."""
    width = max(len(spread.flags) for spread, _ in found)
    head = "output tok/s  per GPU  TTFT p50/p99 ms  TPOT p50/p99 ms  cached  busy  KV tokens"
    lines = [f"{'':<{width}}  GPUs  {head}"]
    for spread, result in found:
        ttft = f"{result.ttft_ms['p50']:,.0f} / {result.ttft_ms['p99']:,.0f}"
        tpot = f"{result.tpot_ms['p50']:.1f} / {result.tpot_ms['p99']:.1f}"
        lines.append(
            f"{spread.flags:<{width}}  {result.ranks:>4}  {result.output_tokens_s:>12,.0f}  "
            f"{result.output_tokens_s_per_rank:>7,.0f}  {ttft:>15}  {tpot:>15}  {result.cached_share:>5.0%}  "
            f"{result.busy_share:>4.0%}  {result.room_tokens:>9,}"
        )
        if result.failed:
            lines.append(f"  {result.failed} of {result.requests} requests failed")
    return "\n".join(lines)
