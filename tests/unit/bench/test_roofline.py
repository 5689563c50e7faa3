"""The roofline: floors against numbers worked out by hand, workloads within their bounds, and a whole tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bough.bench import roofline
from bough.bench.roofline_workloads import (
    SHAPES,
    TINY,
    TINY_SHAPES,
    DeviceRates,
    ModelShape,
    Workload,
    WorkloadBounds,
    draw_workloads,
    floor_s,
    operations,
)
from bough.core.errors import ConfigError

RATES = DeviceRates(bytes_per_s=4e12, flops_per_s=7e14)


def test_the_floor_of_a_lone_token_is_reading_the_weights() -> None:
    llama = SHAPES[2]
    per_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    weights = 32 * per_layer + 128256 * 4096
    kv = 1000 * 32 * 2 * 8 * 128
    assert floor_s(llama, Workload("decode", (1000,)), RATES) == pytest.approx(2 * (weights + kv) / 4e12)


def test_the_floor_of_a_long_prompt_is_arithmetic() -> None:
    llama = SHAPES[2]
    per_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    products = 2 * 8192 * 32 * per_layer
    attention = 32 * 4 * 32 * 128 * 8192 * 8193 / 2
    head = 2 * 128256 * 4096 / 4e12
    expected = (products + attention) / 7e14 + head
    assert floor_s(llama, Workload("prefill", (8192,)), RATES) == pytest.approx(expected)


def test_shared_tokens_are_read_once() -> None:
    tree = ((2, 128), (4, 64))
    workload = Workload("decode", (256,) * 16, tree=tree)
    assert workload.distinct_tokens == 2 * 128 + 4 * 64 + 16 * (256 - 192)
    apart = Workload("decode", (256,) * 16)
    assert apart.distinct_tokens == 16 * 256


def test_many_tokens_reach_all_experts_and_few_do_not() -> None:
    moe = SHAPES[4]
    expert = 3 * 2048 * 768 * 2 * 48

    def experts(rows: int) -> float:
        return next(w.num_bytes for w in operations(moe, Workload("decode", (64,) * rows)) if w.name == "experts")

    assert experts(1) == pytest.approx(8 * expert)
    assert 100 * expert < experts(24) < 104 * expert
    assert experts(512) == pytest.approx(128 * expert, rel=1e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_workloads_keep_to_their_bounds(shape: ModelShape) -> None:
    drawn = draw_workloads(shape, 16, seed=5, kv_tokens=300_000, page_size=64, bounds=WorkloadBounds())
    assert [w.kind for w in drawn].count("decode") == 10
    for workload in drawn:
        work = operations(shape, workload)
        assert sum(w.num_bytes for w in work) >= 4e9 or sum(w.flops for w in work) >= 2e12
        assert 1 <= len(workload.lengths) <= 512
        assert 64 <= min(workload.lengths) <= max(workload.lengths) <= 65_536
        if workload.kind == "decode":
            assert workload.shared_tokens <= min(workload.lengths)
            assert all(n % 64 == 0 for n in workload.lengths)
            assert workload.distinct_tokens < 300_000
        else:
            assert sum(workload.lengths) < 4 * 65_536
    again = draw_workloads(shape, 16, seed=5, kv_tokens=300_000, page_size=64, bounds=WorkloadBounds())
    other = draw_workloads(shape, 16, seed=6, kv_tokens=300_000, page_size=64, bounds=WorkloadBounds())
    assert drawn == again != other
    assert any(w.tree for w in drawn + other)
    assert any(w.temperature for w in drawn + other)


def test_a_tiny_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results.json"
    assert roofline.main(["--seed", "2", "--device", "cpu", "--workloads", "3", "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "TB/s read" in printed
    assert "decode: 4 workloads, time / floor: least" in printed
    assert "prefill: 2 workloads" in printed
    assert "us" in printed.split("the worst:")[1], "a profile follows"
    results = json.loads(target.read_text())["results"]
    assert len(results) == 6
    assert all(result["ms"] > 0 and result["floor_ms"] > 0 for result in results)


def test_what_there_is_no_time_for_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seed", "1", "--device", "cpu", "--models", "tiny-dense", "--minutes", "0", "--no-profiles"]
    assert roofline.main(arguments) == 1
    assert "16 workloads were left out" in capsys.readouterr().out


def test_unknown_models_are_named() -> None:
    with pytest.raises(ConfigError, match="there is no model shape 'dense'"):
        roofline.main(["--seed", "1", "--device", "cpu", "--models", "dense"])
    assert {shape.name for shape in TINY_SHAPES} == {"tiny-dense", "tiny-moe"}
    assert TINY.least_bytes == 0
