"""Simulated fleets: times that can be added up by hand, every request ends with what it asked for, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bough.bench.fleet import Fleet
from bough.bench.fleet_plot import draw
from bough.bench.fleet_trace import Arrival, made_up, read_trace
from bough.cli import simulate
from bough.config.layout import Layout
from bough.config.step_cost import HARDWARE, FleetModel, StepLoad
from bough.core.errors import ConfigError
from bough.models.registry import facts_of

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "benchmarks" / "models"
H200 = HARDWARE["h200"]


def fleet(model: str, layout: Layout, engines: int = 1, weight_bytes: float = 2.0) -> Fleet:
    facts = facts_of(json.loads((MODELS / model / "config.json").read_text()))
    return Fleet(FleetModel(facts, layout, H200, weight_bytes), engines, context=4096)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_lone_request_takes_its_steps(stages: int) -> None:
    made = fleet("llama-3.1-8b", Layout(pp=stages))
    result = made.run([Arrival(5.0, np.arange(1000, dtype=np.int32), 3)])
    model = made.model
    steps = [model.cost([StepLoad.of([q], [c], 1)]) for q, c in ((1000, 0), (1, 1000), (1, 1001))]
    through = [1e3 * (stages * each.stage_s + (stages - 1) * each.hop_s) for each in steps]
    assert result.ttft_ms["p50"] == pytest.approx(through[0])
    assert result.tpot_ms["p50"] == pytest.approx((through[1] + through[2]) / 2)
    assert result.seconds == pytest.approx(sum(through) / 1e3)


@pytest.mark.parametrize(
    ("model", "layout", "engines"),
    [
        ("llama-3.1-70b", Layout(tp=4), 2),
        ("llama-3.1-70b", Layout(tp=2, pp=2), 1),
        ("deepseek-v3", Layout(tp=8, dp=8, ep=8, whole_shared=True), 2),
    ],
)
def test_every_request_ends_with_what_it_asked_for(model: str, layout: Layout, engines: int) -> None:
    arrivals = made_up(60, rate=20.0, prompt_tokens=600, new_tokens=20, shared_tokens=256, groups=4)
    result = fleet(model, layout, engines, weight_bytes=1.0).run(arrivals)
    assert (result.requests, result.failed) == (60, 0)
    assert result.output_tokens_s * result.seconds == pytest.approx(sum(each.new_tokens for each in arrivals))
    assert result.ranks == layout.size * engines
    assert 0.1 < result.cached_share < 0.5, "prefixes are found again"
    assert 0 < result.busy_share <= 1
    assert result.ttft_ms["p99"] >= result.ttft_ms["p50"] > 0


def test_engines_and_stages_add_up() -> None:
    """Two engines do twice as much; so do two stages, since each takes half as long."""
    arrivals = made_up(48, rate=float("inf"), prompt_tokens=50, new_tokens=200, spread=0.05)
    one = fleet("llama-3.1-8b", Layout()).run(arrivals[:24]).output_tokens_s
    assert fleet("llama-3.1-8b", Layout(), 2).run(arrivals).output_tokens_s == pytest.approx(2 * one, rel=0.15)
    assert fleet("llama-3.1-8b", Layout(pp=2)).run(arrivals).output_tokens_s == pytest.approx(2 * one, rel=0.15)


def test_traces(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    lines = [
        {"at_s": 2.0, "prompt_tokens": 10, "output_tokens": 4},
        {"at_s": 0.5, "prompt_tokens": 90, "output_tokens": 7, "prefix": "a", "prefix_tokens": 64},
        {"at_s": 1.0, "prompt_tokens": 80, "output_tokens": 7, "prefix": "a", "prefix_tokens": 64},
    ]
    own.write_text("\n".join(map(json.dumps, lines)))
    read = read_trace(own)
    assert [(each.at_s, len(each.prompt), each.new_tokens) for each in read] == [
        (0.5, 90, 7),
        (1.0, 80, 7),
        (2.0, 10, 4),
    ]
    assert (read[0].prompt[:64] == read[1].prompt[:64]).all()
    assert not (read[0].prompt[64:80] == read[1].prompt[64:80]).all()
    assert len(read_trace(own, most=1)) == 1
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(json.dumps({"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [3, 4]}))
    assert [(each.at_s, len(each.prompt)) for each in read_trace(mooncake)] == [(1.5, 700)]
    for text in ("{}", "nonsense", '{"at_s": 0, "prompt_tokens": 3, "prefix_tokens": 9, "output_tokens": 1}'):
        own.write_text(text)
        with pytest.raises(ConfigError, match="line 1"):
            read_trace(own)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--requests", "12", "--output-tokens", "8", "--prompt-tokens", "100"]
    assert simulate.run([str(MODELS / "llama-3.1-70b"), "--sweep", "4", "--json", *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"--tp-size 4", "--tp-size 2 --pp-size 2"} <= {each["flags"] for each in found}
    speeds = [each["output_tokens_s"] for each in found]
    assert speeds == sorted(speeds, reverse=True)
    assert simulate.run([str(MODELS / "llama-3.1-8b"), "--gpu", "l40s", *small]) == 0
    assert "--tp-size 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["llama-3.1-70b"], "leave no room"),
        (["llama-3.1-8b", "--rate", "0"], "--rate is 0"),
        (["llama-3.1-8b", "--tp-size", "3", "--attn-dp-size", "2"], "can't be cut"),
        (["llama-3.1-8b", "--tp-size", "2", "--sweep", "8"], "--sweep tries all sizes"),
        (["llama-3.1-8b", "--requests", "0"], "--requests is 0"),
        (["llama-3.1-8b", "--prompt-tokens", "200000", "--requests", "1"], "a request has"),
        (["no-such-model"], "can't read"),
    ],
)
def test_refusals(flags: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        simulate.run([str(MODELS / flags[0]), *flags[1:]])


def test_a_plot_is_xml() -> None:
    from xml.etree import ElementTree

    drawn = draw("a < b", "GPUs", "tokens/s", {"tp": [(8, 100.0), (16, 190.0)], "pp": [(8, 80.0)]})
    tree = ElementTree.fromstring(drawn)
    assert len(tree.findall("{*}polyline")) == 2
    assert len(tree.findall("{*}circle")) == 3
