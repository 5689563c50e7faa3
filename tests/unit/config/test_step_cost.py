"""The model of step times: sums by hand, what more ranks change, and its error on measurements it was not fitted to."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from bough.config.layout import Layout
from bough.config.model_facts import ModelFacts
from bough.config.spreads import Spread, spreads
from bough.config.step_cost import FITTED, HARDWARE, FleetModel, StepLoad
from bough.core.errors import ConfigError
from bough.models.registry import facts_of

ROOT = Path(__file__).parents[3]
H200 = HARDWARE["h200"]
MEASURED = json.loads((ROOT / "benchmarks/h200/step_times.json").read_text())


def facts(name: str) -> ModelFacts:
    return facts_of(json.loads((ROOT / "benchmarks/models" / name / "config.json").read_text()))


LLAMA, LARGE, DEEPSEEK = facts("llama-3.1-8b"), facts("llama-3.1-70b"), facts("deepseek-v3")


def prefill(count: int, length: int, chunk: int = 16384) -> list[StepLoad]:
    """Steps of `chunk` tokens, prompt after prompt."""
    steps: list[list[tuple[int, int]]] = [[]]
    for _ in range(count):
        done = 0
        while done < length:
            room = chunk - sum(query for query, _ in steps[-1])
            if not room:
                steps.append([])
                continue
            query = min(room, length - done)
            steps[-1].append((query, done))
            done += query
    return [StepLoad.of([q for q, _ in step], [c for _, c in step], len(step)) for step in steps]


def predicted_ms(row: dict[str, object]) -> float:
    model = FleetModel(facts(str(row["model"])), Layout(), H200)
    count, length = int(str(row["rows"])), int(str(row["tokens"]))
    if row["kind"] == "decode":
        context = length + int(str(row["generated"])) // 2
        return 1e3 * model.cost([StepLoad.of([1] * count, [context] * count, count)]).stage_s
    return 1e3 * sum(model.cost([step]).stage_s for step in prefill(count, length))


def errors(part: str) -> list[float]:
    return [abs(predicted_ms(row) / row["ms"] - 1) for row in MEASURED["rows"] if row["part"] == part]


@pytest.mark.parametrize(
    ("part", "rows", "median", "most"),
    [("fitted", 11, 0.02, 0.08), ("held back", 17, 0.06, 0.46), ("drawn", 9, 0.18, 0.53)],
)
def test_the_error_on_one_gpu(part: str, rows: int, median: float, most: float) -> None:
    """As benchmarks/fleet.md says."""
    found = errors(part)
    assert len(found) == rows
    assert statistics.median(found) <= median
    assert max(found) <= most


def test_a_small_step_reads_its_weights() -> None:
    load = StepLoad.of([1], [100], 1)
    read = (LLAMA.num_parameters() - LLAMA.vocab * LLAMA.hidden) * 2 / (H200.read_bytes_s * FITTED.read_share)
    besides = 32 * FITTED.layer_s + FITTED.step_s + FITTED.row_s
    assert FleetModel(LLAMA, Layout(), H200).cost([load]).stage_s == pytest.approx(read + besides, rel=0.01)


def test_more_ranks_are_faster_and_not_for_nothing() -> None:
    load = StepLoad.of([1] * 16, [500] * 16, 16)
    times = [FleetModel(LARGE, Layout(tp=tp), H200).cost([load]).stage_s for tp in (2, 4, 8)]
    assert times[0] > times[1] > times[2] > times[0] / 4, "collectives cost"
    across = FleetModel(LARGE, Layout(tp=16), H200).cost([load]).stage_s
    assert across > times[2], "a machine's border costs more than it gains"
    staged = FleetModel(LARGE, Layout(tp=4, pp=2), H200).cost([load])
    assert staged.stage_s == pytest.approx(times[1] / 2, rel=0.1)
    assert staged.hop_s > 0


def test_room_is_what_weights_leave() -> None:
    with pytest.raises(ConfigError, match="leave no room"):
        _ = FleetModel(LARGE, Layout(), H200).room_tokens
    one, two = (FleetModel(LARGE, Layout(tp=tp), H200).room_tokens for tp in (2, 4))
    assert two > 3 * one, "half the weights, and half the KV of a token"
    replicated = FleetModel(DEEPSEEK, Layout(tp=8), H200, weight_bytes=1.0).room_tokens
    shared = FleetModel(DEEPSEEK, Layout(tp=8, cp=8), H200, weight_bytes=1.0).room_tokens
    assert shared > 4 * replicated, "latents are whole on each rank, unless ranks share the context"


def test_spreads_are_possible_ones() -> None:
    found = spreads(LARGE, 16, 8)
    assert {each.ranks for each in found} == {16}
    assert all(each.layout.tp <= 8 and each.layout.ep == 1 for each in found)
    assert Spread(Layout(tp=8, pp=2)) in found
    assert all(each.layout.pp <= 61 for each in spreads(DEEPSEEK, 64, 8))
    flags = {each.flags for each in spreads(DEEPSEEK, 16, 8)}
    assert "--tp-size 16 --attn-dp-size 16 --ep-size 16 --moe-a2a-backend alltoall" in flags
    assert len(flags) == len(spreads(DEEPSEEK, 16, 8))
