"""The closed loop over HTTP and beside it, as far as it needs no server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from bench_fake_server import TimedServer
from tokenizers import Tokenizer

from bough.bench.dialects import Dialect
from bough.bench.http import ClosedLoop, MeasuredServer, best, with_tokenizer, word_tokenizer, words_of
from bough.bench.load import ClientShare, drive
from bough.core.errors import BoughError


def test_loops_are_written_as_four_numbers() -> None:
    assert ClosedLoop.parse("256:512:1024:128") == ClosedLoop(256, 512, 1024, 128)
    for wrong in ("1:2:3", "1:2:3:0"):
        with pytest.raises(argparse.ArgumentTypeError):
            ClosedLoop.parse(wrong)


def test_no_two_prompts_are_alike() -> None:
    loop = ClosedLoop(2, 5, 8, 1)
    prompts = loop.prompts(1) + loop.prompts(2)
    assert len({tuple(prompt) for prompt in prompts}) == 10
    assert {len(prompt) for prompt in prompts} == {8}
    assert loop.prompts(1) == prompts[:5]


def test_settings_become_arguments() -> None:
    given = {"load_format": "dummy", "model_path": "some/model", "cuda_graph": False, "skip_server_warmup": True}
    assert words_of(given) == [
        "some/model", "--log-level", "warning", "--load-format", "dummy", "--no-cuda-graph", "--skip-server-warmup",
    ]  # fmt: skip


def test_the_fastest_run_counts() -> None:
    assert best(3, lambda seed: {"seconds": abs(2.2 - seed)})["seconds"] == pytest.approx(0.2)


def test_a_tokenizer_has_a_word_for_every_id(tmp_path: Path) -> None:
    import json

    made = Tokenizer.from_str(json.dumps(word_tokenizer(3000)))
    assert made.get_vocab_size() == 3000
    texts = [made.decode([place]) for place in range(256, 3000)]
    assert len(set(texts)) == len(texts)
    assert all(text.strip().isalpha() for text in texts)


def test_a_model_with_a_tokenizer_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    made = with_tokenizer({"model_path": str(tmp_path)}, tmp_path)
    assert made["tokenizer"] == str(tmp_path)
    assert with_tokenizer({"model_path": str(tmp_path)}, tmp_path) == {"model_path": str(tmp_path)}


def test_client_processes_send_large_results_whole(timed: TimedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    timed.first_s = timed.each_s = 0.0
    dialect = Dialect(name="openai", model="timed", stream=True, ignore_eos=True)
    server = MeasuredServer(timed.url, None)  # type: ignore[arg-type]
    result, wall_s = server._drive(ClosedLoop(8, 24, 16, 400), 1, dialect, 4)
    assert [each.error for each in result.outcomes] == [""] * 24
    assert {each.output_tokens for each in result.outcomes} == {400}
    assert wall_s > 0


@pytest.mark.parametrize(
    ("last_words", "why"),
    [
        ("", "status 0: 0 bytes of results came"),
        ("print('{\"outcomes\": [', end='')", "status 0: 14 bytes of results came"),
        ("sys.exit(3)", "status 3"),
    ],
)
def test_a_client_process_without_results_is_an_error(
    last_words: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "client"
    code = f"import sys; sys.stdin.readline(); print('ready', flush=True); sys.stdin.readline(); {last_words}"
    client.write_text(f"#!{sys.executable}\n{code}\n")
    client.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(client))
    dialect = Dialect(name="openai", model="timed", stream=True, ignore_eos=True)
    share = ClientShare(base_url="", headers={}, dialect=dialect, calls=[], max_concurrency=2, begin_s=0.0)
    with pytest.raises(BoughError) as raised:
        drive(share, 2)
    assert raised.value.what == "a client process failed"
    assert why in raised.value.why
