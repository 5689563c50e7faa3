"""Videos of families other than Qwen's, against transformers: which frames are seen, token ids with times, features, and
greedy answers through the engine; beside an image, where transformers' processor and model take both."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from in_process import InProcess, Setup
from PIL import Image
from pillow_vision import on_pillow
from prompts import noise
from test_in_engine import GREEDY, NEW
from test_tiles import prepared
from tiny_tiles import TILE_FAMILIES, Tiled, load_tiled
from tiny_vision import IMAGE, VOCAB
from transformers.video_utils import VideoMetadata

from bough.core.errors import InvalidRequest
from bough.core.media import Features
from bough.layers.tower import TowerInput
from bough.multimodal.frames import number_in_words
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed, VideoInfo

BOTH = ("internvl", "kimi_k25", "minicpmv", "onevision")
"""Others take one kind at a time in transformers: their placeholders are the same."""
SHAPES = ("video_grid_thw", "target_sizes_videos")
NAMES = [name for name, family in TILE_FAMILIES.items() if family.video is not None]
INFO = VideoInfo(total=9, fps=3.0, width=40, height=24)
FRAMES = np.stack([noise(24, 40, seed=number) for number in range(INFO.total)])


def film() -> dict[str, Any]:
    """The video as transformers' processors take it."""
    metadata = VideoMetadata(
        total_num_frames=INFO.total, fps=INFO.fps, width=INFO.width, height=INFO.height, duration=INFO.total / INFO.fps
    )
    return {"videos": [FRAMES], "video_metadata": [metadata], "do_sample_frames": True}


def video_of(name: str) -> tuple[Prepared, np.ndarray]:
    processor = load_tiled(name).processor
    indices = processor.sample(INFO, {})
    array, items, notes = processor.video(INFO, indices, [Image.fromarray(FRAMES[at]) for at in indices], {})
    where = Features(path=f"{name}-video", digest=b"v" * 32, dtype="uint8", shape=array.shape)
    processed = Processed(dtype="uint8", shape=array.shape, items=items, notes=notes)
    return Prepared(kind="video", digest=b"v" * 32, processed=processed, features=where), array


def kimi_video_features(model: Any, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor, **_: Any) -> Any:
    """transformers' 5.23 fails to split its own features: its tower and its projector without that."""
    found = model.vision_tower(pixel_values_videos, grid_thw=video_grid_thw)
    found.pooler_output = (model.mm_projector(found.pooler_output).squeeze(1),)
    return found


def video_features(tiled: Tiled, theirs: dict[str, Any]) -> torch.Tensor:
    """What transformers' model makes of what its processor made of a video."""
    model = tiled.reference.model
    if "pixel_values_videos" in theirs:
        given = {key: theirs[key] for key in ("pixel_values_videos", *SHAPES) if key in theirs}
        found = model.get_video_features(**given).pooler_output
    else:
        given = {key: theirs[key] for key in ("pixel_values", "pixel_attention_mask") if key in theirs}
        found = model.get_image_features(**given).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


@pytest.mark.parametrize("name", NAMES)
def test_ids_features_and_answers_are_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = load_tiled(name)
    assert tiled.family.video is not None
    image = Image.fromarray(noise(24, 40))
    both = name in BOTH
    if name == "kimi_k25":
        monkeypatch.setattr(
            tiled.reference.model, "get_video_features", partial(kimi_video_features, tiled.reference.model)
        )
    text = f"see {tiled.family.video.mark} and {tiled.family.mark if both else 'that'} now"
    theirs = tiled.theirs(text, [image] if both else [], **film())
    video, array = video_of(name)
    still, pixels = prepared(name, image)
    features = {video.features.path: array, still.features.path: pixels}
    media = [still, video] if both else [video]
    placer = Placer(tiled.processor, tiled.tokenizer)
    ordered = placer.ordered(text, media)
    assert [each.kind for each in ordered] == ["video", "image"][: len(media)]
    placed = placer.place_spelled(tiled.tokenizer.encode(placer.spelled(text, media), True), ordered)
    expected_ids = theirs["input_ids"][0]
    if name == "kimi_k25":  # its own processor has one placeholder for both kinds, transformers' has two
        expected_ids = expected_ids.masked_fill(expected_ids == 301, IMAGE)
    assert placed.ids.tolist() == expected_ids.tolist()
    by_ids = placer.place_ids(np.array(tiled.tokenizer.encode(text, True), np.int32), media)
    assert (by_ids.ids.tolist(), by_ids.items) == (placed.ids.tolist(), placed.items)

    wanted = {
        key: theirs[key]
        for key in theirs
        if key not in ("input_ids", "attention_mask", "num_patches", "video_metadata")
    }
    ids = theirs["input_ids"]
    with torch.no_grad():
        out = tiled.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, **wanted,
        )  # fmt: skip
        expected = video_features(tiled, theirs)
        assert tiled.model.tower is not None
        items = [item for item in placed.items if item.kind == "video" or name == "internvl"]
        ours = tiled.model.tower(
            [
                TowerInput(torch.from_numpy(features[each.features.path])[each.first : each.last or None], each.grid)
                for each in items
            ]
        )
    assert expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4
    positions = b""
    if tiled.processor.axes:
        positions = tiled.processor.positions(placed.ids, placed.items).astype("<i4").tobytes()
    for setup in (Setup(overlap=False, radix_cache=False), Setup(chunk_tokens=7, page_size=4, media_rows=96)):
        engine = InProcess(tiled.model, VOCAB, setup)
        engine.features |= features
        for _ in range(2):
            asked = engine.submit(placed.ids.tolist(), GREEDY, media=placed.items, positions=positions)
            (answer,) = engine.finish([asked])
            assert answer.tokens == out[0, len(placed.ids) :].tolist()
        assert answer.end is not None
        assert answer.end.media_tokens["video"] == sum(item.count for item in video.processed.items)
        assert not setup.radix_cache or answer.end.cached_tokens > len(placed.ids) - 5


