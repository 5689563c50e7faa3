"""The measurements that start an engine or a server of their own, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.cli import bench
from bough.core.errors import BoughError, ConfigError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def flags(settings: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        words += (
            ([f"--{flag}"] if value else [f"--no-{flag}"]) if isinstance(value, bool) else [f"--{flag}", str(value)]
        )
    return words


def test_throughput(tiny_settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "5", "--input-len", "40", "--output-len", "6", "--json", "--repeat", "2"]
    assert bench.run(["throughput", *words, *flags(tiny_settings)]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["num_requests"], facts["total_input_tokens"], facts["total_output_tokens"]) == (5, 200, 30)
    assert facts["total_cached_tokens"] == 0
    assert facts["output_throughput"] == pytest.approx(30 / facts["duration"])
    assert len(facts["runs"]) == 2


@pytest.mark.long
def test_latency(tiny_settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-size", "1", "3", "--input-len", "32", "--output-len", "4", "--repeat", "1", "--json"]
    assert bench.run(["latency", *words, *flags(tiny_settings)]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [(row["batch_size"], row["input_len"], row["output_len"]) for row in rows] == [(1, 32, 4), (3, 32, 4)]
    for row in rows:
        assert row["decode_throughput"] == pytest.approx(1000 * row["batch_size"] / row["decode_step_ms"])


@pytest.mark.long
def test_startup(tiny_settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["startup", "--repeat", "1", "--json", *flags(tiny_settings)]) == 0
    (start,) = json.loads(capfd.readouterr().out)["starts"]
    assert start["total_s"] == pytest.approx(sum(start["phases_s"].values()))
    assert start["phases_s"]["loading weights"] > 0


def test_host_and_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    assert bench.run(["host", "--rows", "4", "--steps", "20"]) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == 4
    if not torch.cuda.is_available():
        assert bench.run(["kernels", "norm"]) == 2
        assert "no CUDA device" in capfd.readouterr().out


@pytest.mark.long
def test_grammar_where_the_model_has_more_tokens_than_its_tokenizer(
    tiny_settings: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path(tiny_settings["model_path"], "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 128_256}))
    words = ["--batch-size", "3", "--output-len", "12", "--requests", "2", "--repeat", "1", "--json"]
    assert bench.run(["grammar", *words, *flags({**tiny_settings, "model_path": str(tmp_path)})]) == 0
    cost, saved = (json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{"))
    assert cost["batch_size"] == 3
    assert cost["strings_cost"] == pytest.approx(cost["strings_ms"] / cost["free_ms"] - 1.0)
    # Random weights fill the strings with words of any length: the literal part stays at least this large.
    assert saved["literal_share"] > 0.4
    assert saved["steps_per_token_without"] > 0.99
    assert saved["fewer_steps"] > 0.3


@pytest.mark.long
def test_language_against_the_plain_client(tiny_settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--programs", "2", "--branches", "8", "--questions", "6", "--context-len", "64", "--examples-len", "128",
             "--own-len", "16", "--output-len", "16", "--answer-len", "4", "--repeat", "1", "--json",
             "--choice-questions", "3", "--thought-len", "4", "--depth", "1"]  # fmt: skip
    assert bench.run(["lang", *words, *flags(tiny_settings)]) == 0
    report = json.loads(capfd.readouterr().out)
    # The branches' KV is joined; the plain client's last prompt has all of them but one to compute.
    # (Random weights write what is spelled otherwise when it is read again, so some of it is computed anyway.)
    assert report["fork-join"]["joins"] == {"kv": 4}
    assert report["fork-join"]["prefill_ratio"] > 1.1
    # To learn how likely a choice is, the plain client has the whole prompt computed with it.
    for name in ("tree-of-thought", "judge", "few-shot-choices"):
        assert report[name]["prefill_ratio"] > 2, name
    choices = report["few-shot-choices"]
    assert choices["equal_answers"] == choices["answers"] == 3
    assert choices["plain"]["hit_rate"] == 0
    few_shot = report["few-shot"]
    assert few_shot["equal_answers"] == few_shot["answers"] == 6
    # 128 shared tokens and 6 questions of some 20: whoever asks, the shared part is computed once
    assert few_shot["language"]["computed"] < 128 + 6 * 48
    assert few_shot["language"]["hit_rate"] > 0.5


def test_fairness(tiny_settings: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--streams", "3", "--input-len", "16", "--prompt-len", "1500", "--idle-seconds", "0.5", "--seconds", "60"]
    in_steps = {**tiny_settings, "chunked_prefill_size": 64, "max_total_tokens": 131_072}  # a token with each of many
    assert bench.run(["fairness", *words, "--json", *flags(in_steps)]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["answered"] is True
    assert facts["prompt_len"] == 1500
    for phase in (facts["idle"], facts["beside"]):
        assert 0 <= phase["p50_itl_ms"] <= phase["p99_itl_ms"] <= phase["max_itl_ms"]
        assert phase["p50_tpot_ms"] > 0
        assert phase["tokens"] > 6
    assert facts["tpot_ratio"] == pytest.approx(facts["beside"]["p99_tpot_ms"] / facts["idle"]["p99_tpot_ms"])


def test_fairness_is_judged() -> None:
    from bough.bench.fairness import User, phase_of, verdict

    steady, uneven = User([0.01 * at for at in range(11)]), User([0.0, 0.02, 0.1])
    phase = phase_of([steady, uneven], 0.0, 1.0)
    assert phase.tpot_ms == pytest.approx([10.0, 50.0])
    assert sorted(phase.gaps_ms)[-2:] == pytest.approx([20.0, 80.0])
    assert phase_of([steady], 0.035, 0.085).tpot_ms == pytest.approx([10.0])
    with pytest.raises(BoughError, match="got 1 tokens"):
        phase_of([steady, uneven], 0.05, 0.2)
    with pytest.raises(BoughError, match="got 3 tokens at once"):
        phase_of([steady, User([0.1] * 3)], 0.0, 1.0)
    assert verdict({"tpot_ratio": 2.0, "worst_short_ttft_s": 1.0}) == []
    assert len(verdict({"tpot_ratio": 2.1, "worst_short_ttft_s": 1.1})) == 2


def test_fairness_needs_room_for_its_prompt(tiny_settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        bench.run(["fairness", "--prompt-len", "100000", *flags(tiny_settings)])
