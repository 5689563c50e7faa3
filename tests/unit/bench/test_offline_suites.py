"""The suite and the shapes, on an engine that answers at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bough.bench import offline, quantized, shapes, suite
from bough.bench.offline import Prompts, Timer, open_engine, random_prompts
from bough.core.errors import ConfigError


class Echo:
    """Answers with as many tokens as asked for; a call takes a millisecond per token of its longest answer."""

    def __init__(self, model: str = "", **settings: Any) -> None:
        self.settings = settings
        self.flushed = 0
        self.asked: list[tuple[int, int, float]] = []

    def generate(
        self, prompts: Prompts, new_tokens: Sequence[int], *, temperature: float = 0.0, top_p: float = 1.0
    ) -> Prompts:
        self.asked.append((len(prompts), max(new_tokens), temperature))
        clock.now += 1e-3 * max(new_tokens)
        return [[7] * count for count in new_tokens]

    def flush(self) -> None:
        self.flushed += 1


clock = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)


def test_the_suite_has_its_ten_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(suite, "SuiteSizes", lambda: suite.SMALL)
    target = tmp_path / "rows.jsonl"
    engine = f"{__name__}:Echo"
    assert suite.main(["models/tiny", "--engine", engine, "--json", str(target), "--settings", '{"a": 1}']) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["workload"] for row in rows] == [
        "startup", "decode_bs1", "decode_bs4", "prefill_1x32", "prefill_2x16", "mixed_4", "shared_prefix_2x2",
        "cached_ttft_32",
    ]  # fmt: skip
    assert capsys.readouterr().out == target.read_text()
    assert all(row["engine"] == engine and row["config"] == "tiny" for row in rows)
    assert rows[1]["tpot_ms"] == 1.0, "a millisecond per token, the first not counted"
    assert rows[2]["out_tok_s"] == 4000.0
    sizes = suite.SuiteSizes if isinstance(suite.SuiteSizes, type) else type(suite.SMALL)
    whole = sizes()
    assert (whole.decode_batches, whole.lone_prompt, whole.prompts) == ((1, 8, 64, 256), 2048, (8, 8192))
    assert (whole.mixed, whole.groups, whole.shared_prompt, whole.cached_prompt) == (512, (8, 64), 2048, 512)


def test_quantised_rows_and_their_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised = quantized.RUNS["kv-fp8"]
    assert quantized.main(["--run", "kv-fp8", "--engine", f"{__name__}:Echo"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row == {"run": "kv-fp8", "workload": "decode_bs200_ctx2000", "value": 1.0, "unit": "ms"}
    assert quantised.settings == {"kv_cache_dtype": "fp8_e4m3"}
    rows = [
        row,
        {**row, "run": "kv-bf16", "value": 1.5},
        {**row, "run": "int4", "workload": "decode_bs1_ctx128", "value": 2.5},
    ]
    found = {(each["run"], each["workload"]): each for each in quantized.verdicts(rows)}
    assert found["kv-fp8", "decode_bs200_ctx2000"]["reached"]
    assert found["kv-fp8", "decode_bs200_ctx2000"]["value"] == 1.5
    assert found["int4", "decode_bs1_ctx128"] == {
        "run": "int4", "workload": "decode_bs1_ctx128", "goal": "at most 2.0", "value": 2.5, "share": 0.8, "reached": False,
    }  # fmt: skip
    assert {gain.run for gain in quantized.GAINS} | {gain.than for gain in quantized.GAINS} <= quantized.RUNS.keys()
    folder = Path(__file__).parents[3] / "benchmarks" / "models"
    assert all((folder / run.model / "config.json").exists() for run in quantized.RUNS.values())
    with pytest.raises(ConfigError, match="no run"):
        quantized.main(["--only", "fp9"])


def test_the_shapes_run_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes.main(["m", "--engine", f"{__name__}:Echo", "--groups", "decode", "tree", "turns", "sample"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["workload"] for row in rows] == [
        "startup", "decode_bs1_ctx128", "decode_bs4_ctx2000", "decode_bs24_ctx1000", "decode_bs100_ctx600",
        "decode_bs200_ctx300", "tree_2level_256", "tree_3level_256", "48_chats_5_turns", "decode_bs64_t0.8_p0.95",
    ]  # fmt: skip
    assert rows[1] == {
        "engine": f"{__name__}:Echo", "config": "m", "workload": "decode_bs1_ctx128", "value": 1.0, "unit": "ms",
    }  # fmt: skip
    assert shapes.main(["m", "--engine", f"{__name__}:Echo", "--groups", "huge"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["workload"] for row in rows] == ["startup", "prefill_1x128000", "decode_bs1_ctx128000"]
    assert "huge" not in shapes.USUAL, "few models hold it"
    with pytest.raises(ConfigError, match="there is no group 'trees'"):
        shapes.main(["m", "--groups", "trees"])


def test_a_tree_of_prompts_has_its_levels() -> None:
    prompts = shapes._tree_prompts((1, 10), (4, 6), (8, 3), rows=16, own=2)
    assert {len(prompt) for prompt in prompts} == {21}
    for tokens, distinct in ((10, 1), (16, 4), (19, 8), (21, 16)):
        assert len({tuple(prompt[:tokens]) for prompt in prompts}) == distinct


def test_decode_leaves_the_first_token_out_and_flushes_when_told() -> None:
    echo = Echo()
    timer = Timer(echo, repeats=2)
    assert timer.decode_ms(random_prompts(3, 5, 0), 20, sampling={"temperature": 0.5}) == pytest.approx(1.0)
    assert echo.flushed == 0
    assert echo.asked == [(3, 1, 0.5)] * 2 + [(3, 21, 0.5)] * 2
    timer.median_s(random_prompts(1, 5, 0), 1)
    assert echo.flushed == 2


def test_prompts_are_the_same_for_every_engine() -> None:
    assert random_prompts(2, 6, 3, [1, 2]) == random_prompts(2, 6, 3, [1, 2])
    assert random_prompts(2, 6, 3)[0] != random_prompts(2, 6, 4)[0]
    assert all(prompt[:2] == [1, 2] and len(prompt) == 6 for prompt in random_prompts(2, 6, 3, [1, 2]))


@pytest.mark.parametrize(("name", "why"), [("nope", "there is no engine"), ("no.such.module:x", "can't be started")])
def test_engines_that_are_not_there(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_engine(name, "m", {})


def test_the_factory_for_other_scripts_counts_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "BoughOffline", Echo)
    made = suite.engine("m", page_size=64)
    assert made.generate([[1, 2], [3]], 5) == [5, 5]
    made.flush()


def test_every_engine_is_started_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[str, Any]] = {}

    class Answer(Echo):
        def __init__(self, **given: Any) -> None:
            seen[self.__class__.__name__] = given

    modules = {
        "vllm": SimpleNamespace(SamplingParams=dict, LLM=type("Vllm", (Answer,), {})),
        "sglang": SimpleNamespace(Engine=type("Sglang", (Answer,), {})),
    }
    monkeypatch.setattr("importlib.import_module", modules.__getitem__)
    monkeypatch.setattr(offline, "Engine", type("Bough", (Answer,), {}))
    for name in offline.ENGINES:
        open_engine(name, "folder", {"seed": 3})
    assert {given["load_format"] for given in seen.values()} == {"dummy"}
    assert {given["dtype"] for given in seen.values()} == {"bfloat16"}
    assert all(given["seed"] == 3 for given in seen.values())
    lengths = {given.get("context_length", given.get("max_model_len")) for given in seen.values()}
    assert lengths == {16384}