@pytest.mark.parametrize("name", ["glm4v", "glm46v"])
def test_an_image_among_frames_of_glm(name: str) -> None:
    """transformers' processor tells them apart, though its model does not."""
    tiled = load_tiled(name)
    assert tiled.family.video is not None
    image = Image.fromarray(noise(24, 40))
    text = f"{tiled.family.video.mark} or {tiled.family.mark}"
    theirs = tiled.theirs(text, [image], **film())
    media = [prepared(name, image)[0], video_of(name)[0]]
    placer = Placer(tiled.processor, tiled.tokenizer)
    spelled = tiled.tokenizer.encode(placer.spelled(text, media), True)
    placed = placer.place_spelled(spelled, placer.ordered(text, media))
    assert placed.ids.tolist() == theirs["input_ids"][0].tolist()
    axes, _ = tiled.reference.model.get_rope_index(
        theirs["input_ids"], theirs["mm_token_type_ids"], theirs["image_grid_thw"], theirs["video_grid_thw"]
    )
    assert tiled.processor.positions(placed.ids, placed.items).tolist() == axes[:, 0].tolist()
    with pytest.raises(InvalidRequest, match="share a placeholder"):
        placer.place_ids(placed.ids, media)


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_those_of_transformers(name: str) -> None:
    tiled = load_tiled(name)
    assert tiled.family.video is not None
    theirs = on_pillow(tiled.family.video.path)(**tiled.family.video.settings)
    rng = np.random.default_rng(0)
    for _ in range(60):
        total, fps = int(rng.choice([3, 4, 17, 64, 240, 1800, 20_000])), float(rng.choice([1, 5, 23.976, 25, 59.94]))
        if (name.startswith("glm") and total / fps < 1) or (name == "kimi_k25" and fps < 2):
            continue  # transformers has no frame then, or too few
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        wanted = {"num_frames": theirs.num_frames} if name == "internvl" else {}
        found = tiled.processor.sample(VideoInfo(total=total, fps=fps, width=40, height=24), {})
        assert found == [int(at) for at in theirs.sample_frames(metadata, **wanted)], (total, fps)


def test_requests_choose_frames() -> None:
    info = VideoInfo(total=300, fps=30.0, width=100, height=100)
    for name in NAMES:
        processor = load_tiled(name).processor
        options = processor.options("video", {"num_frames": 2})
        assert len(processor.sample(info, options)) == 2, name
        assert len(processor.sample(info, processor.options("video", {"fps": 1.0, "max_frames": 2}))) == 2, name
        assert len(processor.sample(info, processor.options("video", {"fps": 0.2}))) == 2, name
        assert processor.options("image", {"num_frames": 2}) == {}, name
        with pytest.raises(InvalidRequest, match="num_frames"):
            processor.options("video", {"num_frames": 0})
        with pytest.raises(InvalidRequest, match="min_frames"):
            processor.options("video", {"min_frames": 2})


def test_numbers_in_words() -> None:
    """As the package num2words spells them."""
    words = {
        1: "one", 12: "twelve", 20: "twenty", 64: "sixty-four", 100: "one hundred", 110: "one hundred and ten",
        342: "three hundred and forty-two", 1000: "one thousand", 1001: "one thousand and one",
        1100: "one thousand, one hundred", 9999: "nine thousand, nine hundred and ninety-nine",
    }  # fmt: skip
    assert {number: number_in_words(number) for number in words} == words
