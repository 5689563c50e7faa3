"""`bough bench images` with a tiny model: what it claims to measure is what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.bench import image_question, images
from bough.core.media import Features, MediaItem


def test_new_and_repeated_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[str, int]] = []
    tell: list[dict[str, Any]] = []
    monkeypatch.setattr(images, "print", lambda *_, **__: None, raising=False)
    seeing = images.SeeingEngine(images.TINY, 0)
    account = seeing.engine.queues.media
    assert account is not None

    def row(found: dict[str, Any]) -> None:
        tell.append(found)
        computed.append((found["workload"], account.counters.tower_tokens))

    images.measure(seeing, 1, row)
    counts = dict(computed)
    one = 80
    *tell, beside = tell
    assert [each["patches"] for each in tell] == [one, 0, one, 0, 8 * one, 8 * one, tell[-1]["patches"]]
    assert tell[-1]["workload"] == "video of 4 frames"
    assert tell[-1]["patches"] == 2 * 22 * 26, "the least that the family computes of a frame, twice two of them"
    assert beside["ratio"] == pytest.approx(beside["p99_tpot_ms"] / beside["p99_tpot_alone_ms"], rel=0.2)
    assert all(each["floor_ms"] > 0 for each in tell if each["workload"] != "same image")
    assert tell[0]["tokens"] == 20 + 64
    assert counts["same image"] == counts["new image"] == 3 * one, "two to warm up, and the one that is new"
    assert counts["8 requests with new images, first time"] == 11 * one
    assert counts["8 requests with new images"] == 19 * one
    assert all(each["ms"] > 0 for each in tell)

    file = tmp_path / "rows.jsonl"
    assert images.main(["--size", "tiny", "--repeats", "1", "--json", str(file)]) == 0
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 8


def test_the_full_shape_is_the_goals() -> None:
    """An image of 6,256 patches and 1,564 positions."""
    from PIL import Image

    from bough.multimodal.families import processor_of

    config = {**images.FULL.config, "processor_config": {"image_processor": images.FULL.processor}}
    processor = processor_of(config)
    assert processor is not None
    _, (item,) = processor.image(Image.new("RGB", (images.FULL.width, images.FULL.height)), {})
    assert (item.cost, item.count) == (6256, 1564)


def test_the_full_shape_takes_the_flops_of_its_goal() -> None:
    """One image and 64 tokens of text: 30.7 TFLOP, as the goal of 54 ms counts them."""
    features = Features(path="", digest=b"", dtype="uint8", shape=())
    item = MediaItem(
        key=b"", kind="image", start=0, length=1564, token=0, count=1564, cost=6256, grid=(), features=features
    )
    assert images.FULL.flops([item], [1564 + 64]) == pytest.approx(30.7e12, rel=0.01)


@pytest.mark.parametrize(("edge", "tiles"), [(512, 1), (1024, 5), (2048, 13)])
def test_tiles_of_the_small_shape(tmp_path: Path, edge: int, tiles: int) -> None:
    from PIL import Image

    from bough.config.hf import open_checkpoint
    from bough.multimodal.families import processor_of
    from bough.multimodal.processor import Processed
    from bough.tokenizer.load import load_tokenizer

    image_question.write_checkpoint(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    processor = processor_of(checkpoint.config)
    assert processor is not None
    array, items = processor.image(Image.new("RGB", image_question.SIZE), {"longest_edge": edge})
    assert array.shape == (tiles, 512, 512, 3)
    pieces = processor.pieces("image", Processed(dtype="uint8", shape=array.shape, items=items))
    tokenizer = load_tokenizer(checkpoint)
    assert all(len(tokenizer.encode(each, False)) <= 2 for each in pieces if isinstance(each, str)), "marks are tokens"
    assert items[0].count == 64 * tiles


def test_flops_of_the_small_shape() -> None:
    """A tile: 12 blocks of 7.1 M weights over 1,024 patches, their attention, and the projection of 64 positions."""
    tile = 12 * (2 * 1024 * 7_077_888 + 4 * 768 * 1024**2) + 2 * 64 * 12_288 * 576
    assert image_question.flops(13, 0) == 13 * tile
    assert image_question.flops(0, 1) == pytest.approx(2 * 106.2e6, rel=0.01)


@pytest.mark.e2e
def test_a_question_to_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes are cut down; the way is the same."""
    for config, name, value in (
        (image_question.TEXT, "num_hidden_layers", 1),
        (image_question.VISION, "num_hidden_layers", 1),
        (image_question.VISION, "intermediate_size", 64),
    ):
        monkeypatch.setitem(config, name, value)
    rows: list[dict[str, Any]] = []
    image_question.measure(1, 0, rows.append, threads=1, edges=(512,))
    new, same = rows
    assert (new["image_tokens"], new["tokens"]) == (same["image_tokens"], same["tokens"])
    assert new["image_tokens"] == 64
    assert 0 < new["first_token_s"] <= new["s"]
    assert same["workload"] == "the same image in 1 tile"
    assert same["first_token_s"] < new["first_token_s"], "it is neither encoded nor prefilled"
