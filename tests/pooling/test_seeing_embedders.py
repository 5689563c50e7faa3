"""Qwen's models that see, served to embed: the last token's state is transformers', however prompts are cut."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from pooled_engine import PooledEngine
from prompts import Prompt, make_prompt, noise, reference_inputs
from tiny_vision import END, IMAGE, START, make_seeing
from transformers import PreTrainedModel

from bough.core.errors import ConfigError
from bough.engine_client.embed_prompt import choose_embed_prompt
from bough.engine_client.rerank_prompt import Renderer, choose_prompt
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placed

NAMES = ("qwen2_vl", "qwen3_vl")
MARK = [START, IMAGE, END]


@cache
def made(name: str) -> tuple[Path, PreTrainedModel]:
    folder = Path(mkdtemp(prefix="bough-seeing-"))
    return folder, make_seeing(name, folder)


def prompts(engine: PooledEngine) -> list[Prompt]:
    processor = processor_of(engine.checkpoint.config)
    assert processor is not None
    return [
        make_prompt(processor, [5, 6, *MARK, 9, 10, 11], [noise(24, 40)]),
        make_prompt(processor, [7, 8, 9], []),
        make_prompt(processor, [*MARK, 9, *MARK, 256], [noise(24, 40), noise(16, 16)]),
        make_prompt(processor, [5, 6, *MARK, 9, 10, 11], [noise(24, 40, seed=1)]),
    ]


def embedded(engine: PooledEngine, asked: list[Prompt]) -> list[np.ndarray]:
    for prompt in asked:
        engine.features |= prompt.features
    ids = [
        engine.submit_placed(Placed(np.array(prompt.ids, np.int32), prompt.items), prompt.positions) for prompt in asked
    ]
    return [values for _, values in engine.finish(ids)]


def expected(engine: PooledEngine, reference: Any, prompt: Prompt) -> np.ndarray:
    assert engine.runner.encoder is not None
    given = reference_inputs(prompt, engine.runner.encoder.tower)
    with torch.no_grad():
        state = reference.model(input_ids=torch.tensor([prompt.ids]), **given).last_hidden_state[0, -1]
    vector: np.ndarray = (state / state.norm()).numpy()
    return vector


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [None, 7])
def test_vectors_are_transformers(name: str, chunk: int | None) -> None:
    folder, reference = made(name)
    settings: dict[str, Any] = {} if chunk is None else {"chunked_prefill_size": chunk, "page_size": 4}
    engine = PooledEngine(folder, is_embedding=True, **settings)
    assert engine.pooling is not None
    assert engine.pooling.media == ("image", "video")
    assert (engine.pooling.whole, engine.pooling.modes) == (False, ("last",))
    asked = prompts(engine)
    found = embedded(engine, asked)
    for ours, prompt in zip(found, asked, strict=True):
        assert np.abs(ours - expected(engine, reference, prompt)).max() <= 1e-4
    account = engine.queues.media
    assert account is not None
    encoded = account.counters.tower_tokens
    again = embedded(engine, asked)
    assert all(np.abs(a - b).max() <= 1e-5 for a, b in zip(found, again, strict=True))
    assert account.counters.tower_tokens == encoded, "no image is encoded twice"


def test_other_ways_to_pool_take_text_only() -> None:
    engine = PooledEngine(made("qwen2_vl")[0], is_embedding=True, pooling="mean")
    assert engine.pooling is not None
    assert engine.pooling.media == ()
    assert len(engine.results([[5, 6, 7]])[0]) == 48


def test_without_its_tower(tmp_path: Path) -> None:
    engine = PooledEngine(made("qwen3_vl")[0], is_embedding=True, language_model_only=True)
    whole = PooledEngine(made("qwen3_vl")[0], is_embedding=True)
    assert engine.runner.encoder is None
    assert np.abs(engine.results([[5, 6, 7]])[0] - whole.results([[5, 6, 7]])[0]).max() <= 1e-6


def test_templates(tmp_path: Path) -> None:
    """As the authors' own scripts write them."""
    gme = choose_embed_prompt("auto", "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct")
    assert gme is not None
    assert gme.render(media="<I>", text="a cat", instruct="") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<I>a cat<|im_end|>\n"
        "<|im_start|>assistant\n<|endoftext|>"
    )
    qwen3 = choose_embed_prompt("auto", "Qwen/Qwen3-VL-Embedding-2B")
    assert qwen3 is not None
    assert qwen3.render(media="", text="a cat", instruct="") == (
        "<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\na cat<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "\nFind it.<|im_end|>" in qwen3.render(media="", text="a cat", instruct="Find it.")
    assert choose_embed_prompt("auto", "Qwen/Qwen3-Embedding-0.6B") is None
    assert choose_embed_prompt("none", "Qwen/Qwen3-VL-Embedding-2B") is None
    (tmp_path / "own.jinja").write_text("{{ instruct }}|{{ media }}|{{ text }}")
    own = choose_embed_prompt(str(tmp_path / "own.jinja"), "x")
    assert own is not None
    assert own.render(media="m", text="t", instruct="i") == "i|m|t"
    with pytest.raises(ConfigError, match="no embedding template"):
        choose_embed_prompt("nothing", "x")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="can't be read"):
        choose_embed_prompt(str(tmp_path / "bad.jinja"), "x")
    rerank = choose_prompt("auto", "Qwen/Qwen3-VL-Reranker-2B")
    assert rerank is not None
    text = Renderer(rerank).render("q", "d", "")
    assert text.endswith("that answer the query.<Query>:q\n<Document>:d<|im_end|>\n<|im_start|>assistant\n")


def test_matryoshka_sizes_are_those_of_the_config() -> None:
    folder, _ = made("qwen2_vl")
    config = json.dumps({"matryoshka_dimensions": [8, 16]})
    engine = PooledEngine(folder, is_embedding=True, json_model_override_args=config)
    assert engine.pooling is not None
    assert engine.pooling.dimensions == (8, 16)
