"""Simulates fleets of 8 to 512 H200s, and writes benchmarks/fleet.svg and the tables of benchmarks/fleet.md.

python benchmarks/fleet.py            # about 15 minutes on one core
python benchmarks/fleet.py errors     # only the table of errors on one GPU
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bough.bench.fleet import Fleet, FleetResult
from bough.bench.fleet_plot import draw
from bough.bench.fleet_trace import made_up
from bough.config.layout import Layout
from bough.config.model_facts import ModelFacts
from bough.config.spreads import Spread
from bough.config.step_cost import FITTED, HARDWARE, Constants, FleetModel, StepLoad
from bough.models.registry import facts_of

HERE = Path(__file__).parent
H200 = HARDWARE["h200"]
PER_RANK = 16
"""Requests per GPU, of about 1,000 prompt tokens and 150 generated ones; of each prompt 256 are shared by one in eight."""

SHAPES = {
    "llama-3.1-8b": (2.0, ["replicas of one GPU"]),
    "llama-3.1-70b": (2.0, ["tp 8, replicas", "tp 4, replicas", "tp 8, stages on two machines, replicas"]),
    "deepseek-v3": (
        1.0,
        ["tp 8, replicas", "experts over all ranks, attention per rank", "tp 8, two stages, replicas"],
    ),
}


def spread_of(way: str, ranks: int) -> Spread | None:
    """None: it needs more GPUs."""
    layout = {
        "replicas of one GPU": Layout(),
        "tp 8, replicas": Layout(tp=8),
        "tp 4, replicas": Layout(tp=4),
        "tp 8, stages on two machines, replicas": Layout(tp=8, pp=2),
        "tp 8, two stages, replicas": Layout(tp=8, pp=2),
        "experts over all ranks, attention per rank": Layout(
            tp=min(ranks, 128), dp=min(ranks, 128), ep=min(ranks, 128), whole_shared=True
        ),
    }[way]
    return Spread(layout, ranks // layout.size) if ranks >= layout.size else None


@cache
def facts(name: str) -> ModelFacts:
    return facts_of(json.loads((HERE / "models" / name / "config.json").read_text()))


def run(name: str, spread: Spread, weight_bytes: float) -> FleetResult:
    arrivals = made_up(
        PER_RANK * spread.ranks, rate=float("inf"), prompt_tokens=1000, new_tokens=150, shared_tokens=256, groups=8
    )
    longest = max(len(each.prompt) + each.new_tokens for each in arrivals) + 1
    return Fleet(FleetModel(facts(name), spread.layout, H200, weight_bytes), spread.replicas, longest).run(arrivals)


def curves(most: int) -> Iterator[tuple[str, str, Spread, FleetResult]]:
    for name, (weight_bytes, ways) in SHAPES.items():
        for way in ways:
            ranks = 8
            while ranks <= most:
                spread = spread_of(way, ranks)
                if spread is not None:
                    result = run(name, spread, weight_bytes)
                    print(name, way, ranks, f"{result.output_tokens_s:,.0f} tokens/s", file=sys.stderr, flush=True)
                    yield name, way, spread, result
                ranks *= 8


PARTS = {
    "fitted": "fitted",
    "held back": "not fitted; chosen by a hash of their names",
    "drawn": "not fitted; drawn at random in another measurement (`h200/roofline.txt`)",
}


@cache
def measured() -> list[dict[str, Any]]:
    """Rows of `h200/step_times.json`."""
    rows: list[dict[str, Any]] = json.loads((HERE / "h200" / "step_times.json").read_text())["rows"]
    return rows


def predicted_ms(row: dict[str, Any], constants: Constants = FITTED) -> float:
    """What the model of step times says to a measured row."""
    model = FleetModel(facts(row["model"]), Layout(), H200, constants=constants)
    count, length = row["rows"], row["tokens"]
    if row["kind"] == "decode":
        loads = [StepLoad.of([1] * count, [length + row["generated"] // 2] * count, count)]
    else:
        loads = list(prefill(count, length))
    return 1e3 * sum(model.cost([load]).stage_s for load in loads)


def errors() -> str:
    """The table of predictions for one GPU."""
    lines = ["| model | workload | measured, ms | predicted | error | |", "|---|---|---|---|---|---|"]
    found: dict[str, list[float]] = {}
    for row in measured():
        predicted = predicted_ms(row)
        error = predicted / row["ms"] - 1
        found.setdefault(row["part"], []).append(abs(error))
        lines.append(
            f"| {row['model']} | {row['kind']} {row['rows']} x {row['tokens']:,} | {row['ms']:,} | {predicted:,.2f} "
            f"| {error:+.1%} | {row['part']} |"
        )
    lines += ["", "| rows | | median error | largest |", "|---|---|---|---|"]
    for part, meaning in PARTS.items():
        each = found[part]
        lines.append(f"| {len(each)} {part} | {meaning} | {statistics.median(each):.1%} | {max(each):.1%} |")
    return "\n".join(lines)


def prefill(count: int, length: int, chunk: int = 16384) -> Iterator[StepLoad]:
    """Steps of `chunk` tokens, prompt after prompt."""
    step: list[tuple[int, int]] = []
    for _ in range(count):
        done = 0
        while done < length:
            query = min(chunk - sum(each for each, _ in step), length - done)
            step.append((query, done))
            done += query
            if sum(each for each, _ in step) == chunk:
                yield StepLoad.of([q for q, _ in step], [c for _, c in step], len(step))
                step = []
    if step:
        yield StepLoad.of([q for q, _ in step], [c for _, c in step], len(step))


def main() -> None:
    page = HERE / "fleet.md"
    above, below = page.read_text().split("<!-- tables -->")
    if sys.argv[1:] == ["errors"]:
        curves_below = below.split("## Curves")[1]
        page.write_text(f"{above}<!-- tables -->\n\n## One GPU: error\n\n{errors()}\n\n## Curves{curves_below}")
        return
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    head = "| model | spread | GPUs | output tokens/s | per GPU | TTFT p50, s | TPOT p50, ms | busy |"
    lines = [head, "|---" * 8 + "|"]
    plotted: dict[str, list[tuple[float, float]]] = {}
    for name, way, spread, result in curves(most):
        plotted.setdefault(f"{name}: {way}", []).append((spread.ranks, result.output_tokens_s))
        lines.append(
            f"| {name} | {way} (`{spread.flags}`) | {spread.ranks} | {result.output_tokens_s:,.0f} "
            f"| {result.output_tokens_s_per_rank:,.0f} | {result.ttft_ms['p50'] / 1e3:.1f} | {result.tpot_ms['p50']:.1f} "
            f"| {result.busy_share:.0%} |"
        )
    (HERE / "fleet.svg").write_text(draw("Simulated H200s, all requests at once", "GPUs", "output tokens/s", plotted))
    page.write_text(
        f"{above}<!-- tables -->\n\n## One GPU: error\n\n{errors()}\n\n## Curves\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
