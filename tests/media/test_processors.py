"""Our processors against transformers': pixel values, token ids and positions, from the same files and texts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from prompts import noise
from seeing import NAMES, load
from tiny_vision import FAMILIES, PIXELS, make_tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from bough.core.errors import InvalidRequest
from bough.core.media import Features
from bough.multimodal.errors import MediaError
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed
from bough.multimodal.qwen_vl import resized
from bough.multimodal.worker import _decode
from bough.tokenizer.load import load_tokenizer

SHAPES = [(24, 40), (37, 61), (5, 9), (200, 20), (90, 70)]


def png(pixels: np.ndarray, **extra: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **extra)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(made)
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def theirs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' processor of a family, without the video half, which needs torchvision."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def make(name: str) -> Any:
        prefix = FAMILIES[name].prefix.removesuffix("Moe").replace("Qwen3_5", "Qwen3VL")  # whose processor it has
        images = Qwen2VLImageProcessorPil(**FAMILIES[name].processor)
        return getattr(transformers, f"{prefix}Processor")(image_processor=images, tokenizer=tokenizer)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_pixels_of_a_text_with_images(name: str, theirs: Any, folder: Path) -> None:
    seen = load(name)
    files = [png(noise(*shape)) for shape in SHAPES]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"two {mark}{mark} and\n{mark} then {mark}{mark}?"
    wanted = theirs(name)(text=[text], images=[Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")

    media, pixels = [], []
    for number, file in enumerate(files):
        array, items = seen.processor.image(_decode(file), {})
        pixels.append(seen.tower._cut(torch.from_numpy(np.array(array))))
        digest = bytes([number]) * 32
        where = Features(path=str(number), digest=digest, dtype="uint8", shape=array.shape)
        processed = Processed(dtype="uint8", shape=array.shape, items=items)
        media.append(Prepared(kind="image", digest=digest, processed=processed, features=where))
    tokenizer = load_tokenizer(folder)
    placer = Placer(seen.processor, tokenizer)
    placed = placer.place_spelled(tokenizer.encode(placer.spelled(text, media), True), media)
    assert placed.ids.tolist() == wanted["input_ids"][0].tolist()
    assert [item.grid for item in placed.items] == [tuple(grid) for grid in wanted["image_grid_thw"].tolist()]
    assert (torch.cat(pixels) - wanted["pixel_values"]).abs().max() < 1e-5
    by_ids = placer.place_ids(np.array(tokenizer.encode(text, True), np.int32), media)
    assert by_ids.ids.tolist() == placed.ids.tolist()
    assert by_ids.items == placed.items
    again = placer.place_ids(placed.ids, media)
    assert again == placed, "ids that have all placeholders stay as they are"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "1", "CMYK"])
def test_other_modes_become_what_transformers_makes_of_them(mode: str) -> None:
    image = Image.fromarray(noise(20, 30)).convert("RGBA")
    image.putalpha(Image.fromarray(noise(20, 30)[:, :, 0]))
    image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG", **({"quality": 95} if mode == "CMYK" else {}))
    seen = load("qwen2_vl")
    wanted = Qwen2VLImageProcessorPil(**FAMILIES["qwen2_vl"].processor)(
        images=[Image.open(io.BytesIO(file.getvalue()))], return_tensors="pt"
    )["pixel_values"]
    array, _ = seen.processor.image(_decode(file.getvalue()), {})
    assert (seen.tower._cut(torch.from_numpy(np.array(array))) - wanted).abs().max() < 1e-5


def test_a_picture_is_turned_upright() -> None:
    pixels = noise(16, 40)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    assert _decode(file.getvalue()).size == (16, 40)


def test_settings_of_requests_are_bounded_by_the_server() -> None:
    processor = load("qwen2_vl").processor
    most = PIXELS["max_pixels"]
    assert processor.options("image", {"max_pixels": 1000}) == {"max_pixels": 1000}
    assert processor.options("image", {"size": {"longest_edge": 640}}) == {"max_pixels": 640}
    for bad in (
        {"max_pixels": most + 1},
        {"max_pixels": "1"},
        {"min_pixels": 0},
        {"nonsense": 1},
        {"max_pixels": True},
    ):
        with pytest.raises(InvalidRequest, match=r"mm_processor_kwargs|pixels"):
            processor.options("image", bad)
    small, _ = processor.image(Image.fromarray(noise(60, 60)), {"max_pixels": 256})
    assert small.shape[1] * small.shape[2] <= 256


def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    for _ in range(300):
        height, width = (int(each) for each in rng.integers(1, 3000, 2))
        if max(height, width) > 200 * min(height, width):
            continue
        assert resized(height, width, 28, 3136, 1003520) == smart_resize(height, width, 28, 3136, 1003520)
    with pytest.raises(MediaError, match="200 times"):
        resized(10, 2001, 28, 3136, 1003520)
