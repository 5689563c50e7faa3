"""Every architecture against transformers on the same weights: logits and greedy tokens, alone and in a ragged batch."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from families import greedy
from tiny import CASES, SIZES, make_tiny

from bough.config.hf import open_checkpoint
from bough.layers.batch import BatchMedia, Model, attention_specs
from bough.models.load import build_model

logging.getLogger("transformers").setLevel(logging.ERROR)
CPU = torch.device("cpu")
PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11, 5, 5, 77], [42], [100, 90, 80, 70, 60, 50, 40]]
TOLERANCE = 1e-4


def load(folder: Path, **options: object) -> Model:
    return build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, **options)  # type: ignore[arg-type]


def next_tokens(model: Model, attention: DenseAttention, queries: list[tuple[int, list[int]]]) -> list[int]:
    with torch.no_grad():
        logits = model.logits(model.forward(attention.step(queries)))
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    reference = make_tiny(case, tmp_path)
    model = load(tmp_path, context_length=256)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPTS[0]])).logits[0]
        attention = DenseAttention(1)
        actual = model.logits(model.forward(attention.step([(0, PROMPTS[0])], all_logits=True)))
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE
    assert expected.std() > 0.1, "logits too flat to tell models apart"

    attention = DenseAttention(len(PROMPTS))
    tokens = [[token] for token in next_tokens(model, attention, list(enumerate(PROMPTS)))]
    for _ in range(63):
        for row, token in enumerate(
            next_tokens(model, attention, [(row, [own[-1]]) for row, own in enumerate(tokens)])
        ):
            tokens[row].append(token)
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        assert [answer] == greedy(reference, [prompt], [answer])


@pytest.mark.parametrize("case", ["llama", "gemma3", "mistral", "qwen3_moe"])
def test_chunks_give_the_same_logits_as_one_pass(case: str, tmp_path: Path) -> None:
    make_tiny(case, tmp_path)
    model = load(tmp_path, context_length=256)
    prompt = PROMPTS[0]
    with torch.no_grad():
        whole = model.logits(model.forward(DenseAttention(1).step([(0, prompt)])))
        attention = DenseAttention(1)
        for start in range(0, len(prompt), 7):
            part = model.logits(model.forward(attention.step([(0, prompt[start : start + 7])])))
    assert (whole - part).abs().max() <= 1e-5


@pytest.mark.parametrize(("case", "length"), [("phi3-longrope", 300), ("llama-dynamic", 300)])
def test_scalings_by_length_follow_the_longest_sequence_served(case: str, length: int, tmp_path: Path) -> None:
    """Beyond the trained length transformers rescales by the sequence at hand: equal if that is what is served."""
    reference = make_tiny(case, tmp_path)
    model = load(tmp_path, context_length=length)
    ids = torch.randint(0, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, -1]
        actual = model.logits(model.forward(DenseAttention(1).step([(0, ids)])))[0]
        short = load(tmp_path, context_length=256)
        other = short.logits(short.forward(DenseAttention(1).step([(0, ids[:256])])))
    assert (actual - expected).abs().max() <= TOLERANCE
    assert torch.isfinite(other).all()


def test_specs_describe_the_attention(tmp_path: Path) -> None:
    make_tiny("gemma2", tmp_path)
    specs = attention_specs(load(tmp_path))  # type: ignore[arg-type]
    assert [spec.layer for spec in specs] == [0, 1, 2, 3]
    assert [spec.window for spec in specs] == [9, None, 9, None]
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.softcap) for spec in specs} == {(4, 2, 16, 50.0)}


def test_given_embeddings_replace_the_lookup(tmp_path: Path) -> None:
    reference = make_tiny("gemma3", tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        batch = DenseAttention(1).step([(0, PROMPTS[0])])
        embeddings = reference.get_input_embeddings()(torch.tensor(PROMPTS[0]))
        batch.media = BatchMedia(torch.arange(len(PROMPTS[0])), embeddings)
        batch.ids_T = torch.zeros_like(batch.ids_T)
        expected = reference(torch.tensor([PROMPTS[0]])).logits[0, -1]
        assert (model.logits(model.forward(batch))[0] - expected).abs().max() <= TOLERANCE


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path)
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.bfloat16, device=CPU)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPTS[0]])).logits[0, -1]
        actual = model.logits(model.forward(DenseAttention(1).step([(0, PROMPTS[0])])))[0].float()
    kl = (expected.log_softmax(-1).exp() * (expected.log_softmax(-1) - actual.log_softmax(-1))).sum()
    assert kl < 0.02
