"""A tiny Qwen3-VL served to embed: texts, images and both in one vector, by objects, by chats and by templates."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from prompts import make_prompt, noise, reference_inputs
from tiny_vision import make_seeing, make_tokenizer

from bough.config.hf import open_checkpoint
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.multimodal.families import processor_of

from .conftest import Server

pytestmark = pytest.mark.e2e

HTTP = httpx.Client(timeout=60)
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def url(seed: int) -> str:
    file = io.BytesIO()
    Image.fromarray(noise(24, 40, seed=seed)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def prompt(content: str, instruct: str = "Represent the user's input.") -> str:
    return f"<|im_start|>system\n{instruct}<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


class Theirs:
    """transformers' vectors of prompts."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = make_seeing("qwen3_vl", folder)
        self.tokenizer = make_tokenizer(folder)
        checkpoint = open_checkpoint(str(folder))
        ours = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=64)
        assert isinstance(ours, Decoder)
        self.tower, self.processor = ours.tower, processor_of(checkpoint.config)

    def vector(self, text: str, *seeds: int) -> np.ndarray:
        assert self.processor is not None
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        made = make_prompt(self.processor, ids, [noise(24, 40, seed=seed) for seed in seeds])
        with torch.no_grad():
            given = reference_inputs(made, self.tower)
            state = self.model.model(input_ids=torch.tensor([made.ids]), **given).last_hidden_state[0, -1]
        found: np.ndarray = (state / state.norm()).numpy()
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(folder)


@pytest.fixture(scope="module")
def server(folder: Path, theirs: Theirs) -> Iterator[Server]:
    made = Server({
        "model_path": str(folder), "device": "cpu", "cpu_threads": 1, "dtype": "float32", "is_embedding": True,
        "embedding_template": "qwen3-vl", "custom_kernels": False, "json_model_override_args": '{"is_matryoshka": true}',
    })  # fmt: skip
    yield made
    made.end()


def embed(server: Server, **body: Any) -> Any:
    answer = HTTP.post(f"{server.url}/v1/embeddings", json={"model": "default", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def close(found: Any, wanted: np.ndarray) -> bool:
    return bool(np.abs(np.array(found) - wanted).max() < 1e-4)


def test_texts_images_and_both(server: Server, theirs: Theirs) -> None:
    inputs = ["cat", {"image": url(0)}, {"text": "cat", "image": url(0)}, {"text": "x", "image": [url(0), url(1)]}]
    answer = embed(server, input=inputs)
    wanted = [
        theirs.vector(prompt("cat")),
        theirs.vector(prompt(MARK), 0),
        theirs.vector(prompt(f"{MARK}cat"), 0),
        theirs.vector(prompt(f"{MARK}{MARK}x"), 0, 1),
    ]
    assert [close(item["embedding"], each) for item, each in zip(answer["data"], wanted, strict=True)] == [True] * 4
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 15 * 4
    find = embed(server, input=[{"text": "cat", "image": url(0)}], instruct="Find it.")["data"][0]["embedding"]
    assert close(find, theirs.vector(prompt(f"{MARK}cat", "Find it."), 0))
    chat = [
        {"role": "system", "content": "Find it."},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url(0)}}, {"type": "text", "text": "cat"}],
        },
    ]
    assert close(embed(server, messages=chat)["data"][0]["embedding"], np.array(find))
    short = embed(server, input=[{"image": url(0)}], dimensions=16)["data"][0]["embedding"]
    assert close(short, wanted[1][:16] / np.linalg.norm(wanted[1][:16]))
    cut = embed(server, input="cat " * 400, truncate=True)
    assert 100 < cut["usage"]["prompt_tokens"] <= 256
    native = HTTP.post(f"{server.url}/encode", json={"text": ["cat", "padding"], "image_data": [None, url(0)]}).json()
    assert [close(each["embedding"], wanted[at]) for at, each in enumerate(native)] == [True, True]


def test_rerank_by_vectors(server: Server, theirs: Theirs) -> None:
    documents = [{"image": url(1)}, "cat", [{"type": "image_url", "image_url": {"url": url(0)}}]]
    body = {"query": {"image": url(0)}, "documents": documents}
    answer = HTTP.post(f"{server.url}/v1/rerank", json=body).json()
    assert answer["results"][0]["index"] == 2
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    wanted = float(theirs.vector(prompt(MARK), 0) @ theirs.vector(prompt("cat")))
    assert scores[1] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": [{"image": url(0), "text": "x " * 400}]}, "at most"),
        ({"input": [{"audio": "data:audio/wav;base64,AAAA"}]}, "audio input"),
        ({"input": [{"image": url(0)}], "mm_processor_kwargs": {"min_pixels": -1}}, "min_pixels"),
        ({"messages": []}, "messages is empty"),
    ],
)
def test_what_is_refused(server: Server, body: dict[str, Any], says: str) -> None:
    answer = HTTP.post(f"{server.url}/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.text
