"""`bough bench speculation` on tiny shapes: drafts are right as often as they should be, and everything is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bough.bench.speculation import Bench, FreeProposer, head_config, parser
from bough.cli.main import USAGE_ERROR, main
from bough.runner.proposing import Drafting

TINY = ["--device", "cpu", "--batch-size", "1", "3", "--verify-rows", "3", "--input-len", "20"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rates", "per_step"), [((1.0, 1.0, 0.0), 3.0), ((0.5, 0.5, 0.5), 1.875), ((0.0,), 1.0)])
def test_drafts_are_right_as_often_as_they_should_be(rates: tuple[float, ...], per_step: float) -> None:
    bench = Bench(
        parser().parse_args(
            [*TINY, "--verify-rows", "8", "--turns", "30", "--warm-turns", "2", "--rates", *map(str, rates)]
        )
    )
    bench.open(head_config(bench.target, 100), 3, FreeProposer() if rates == (0.0,) else None)
    bench.fix(3)
    assert bench.measure(8).per_step == pytest.approx(per_step, rel=0.0 if per_step in (1.0, 3.0) else 0.15)


def test_everything_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speculation", *TINY, "--turns", "4", "--warm-turns", "4"]) == 0
    *told, found = map(json.loads, capsys.readouterr().out.splitlines())
    heads = [next(iter(line)) for line in told]
    assert heads == ["opened", "off", "rows", "off", "rows", "verify", "verify", "draft", "draft"]
    assert [told[2][name] for name in ("rows", "ratio")] == [found["batches"][0][name] for name in ("rows", "ratio")]
    assert [each["rows"] for each in found["batches"]] == [1, 3]
    assert all(each["off_tokens_per_s"] > 0 and each["on_step_ms"] > 0 for each in found["batches"])
    assert [(each["rows"], each["tokens"]) for each in found["verify"]] == [(3, 4), (3, 2)]
    assert set(found["draft_ms"]) == {"reduced", "full"}


def test_a_part_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speculation", *TINY, "--turns", "2", "--warm-turns", "2", "--only", "draft"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "draft_ms" in found
    assert "batches" not in found
    assert "verify" not in found


def test_numbers_of_drafts_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every kind of drafter; tables are printed behind what was told meanwhile."""
    flags = ["--only", "numbers", "--rates", "1.0", "0.5", "--turns", "2", "--warm-turns", "2", "--markdown"]
    assert main(["bench", "speculation", *TINY[:3], "1", *TINY[5:], *flags]) == 0
    printed = capsys.readouterr()
    told = [json.loads(line)["numbers"] for line in printed.err.splitlines() if "numbers" in line]
    assert [each["algorithm"] for each in told] == ["NEXTN", "NEXTN", "NEXTN", "STANDALONE", "EAGLE3"]
    for each in told:
        assert len(each["ms"]) == 3
        gains = [each["ms"][0] / ms * tokens for ms, tokens in zip(each["ms"], (1.0, 2.0, 2.5), strict=True)]
        assert each["gain"] == pytest.approx(gains, rel=0.01)
        assert each["best"] == max(range(3), key=each["gain"].__getitem__)
        assert f"({each['algorithm']}) | 1 | " in printed.out


def test_a_step_that_fails_is_not_measured() -> None:
    class Broken(FreeProposer):
        def propose(self, step: Drafting) -> list[Tensor]:
            raise ValueError("broken")

    bench = Bench(parser().parse_args([*TINY, "--turns", "2", "--warm-turns", "2"]))
    bench.open(head_config(bench.target, 100), 3, Broken())
    bench.fix(3)
    with pytest.raises(RuntimeError):
        bench.measure(1)


@pytest.mark.parametrize(
    "flags", [["--rates", "1.5"], ["--turns", "0"], ["--rates", *["0.5"] * 9], ["--only", "nothing"]]
)
def test_what_can_not_be_measured_is_said(flags: list[str]) -> None:
    assert main(["bench", "speculation", *TINY, *flags]) == USAGE_ERROR
