"""`bough bench images` with a tiny model: what it claims to measure is what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.bench import images
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
