"""CLIP served by real processes: texts and images by OpenAI's client, in vLLM's and SGLang's forms, and from Python."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import bough
from bough.core.errors import InvalidRequest

from .conftest import Server

pytestmark = pytest.mark.e2e

HTTP = httpx.Client(timeout=60)
BEGIN, END = 256, 257


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 33, 3), dtype=np.uint8))


def png(seed: int) -> str:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(seed: int) -> str:
    return f"data:image/png;base64,{png(seed)}"


class Theirs:
    """transformers' vectors, of length 1."""

    def __init__(self, folder: Path) -> None:
        text = {
            "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "max_position_embeddings": 40, "bos_token_id": BEGIN, "eos_token_id": END,
        }  # fmt: skip
        vision = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
            "image_size": 16,
        }  # fmt: skip
        torch.manual_seed(0)
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
        self.model = transformers.CLIPModel(config).eval()
        self.model.save_pretrained(folder)
        self.images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        self.images.save_pretrained(folder)
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: number for number, token in enumerate(alphabet)} | {"<|start|>": BEGIN, "<|end|>": END}
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|start|> $A <|end|>", special_tokens=[("<|start|>", BEGIN), ("<|end|>", END)]
        )
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token="<|end|>", bos_token="<|start|>", pad_token="<|end|>"
        )
        self.tokenizer.save_pretrained(folder)

    def text(self, text: str) -> np.ndarray:
        with torch.no_grad():
            return _normed(self.model.get_text_features(**self.tokenizer(text, return_tensors="pt")).pooler_output)

    def image(self, seed: int) -> np.ndarray:
        with torch.no_grad():
            given = self.images(picture(seed), return_tensors="pt")
            return _normed(self.model.get_image_features(**given).pooler_output)


def _normed(found: Any) -> np.ndarray:
    values: np.ndarray = found[0].numpy()
    return values / np.linalg.norm(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clip")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(folder)


@pytest.fixture(scope="module")
def server(folder: Path, theirs: Theirs) -> Iterator[Server]:
    made = Server({"model_path": str(folder), "device": "cpu", "cpu_threads": 1, "served_model_name": "clip"})
    yield made
    made.end()


def close(found: Any, wanted: np.ndarray) -> bool:
    return bool(np.abs(np.array(found) - wanted).max() < 1e-4)


def embed(server: Server, **body: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/embeddings", json={"model": "clip", **body})


def test_texts_and_images_in_every_form(server: Server, theirs: Theirs) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="clip", input=["a cat", "a dog"], encoding_format="float")
    assert close(answer.data[0].embedding, theirs.text("a cat"))
    assert close(answer.data[1].embedding, theirs.text("a dog"))
    mixed = embed(server, input=["a cat", {"text": "a dog"}, {"image": url(1)}, {"image": {"url": url(2)}}]).json()
    wanted = [theirs.text("a cat"), theirs.text("a dog"), theirs.image(1), theirs.image(2)]
    assert all(close(item["embedding"], each) for item, each in zip(mixed["data"], wanted, strict=True))
    assert mixed["usage"]["prompt_tokens_details"] == {"image_tokens": 2}
    assert mixed["usage"]["prompt_tokens"] == 7 + 7 + 2
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(1)}}]}]
    assert close(embed(server, messages=chat).json()["data"][0]["embedding"], theirs.image(1))
    said = [{"role": "user", "content": "a cat"}]
    assert close(embed(server, messages=said).json()["data"][0]["embedding"], theirs.text("a cat"))
    native = HTTP.post(f"{server.url}/encode", json={"text": "padding", "image_data": png(1)}).json()
    assert close(native["embedding"], theirs.image(1))
    assert native["meta_info"]["image_tokens"] == 1
    several = HTTP.post(f"{server.url}/encode", json={"image_data": [png(1), url(2)]}).json()
    assert [close(each["embedding"], theirs.image(at)) for at, each in enumerate(several, 1)] == [True, True]
    again = embed(server, input=[{"image": url(1)}]).json()["data"][0]
    assert again["embedding"] == mixed["data"][2]["embedding"]
    packed = embed(server, input=[{"image": url(2)}], encoding_format="base64").json()["data"][0]["embedding"]
    assert close(np.frombuffer(base64.b64decode(packed), "<f4"), theirs.image(2))
    scored = HTTP.post(f"{server.url}/v1/rerank", json={"query": "a cat", "documents": ["a dog", "a cat"]}).json()
    assert scored["results"][0]["index"] == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": [{"text": "a cat", "image": url(1)}]}, "by itself"),
        ({"input": [{"image": [url(1), url(2)]}]}, "several images"),
        ({"input": [{"image": "data:image/png;base64,AAAA"}]}, "input[0].image"),
        ({"input": [{"image": "http://127.0.0.1:9/a.png"}]}, "allowed"),
        ({"input": [{"video": "data:video/mp4;base64,AAAA"}]}, "takes text and image"),
        ({"input": [{}]}, "must have a text or media"),
        ({"input": [{"text": "a"}, [3, 4]]}, "token ids"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "both given"),
        ({}, "input is missing"),
        ({"input": [{"image": url(1)}], "dimensions": 5}, "24"),
        ({"input": [{"image": url(1)}], "mm_processor_kwargs": {"max_pixels": 4}}, "no settings"),
        ({"input": "a long text " * 9}, "at most 40"),
    ],
)
def test_what_is_refused(server: Server, body: dict[str, Any], says: str) -> None:
    answer = embed(server, **body)
    assert answer.status_code == 400, answer.text
    assert says in answer.text
    assert embed(server, input="a cat").status_code == 200, "everything else goes on"


def test_images_of_a_program(folder: Path, theirs: Theirs) -> None:
    path = folder / "a.png"
    path.write_bytes(base64.b64decode(png(3)))
    with bough.Engine(model_path=str(folder), device="cpu", cpu_threads=1) as engine:
        found: Any = engine.encode(image_data=[picture(1), np.asarray(picture(2)), str(path)])
        assert [close(each["embedding"], theirs.image(at)) for at, each in enumerate(found, 1)] == [True] * 3
        one: Any = engine.encode(image_data=picture(1))
        assert one["embedding"] == found[0]["embedding"]
        assert close(engine.encode("a cat")["embedding"], theirs.text("a cat"))  # type: ignore[call-overload]
        with pytest.raises(InvalidRequest, match="input_ids"):
            engine.encode(input_ids=[3], image_data=picture(1))


def test_no_chats(server: Server) -> None:
    chat = {"model": "clip", "messages": [{"role": "user", "content": "a cat"}]}
    assert HTTP.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 400
