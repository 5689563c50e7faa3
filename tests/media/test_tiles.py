"""Families whose towers see tiles, against transformers: token ids of its processors, features, and greedy answers through
the engine, in one chunk, in many, and from the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import InProcess, Setup
from PIL import Image
from pillow_vision import on_pillow
from prompts import noise
from safetensors.torch import load_file, save_file
from test_in_engine import GREEDY, NEW
from tiny_tiles import TILE_FAMILIES, load_tiled
from tiny_vision import IMAGE, VOCAB
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError, InvalidRequest
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of
from bough.multimodal.llama4 import canvas
from bough.multimodal.placing import Placed, Placer
from bough.multimodal.processor import Prepared, Processed

SHAPES = [(24, 40), (37, 20), (16, 16), (9, 61)]
NAMES = [
    pytest.param(name, marks=pytest.mark.long if name in ("glm46v", "idefics2-quarters") else ())
    for name in TILE_FAMILIES
]
SETUPS = {
    "plain": Setup(overlap=False, radix_cache=False),
    "in sevens, in a small store": Setup(chunk_tokens=7, page_size=4, media_rows=96, step_patches=1),
}


def prepared(name: str, image: Image.Image) -> tuple[Prepared, np.ndarray]:
    array, items = load_tiled(name).processor.image(image, {})
    array = np.array(array)
    digest = np.asarray(image).tobytes()[:32].ljust(32, b".")
    where = Features(path=f"{name}-{image.size}", digest=digest, dtype="uint8", shape=array.shape)
    processed = Processed(dtype="uint8", shape=array.shape, items=items)
    return Prepared(kind="image", digest=digest, processed=processed, features=where), array


@cache
def case(name: str) -> tuple[Placed, dict[str, np.ndarray], dict[str, Any]]:
    """A prompt with images between words, by us and by transformers."""
    tiled = load_tiled(name)
    images = [Image.fromarray(noise(*shape)) for shape in SHAPES]
    mark = tiled.family.mark
    text = f"see {mark}{mark} and\n{mark} then {mark}?"
    media = [prepared(name, image) for image in images]
    placer = Placer(tiled.processor, tiled.tokenizer)
    alone = [each for each, _ in media]
    placed = placer.place_spelled(tiled.tokenizer.encode(placer.spelled(text, alone), True), alone)
    if name.startswith("idefics2"):  # a text gets a space there; ids are taken as they are
        by_ids = placer.place_ids(np.array(tiled.tokenizer.encode(text.replace("?", " ?"), True), np.int32), alone)
    else:
        by_ids = placer.place_ids(np.array(tiled.tokenizer.encode(text, True), np.int32), alone)
    assert (by_ids.ids.tolist(), by_ids.items) == (placed.ids.tolist(), placed.items)
    return placed, {each.features.path: array for each, array in media}, tiled.theirs(text, images)


@pytest.mark.parametrize("name", NAMES)
def test_ids_features_and_answers_are_transformers(name: str) -> None:
    tiled = load_tiled(name)
    placed, features, theirs = case(name)
    assert placed.ids.tolist() == theirs["input_ids"][0].tolist()
    wanted = {key: value for key, value in theirs.items() if key not in ("input_ids", "attention_mask", "num_patches")}
    ids = theirs["input_ids"]
    with torch.no_grad():
        out = tiled.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, **wanted,
        )  # fmt: skip
        given = {
            key: value
            for key, value in wanted.items()
            if key
            in (
                "pixel_values",
                "image_sizes",
                "image_grid_thw",
                "image_position_ids",
                "target_sizes",
                "pixel_attention_mask",
                "spatial_shapes",
            )
        }
        expected = tiled.family.features(tiled.reference, given)
        assert tiled.model.tower is not None
        ours = tiled.model.tower(
            [
                TowerInput(torch.from_numpy(features[item.features.path])[item.first : item.last or None], item.grid)
                for item in placed.items
            ]
        )
    assert expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4
    answer = out[0, len(placed.ids) :].tolist()
    facts = facts_of(tiled.checkpoint.config)
    assert facts.tower is not None
    positions = b""
    if tiled.processor.axes:
        positions = tiled.processor.positions(placed.ids, placed.items).astype("<i4").tobytes()
    for setup in SETUPS.values():
        setup = replace(setup, atomic_media=facts.tower.atomic, context_length=512, num_snapshots=64)
        if facts.tower.atomic:  # an item is computed in one step
            setup = replace(setup, chunk_tokens=max(setup.chunk_tokens, facts.tower.max_positions + 3))
        engine = InProcess(tiled.model, VOCAB, setup)
        engine.features |= features
        for _ in range(2):
            (found,) = engine.finish(
                [engine.submit(placed.ids.tolist(), GREEDY, media=placed.items, positions=positions)]
            )
            assert found.tokens == answer
        assert found.end is not None
        assert found.end.media_tokens == {"image": sum(item.count for item in placed.items)}
        assert not setup.radix_cache or found.end.cached_tokens > len(placed.ids) - 5


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_counted_and_bounds_hold(name: str) -> None:
    tiled = load_tiled(name)
    facts = facts_of(tiled.checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in tiled.model.parameters())
    assert facts.tower is not None
    assert all(item.count <= facts.tower.max_positions for item in case(name)[0].items), "memory is planned by this"
    little = tiled.processor.image(Image.fromarray(noise(60, 90)), tiled.processor.little_detail())[1]
    assert sum(item.count for item in little) <= sum(item.count for item in case(name)[0].items)


def test_several_images_of_a_request_are_not_cut_with_onevision() -> None:
    tiled = load_tiled("onevision")
    images = [Image.fromarray(noise(24, 40)), Image.fromarray(noise(37, 20))]
    theirs = tiled.theirs("<image><image>", [images])
    options = tiled.processor.among("image", 2)
    assert tiled.processor.among("image", 1) == {}
    found = [tiled.processor.image(image, options) for image in images]
    assert int((theirs["input_ids"] == IMAGE).sum()) == sum(items[0].count for _, items in found)
    assert tiled.model.tower is not None
    ours = torch.cat([tiled.model.tower.vit.normalise(torch.from_numpy(array)) for array, _ in found])
    assert (ours.permute(0, 3, 1, 2) - theirs["pixel_values"][:, 0]).abs().max() < 1e-5


@pytest.mark.parametrize("largest", [False, True])
def test_canvases_of_llama4(largest: bool) -> None:
    fit = on_pillow("llama4.image_processing_llama4.get_best_fit")
    sizes = on_pillow("llama4.image_processing_llama4.find_supported_resolutions")(16, SizeDict(height=336, width=336))
    for height, width in np.random.default_rng(0).integers(20, 2500, (100, 2)).tolist():
        wanted = fit((height, width), torch.tensor(sizes), resize_to_max_canvas=largest)
        assert [336 * each for each in canvas(height, width, 336, 16, largest=largest)] == wanted.tolist()


def test_own_checkpoints_of_internvl(tmp_path: Path) -> None:
    """By the names and in the config of `InternVLChatModel`, as they are published."""
    tiled = load_tiled("internvl")
    names = {
        "vision_tower.embeddings.patch_embeddings.projection": "vision_model.embeddings.patch_embedding",
        "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
        "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
        "vision_tower.encoder.layer.": "vision_model.encoder.layers.", "attention.projection_layer": "attn.proj",
        "layernorm_before": "norm1", "layernorm_after": "norm2", "lambda_1": "ls1", "lambda_2": "ls2",
        "multi_modal_projector.layer_norm": "mlp1.0", "multi_modal_projector.linear_1": "mlp1.1",
        "multi_modal_projector.linear_2": "mlp1.3",
    }  # fmt: skip
    found = load_file(tiled.folder / "model.safetensors")
    made: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        if ".attention.k_proj." in name or ".attention.v_proj." in name:
            continue
        if ".attention.q_proj." in name:
            tensor = torch.cat([found[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            name = name.replace("attention.q_proj", "attn.qkv")
        for old, new in names.items():
            name = name.replace(old, new)
        made[name] = tensor.clone()
    save_file(made, tmp_path / "model.safetensors")
    theirs = json.loads((tiled.folder / "config.json").read_text())
    vision = {**theirs["vision_config"], "image_size": 16, "patch_size": 4, "qkv_bias": True, "norm_type": "layer_norm"}
    own = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
        "llm_config": {**theirs["text_config"], "tie_word_embeddings": theirs["tie_word_embeddings"]},
        "vision_config": vision, "force_image_size": 16, "max_dynamic_patch": 5, "select_layer": -1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": IMAGE}))
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    assert isinstance(model, Decoder)
    for (name, ours), (other, wanted) in zip(model.named_parameters(), tiled.model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, wanted), name
    processor = processor_of(checkpoint.config)
    assert processor is not None
    image = Image.fromarray(noise(24, 40))
    assert np.array_equal(processor.image(image, {})[0], tiled.processor.image(image, {})[0])
    assert processor.marker("image").token == IMAGE
    (tmp_path / "added_tokens.json").unlink()
    with pytest.raises(ConfigError, match="IMG_CONTEXT"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("most", [1, 2, 4])
def test_requests_bound_the_tiles_of_internvl(most: int) -> None:
    """As transformers' processor cuts with as many."""
    tiled = load_tiled("internvl")
    image = Image.fromarray(noise(24, 70))
    options = tiled.processor.options("image", {"max_dynamic_patch": most})
    array, _ = tiled.processor.image(image, options)
    settings = {**TILE_FAMILIES["internvl"].processor, "max_patches": most, "crop_to_patches": most > 1}
    theirs = GotOcr2ImageProcessorPil(**settings)([image], return_tensors="pt")
    assert len(array) == len(theirs["pixel_values"])
    assert len(array) <= most + 1
    with pytest.raises(InvalidRequest, match="max_dynamic_patch"):
        tiled.processor.options("image", {"max_dynamic_patch": 99})
