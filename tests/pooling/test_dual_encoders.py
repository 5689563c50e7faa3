"""CLIP, SigLIP and SigLIP 2 through scheduler, runner and model: vectors of texts and of images are transformers'."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from pooled_engine import PooledEngine
from transformers import PreTrainedModel

from bough.config.fields import Fields
from bough.core.media import Features
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placed, Placer
from bough.multimodal.processor import Prepared, Processed, Processor

TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 12, "bos_token_id": 97, "eos_token_id": 98, "pad_token_id": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
NORMALISED = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
KINDS = ("CLIP", "Siglip", "Siglip2")
IDS = [[97, 5, 17, 60, 98], [97, 98], [97, 3, 3, 8, 9, 11, 12, 13, 40, 41, 42, 98]]


@dataclass(frozen=True)
class Dual:
    """A tiny checkpoint, and transformers' model and image processor of it."""

    folder: Path
    reference: PreTrainedModel
    images: Any
    processor: Processor
    config: dict[str, Any]

    def text(self, ids: list[int]) -> np.ndarray:
        if self.config["model_type"] != "clip":
            ids = ids + [1] * (TEXT["max_position_embeddings"] - len(ids))
        with torch.no_grad():
            found = self.reference.get_text_features(torch.tensor([ids])).pooler_output
        return _normed(found)

    def image(self, image: Image.Image) -> np.ndarray:
        with torch.no_grad():
            given = self.images(image, return_tensors="pt")
            found = self.reference.get_image_features(**given).pooler_output
        return _normed(found)

    def placed(self, image: Image.Image) -> tuple[Placed, dict[str, np.ndarray]]:
        array, items = self.processor.image(image, {})
        digest = str(hash(image.tobytes())).encode()[-32:].rjust(32, b".")
        where = Features(path=digest.decode(), digest=digest, dtype="uint8", shape=array.shape)
        processed = Processed(dtype="uint8", shape=array.shape, items=items)
        media = [Prepared(kind="image", digest=digest, processed=processed, features=where)]
        token = self.processor.marker("image").token
        return Placer(self.processor, None).place_ids(np.array([token], np.int32), media), {where.path: array}


def _normed(found: torch.Tensor) -> np.ndarray:
    vector: np.ndarray = (found / found.norm(dim=-1, keepdim=True))[0].numpy()
    return vector


@cache
def dual(kind: str) -> Dual:
    folder = Path(mkdtemp(prefix="bough-dual-"))
    vision = {**VISION, "num_patches": 16} if kind == "Siglip2" else VISION
    extra: dict[str, Any] = {"projection_dim": 24} if kind == "CLIP" else {}
    text = {**TEXT, "projection_size": VISION["hidden_size"]} if kind != "CLIP" else TEXT
    model_class = getattr(transformers, f"{kind}Model")
    config = model_class.config_class(text_config=text, vision_config=vision, **extra)
    torch.manual_seed(len(kind))
    reference = model_class(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.12))
    reference.save_pretrained(folder)
    name = f"image_processing_pil_{kind.lower()}"
    module = __import__(f"transformers.models.{kind.lower()}.{name}", fromlist=["x"])
    sizes: dict[str, dict[str, Any]] = {
        "CLIP": {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        "Siglip": {"size": {"height": 16, "width": 16}},
        "Siglip2": {"patch_size": 4, "max_num_patches": 20},
    }
    images = getattr(module, f"{kind}ImageProcessorPil")(**sizes[kind], **NORMALISED)
    images.save_pretrained(folder)
    config_read = PooledEngine(folder).checkpoint.config
    processor = processor_of(config_read)
    assert processor is not None
    return Dual(folder, reference, images, processor, json.loads((folder / "config.json").read_text()))


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((37, 20), (16, 16), (18, 61))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_texts_and_images_are_transformers(kind: str) -> None:
    made = dual(kind)
    engine = PooledEngine(made.folder)
    pooling = engine.pooling
    assert pooling is not None
    assert (pooling.pad_to, pooling.pad_id) == ((0, 0) if kind == "CLIP" else (12, 1))
    texts = [ids + [pooling.pad_id] * (pooling.pad_to - len(ids)) for ids in IDS]
    asked = engine.submit(texts)
    for image in pictures():
        placed, features = made.placed(image)
        engine.features |= features
        asked.append(engine.submit_placed(placed))
    found = [values for _, values in engine.finish(asked)]
    wanted = [made.text(ids) for ids in IDS] + [made.image(image) for image in pictures()]
    assert engine.runner.encoder is not None
    assert engine.runner.encoder.num_computed == 3, "all images of a step at once"
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == pooling.width
        assert np.abs(ours - theirs).max() <= 1e-4
    assert len({values.tobytes() for values in found}) == len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_encoded_once(kind: str) -> None:
    made = dual(kind)
    engine = PooledEngine(made.folder)
    placed, features = made.placed(pictures()[0])
    engine.features |= features
    first = engine.finish([engine.submit_placed(placed), engine.submit_placed(placed)])
    again = engine.finish([engine.submit_placed(placed)])
    assert engine.runner.encoder is not None
    assert engine.runner.encoder.num_computed == 1
    account = engine.queues.media
    assert account is not None
    assert (account.counters.items, account.counters.hits) == (3, 2)
    assert len({values.tobytes() for _, values in first + again}) == 1
    assert first[0][0].media_tokens == {"image": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted(kind: str) -> None:
    made = dual(kind)
    facts = facts_of(PooledEngine(made.folder).checkpoint.config)
    ends = {"CLIP": facts.hidden * 24}.get(kind, (facts.hidden + 1) * VISION["hidden_size"])
    scalars = 1 if kind == "CLIP" else 2
    assert facts.num_parameters() + ends + scalars == sum(each.numel() for each in made.reference.parameters())


def test_bounds_of_patches() -> None:
    processor = dual("Siglip2").processor
    image = pictures()[2]
    _, (item,) = processor.image(image, {})
    _, (fewer,) = processor.image(image, processor.options("image", {"max_num_patches": 6}))
    assert fewer.cost <= 6 < item.cost <= 20
    with pytest.raises(Exception, match="max_num_patches"):
        processor.options("image", {"max_num_patches": 21})
    with pytest.raises(Exception, match="takes max_num_patches"):
        processor.options("image", {"size": 3})


def test_sparse_configs_have_their_familys_sizes() -> None:
    """As published: what is the default is not written."""
    config = {"architectures": ["SiglipModel"], "text_config": {}, "vision_config": {}}
    facts = facts_of(Fields(config).raw)
    assert (facts.vocab, facts.max_context, facts.hidden, facts.num_layers) == (32000, 64, 768, 12)
    assert facts.tower is not None
    assert (facts.tower.width, facts.tower.tokens_per_position) == (768, 196)
