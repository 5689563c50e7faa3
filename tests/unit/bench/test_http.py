"""The closed loop over HTTP and beside it, as far as it needs no server."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bough.bench.http import ClosedLoop, best, with_tokenizer, word_tokenizer, words_of


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
