"""Every kind of pooling model against transformers' own class on the same weights, through scheduler and runner."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled_engine import DECODER, SIZES, TEXTS, PooledEngine, make_tiny

from bough.core.errors import UnsupportedModel
from bough.core.step import Step
from bough.runner.pooling import LaunchedPool

logging.getLogger("transformers").setLevel(logging.ERROR)
TOLERANCE = 1e-4
BERT: dict[str, Any] = {"type_vocab_size": 2}
ROBERTA: dict[str, Any] = {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 98}
GEMMA: dict[str, Any] = {**DECODER, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def say_modules(folder: Path, pooling: dict[str, Any] | None, *more: tuple[str, str]) -> None:
    """A modules.json like sentence-transformers writes it."""
    listed = [("0", "", "Transformer")]
    if pooling is not None:
        listed.append(("1", "1_Pooling", "Pooling"))
        write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": SIZES["hidden_size"], **pooling})
    listed += [(str(len(listed) + at), path, kind) for at, (path, kind) in enumerate(more)]
    write(
        folder / "modules.json",
        [
            {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for name, path, kind in listed
        ],
    )


def hidden(reference: torch.nn.Module, text: list[int], **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([text]), **inputs).last_hidden_state[0]


def close(actual: list[np.ndarray], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == tuple(other.shape)
        assert np.abs(one - other.numpy()).max() <= TOLERANCE
    if len(actual) > 1 and actual[0].shape == actual[1].shape:
        assert np.abs(actual[0] - actual[1]).max() > 1e-2, "results too alike to tell anything"


ENCODERS = {"BertModel": BERT, "XLMRobertaModel": ROBERTA, "RobertaModel": ROBERTA}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_pools_its_first_token(name: str, tmp_path: Path) -> None:
    reference = make_tiny(name, tmp_path, **ENCODERS[name])
    engine = PooledEngine(tmp_path)
    assert engine.pooling is not None
    assert engine.pooling.modes == ("cls",)
    expected = [torch.nn.functional.normalize(hidden(reference, text)[0], dim=0) for text in TEXTS]
    close(engine.results(TEXTS), expected)


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_each_way_of_pooling(mode: str, tmp_path: Path) -> None:
    reference = make_tiny("BertModel", tmp_path, **BERT)
    say_modules(tmp_path, {"pooling_mode": mode})

    def pooled(states: torch.Tensor) -> torch.Tensor:
        weight = torch.arange(1.0, len(states) + 1)[:, None]
        return {
            "cls": states[0],
            "max": states.max(0).values,
            "mean": states.mean(0),
            "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
            "weightedmean": (states * weight).sum(0) / weight.sum(),
            "lasttoken": states[-1],
        }[mode]

    close(PooledEngine(tmp_path).results(TEXTS), [pooled(hidden(reference, text)) for text in TEXTS])


def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    """Two modes side by side, a projection with weights of its own, and a norm."""
    from safetensors.torch import save_file

    reference = make_tiny("BertModel", tmp_path, **BERT)
    say_modules(
        tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ("2_Dense", "Dense"),
        ("3_Normalize", "Normalize"),
    )  # fmt: skip
    width = 2 * SIZES["hidden_size"]
    weight, bias = torch.randn(20, width), torch.randn(20)
    write(
        tmp_path / "2_Dense" / "config.json",
        {"in_features": width, "out_features": 20, "bias": True, "activation_function": "torch.nn.Tanh"},
    )
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")

    def expected(text: list[int]) -> torch.Tensor:
        states = hidden(reference, text)
        pooled = torch.tanh(weight @ torch.cat([states[0], states.mean(0)]) + bias)
        return torch.nn.functional.normalize(pooled, dim=0)

    close(PooledEngine(tmp_path).results(TEXTS), [expected(text) for text in TEXTS])


def test_an_unknown_module_is_refused(tmp_path: Path) -> None:
    make_tiny("BertModel", tmp_path, **BERT)
    say_modules(tmp_path, {"pooling_mode": "mean"}, ("2_LSTM", "LSTM"))
    with pytest.raises(UnsupportedModel, match="LSTM"):
        PooledEngine(tmp_path)


DECODERS: dict[str, dict[str, Any]] = {
    "LlamaModel": DECODER,
    "MistralModel": {**DECODER, "sliding_window": 9, "head_dim": 16},
    "Qwen2Model": DECODER,
    "Qwen3Model": {**DECODER, "head_dim": 16},
    "Gemma2Model": GEMMA,
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_pools_its_last_token(name: str, tmp_path: Path) -> None:
    """In chunks of 7 tokens: only the last one's last token counts."""
    reference = make_tiny(name, tmp_path, **DECODERS[name])
    engine = PooledEngine(tmp_path, chunked_prefill_size=7)
    expected = [torch.nn.functional.normalize(hidden(reference, text)[-1], dim=0) for text in TEXTS]
    close(engine.results(TEXTS), expected)
    assert engine.queues.counters.steps >= sum(map(len, TEXTS)) // 7


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_a_generative_checkpoint_with_a_pooling_module_embeds(name: str, tmp_path: Path) -> None:
    reference = make_tiny(name, tmp_path, **DECODER, head_dim=16)
    say_modules(tmp_path, {"pooling_mode_lasttoken": True}, ("2_Normalize", "Normalize"))
    expected = [torch.nn.functional.normalize(hidden(reference.model, text)[-1], dim=0) for text in TEXTS]
    close(PooledEngine(tmp_path).results(TEXTS), expected)


