"""Beam search through the whole engine, against transformers on the same weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bough
from bough.core.errors import InvalidRequest
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EOS = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, bough.Engine]]:
    """The same tiny model, twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
        initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    path: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    with bough.Engine(
        model_path=str(path), dtype="float32", device="cpu", skip_tokenizer_init=True, max_total_tokens=16_384,
        custom_kernels=False, cpu_threads=1,
    ) as engine:  # fmt: skip
        yield model, engine
    torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [2, 4])
def test_answers_equal_those_of_transformers(pair: tuple[Any, bough.Engine], width: int) -> None:
    model, engine = pair
    prompts = [[5, 9, 17, 33, 20], [40, 41, 8], [60, 7, 7, 12]]
    params = {"beam_width": width, "n": width, "max_new_tokens": 12}
    made: Any = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=2)
    assert len(made) == len(prompts) * width
    for at, prompt in enumerate(prompts):
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=12, do_sample=False,
                early_stopping=False, length_penalty=1.0,
            )[:, len(prompt) :].tolist()  # fmt: skip
        for answer, row in zip(made[at * width : (at + 1) * width], wanted, strict=True):
            end = row.index(EOS) + 1 if EOS in row else len(row)
            assert answer["output_ids"] == row[:end]
            meta = answer["meta_info"]
            assert meta["finish_reason"]["type"] == ("stop" if row[end - 1] == EOS else "length")
            assert meta["completion_tokens"] == end
            assert len(meta["output_token_logprobs"]) == end
            assert all(len(top) == 2 for top in meta["output_top_logprobs"])


def test_streams_and_aborts(pair: tuple[Any, bough.Engine]) -> None:
    _, engine = pair
    params = {"beam_width": 3, "max_new_tokens": 8}
    whole: Any = engine.generate(input_ids=[5, 9, 17], sampling_params=params)
    told = list(engine.generate(input_ids=[5, 9, 17], sampling_params=params, stream=True))
    assert told[-1]["output_ids"] == whole["output_ids"]  # type: ignore[index]
    stream = engine.generate(
        input_ids=[5, 9, 17], sampling_params={"beam_width": 3, "max_new_tokens": 3000, "ignore_eos": True}, rid="long",
        stream=True,
    )  # fmt: skip
    aborting = threading.Thread(target=lambda: until(lambda: engine.abort("long"), every_s=0.1))
    aborting.start()
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"  # type: ignore[index]
    aborting.join()
    assert until(lambda: engine.get_server_info()["internal_states"][0]["running"] == 0)
    with pytest.raises(InvalidRequest, match="penalties"):
        engine.generate(input_ids=[5], sampling_params={**params, "presence_penalty": 1.0})


def test_more_answers_than_the_vocabulary_has_are_refused(pair: tuple[Any, bough.Engine]) -> None:
    """One token that is not the end: of 64 there are 63."""
    _, engine = pair
    params = {"beam_width": 64, "max_new_tokens": 1, "min_new_tokens": 1}
    made: Any = engine.generate(input_ids=[5, 9, 17], sampling_params={**params, "n": 63})
    assert {tuple(each["output_ids"]) for each in made} == {(token,) for token in range(64) if token != EOS}
    with pytest.raises(InvalidRequest, match="63"):
        engine.generate(input_ids=[5, 9, 17], sampling_params={**params, "n": 64})

    def idle() -> bool:
        (state,) = engine.get_server_info()["internal_states"]
        return state["running"] == state["leaving"] == 0 and state["pages"]["held"] == 0

    assert until(idle), engine.get_server_info()["internal_states"]