def test_a_generative_checkpoint_embeds_when_told_to(tmp_path: Path) -> None:
    reference = make_tiny("LlamaForCausalLM", tmp_path, **DECODER)
    engine = PooledEngine(tmp_path, is_embedding=True, pooling="mean")
    expected = [torch.nn.functional.normalize(hidden(reference.model, text).mean(0), dim=0) for text in TEXTS]
    close(engine.results(TEXTS), expected)
    assert engine.pooling is not None
    assert engine.pooling.whole


@pytest.mark.parametrize("window", [6, 64])
def test_gemma_embeddings_look_both_ways(window: int, tmp_path: Path) -> None:
    """Windows reach to both sides, and full layers see everything."""
    reference = make_tiny(
        "Gemma3TextModel", tmp_path, **{**GEMMA, "sliding_window": window}, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    say_modules(tmp_path, {"pooling_mode_mean_tokens": True}, ("2_Normalize", "Normalize"))
    expected = [torch.nn.functional.normalize(hidden(reference, text).mean(0), dim=0) for text in TEXTS]
    close(PooledEngine(tmp_path).results(TEXTS), expected)


CLASSIFIERS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": BERT,
    "XLMRobertaForSequenceClassification": ROBERTA,
    "LlamaForSequenceClassification": DECODER,
    "MistralForSequenceClassification": {**DECODER, "sliding_window": None},
    "Qwen2ForSequenceClassification": DECODER,
    "Qwen3ForSequenceClassification": {**DECODER, "head_dim": 16},
    "Gemma2ForSequenceClassification": GEMMA,
}


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers(name: str, labels: int, tmp_path: Path) -> None:
    reference = make_tiny(name, tmp_path, **CLASSIFIERS[name], num_labels=labels)
    texts = [[max(token, 2) for token in text] for text in TEXTS]  # no padding ids: decoders would cut there
    engine = PooledEngine(tmp_path)
    assert engine.pooling is not None
    assert (engine.pooling.task, engine.pooling.width) == ("classify", labels)
    with torch.no_grad():
        expected = [reference(torch.tensor([text])).logits[0] for text in texts]
    close(engine.results(texts), expected)


def test_a_reward_head_of_two_layers(tmp_path: Path) -> None:
    """Qwen2's reward models: their class comes with the checkpoint, so it is spelt out here."""
    from safetensors.torch import load_file, save_file

    reference = make_tiny("Qwen2Model", tmp_path, **DECODER)
    width = SIZES["hidden_size"]
    head = {
        "score.0.weight": torch.randn(width, width) * 0.3, "score.0.bias": torch.randn(width),
        "score.2.weight": torch.randn(1, width) * 0.3, "score.2.bias": torch.randn(1),
    }  # fmt: skip
    body = load_file(tmp_path / "model.safetensors")
    save_file({**{f"model.{name}": tensor for name, tensor in body.items()}, **head}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", {**config, "architectures": ["Qwen2ForRewardModel"], "num_labels": 1})

    def expected(text: list[int]) -> torch.Tensor:
        inner = torch.relu(head["score.0.weight"] @ hidden(reference, text)[-1] + head["score.0.bias"])
        return head["score.2.weight"] @ inner + head["score.2.bias"]

    close(PooledEngine(tmp_path).results(TEXTS), [expected(text) for text in TEXTS])


@pytest.mark.parametrize(
    ("name", "extra", "strategy", "activation"),
    [
        ("BertForMaskedLM", BERT, "max", "relu"),
        ("BertForMaskedLM", BERT, "sum", "log1p_relu"),
        ("XLMRobertaForMaskedLM", ROBERTA, "sum", "relu"),
        ("XLMRobertaForMaskedLM", ROBERTA, "max", "log1p_relu"),
    ],
)
def test_sparse_weights(name: str, extra: dict[str, Any], strategy: str, activation: str, tmp_path: Path) -> None:
    reference = make_tiny(name, tmp_path, **extra)
    say_modules(tmp_path, None, ("1_SpladePooling", "SpladePooling"))
    pooling = {"pooling_strategy": strategy, "activation_function": activation}
    write(tmp_path / "1_SpladePooling" / "config.json", pooling)
    engine = PooledEngine(tmp_path)
    for text, pairs in zip(TEXTS, engine.results(TEXTS), strict=True):
        with torch.no_grad():
            weights = torch.log1p(torch.relu(reference(torch.tensor([text])).logits[0]))
            if activation == "log1p_relu":  # the pooling's own logarithm comes on top of the activation's
                weights = torch.log1p(weights)
        expected = (weights.max(0).values if strategy == "max" else weights.sum(0)).numpy()
        ids, values = np.split(pairs, 2)
        assert ids.astype(int).tolist() == np.flatnonzero(expected > 0).tolist()
        assert 0 < len(ids) < len(expected)
        assert np.abs(values - expected[ids.astype(int)]).max() <= TOLERANCE


def test_pairs_have_segments(tmp_path: Path) -> None:
    reference = make_tiny("BertForSequenceClassification", tmp_path, **BERT, num_labels=1)
    borders = [6, 0, 3, 30]
    with torch.no_grad():
        expected = [
            reference(
                torch.tensor([text]),
                token_type_ids=torch.tensor([[int(0 < border <= at) for at in range(len(text))]]),
            ).logits[0]
            for text, border in zip(TEXTS, borders, strict=True)
        ]
        plain = reference(torch.tensor([TEXTS[0]])).logits[0]
    engine = PooledEngine(tmp_path)
    close(engine.results(TEXTS, borders), expected)
    assert abs(float(expected[0] - plain)) > 1e-3, "the segments make no difference"


def test_old_names_of_norms(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference = make_tiny("BertModel", tmp_path, **BERT)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    save_file({f"bert.{name}": tensor.contiguous() for name, tensor in renamed.items()}, tmp_path / "model.safetensors")
    close(
        PooledEngine(tmp_path).results(TEXTS[:1]),
        [torch.nn.functional.normalize(hidden(reference, TEXTS[0])[0], dim=0)],
    )


def test_whole_texts_are_never_cut(tmp_path: Path) -> None:
    """Texts of all lengths, in steps that hold one of the longest, with requests that are given up on the way."""
    from bough.core.messages import Abort

    make_tiny("BertModel", tmp_path, **BERT)
    rng = np.random.default_rng(1)
    texts = [rng.integers(1, 131, int(length)).tolist() for length in rng.integers(1, 97, 40)]
    alone = PooledEngine(tmp_path)
    expected = [alone.results([text])[0] for text in texts]
    engine = PooledEngine(tmp_path, chunked_prefill_size=32, max_running_requests=7)
    assert engine.runner.limits.max_step_tokens == 96
    ids = engine.submit(texts)
    for _ in range(3):
        engine.loop.turn()
    gone = ids[20:24]
    engine.incoming += [Abort(each) for each in gone]
    found = engine.finish(ids)
    for at, (end, values) in enumerate(found):
        if ids[at] in gone:
            assert end.reason == "abort"
        else:
            assert np.abs(values - expected[at]).max() <= TOLERANCE
    cache = engine.loop.cache
    assert cache.pool.num_free == cache.total, "every page is back"


def test_whole_texts_are_not_cut_for_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are smaller once the device ran out of memory, but no smaller than a text."""
    make_tiny("BertModel", tmp_path, **BERT)
    texts = [[first, *range(1, length)] for first, length in enumerate([60, 70, 30, 20, 96, 50], 1)]
    expected = PooledEngine(tmp_path).results(texts)
    engine = PooledEngine(tmp_path, max_running_requests=2)
    launch, sizes = engine.runner.launch, []

    def fail_once(step: Step) -> LaunchedPool:
        sizes.append(step.num_tokens)
        if len(sizes) == 1:
            raise MemoryError("out of memory")
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", fail_once)
    for values, alone in zip(engine.results(texts), expected, strict=True):
        assert np.abs(values - alone).max() <= TOLERANCE
    assert sizes[0] == 60 + 70
    assert (max(sizes[1:]), sum(sizes[1:])) == (96, sum(map(len, texts)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_whole_attention_is_the_reference(causal: bool, window: int | None) -> None:
    from bough.kernels.attention.inputs import AttentionInputs, HostLengths
    from bough.kernels.attention.whole import WholeAttention
    from bough.layers.batch import AttentionSpec

    torch.manual_seed(0)
    lengths = np.array([1, 9, 30, 12, 2, 64, 11], np.int32)
    total = int(lengths.sum())
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    q, k, v = torch.randn(total, 4, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16)
    nothing = torch.zeros(0)
    for softcap in (None, 3.0):
        spec = AttentionSpec(
            layer=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.3, window=window, softcap=softcap, causal=causal
        )
        inputs = AttentionInputs(
            query_start_R1=starts, kv_len_R=nothing, slots_R=nothing, page_table=nothing, loc_T=torch.zeros(total),
            page_size=16, max_query=64, max_kv=64, k_caches=(), v_caches=(),
            host=HostLengths(num_query_R=lengths, context_R=np.zeros_like(lengths)),
        )  # fmt: skip
        out = WholeAttention(inputs).forward(spec, q, k, v).view(total, 4, 16)
        for begin, length in zip(starts.tolist(), lengths.tolist(), strict=False):
            part = slice(begin, begin + length)
            scores = torch.einsum("qnh,snh->nqs", q[part], k[part].repeat_interleave(2, 1)) * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            seen = torch.ones(length, length, dtype=torch.bool)
            if causal:
                seen &= distance >= 0
            if window:
                seen &= distance.abs() < window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            expected = torch.einsum("nqs,snh->qnh", weights, v[part].repeat_interleave(2, 1))
            assert (out[part] - expected).abs().max() <= 1e-5
