"""`bough bench images` with a tiny model: what it claims to measure is what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.bench import images


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
    assert [each["patches"] for each in tell] == [one, one, one, 0, 8 * one, 8 * one]
    assert tell[0]["tokens"] == 20 + 64
    assert counts["same image"] == counts["new image"] == 3 * one, "two to warm up, and the one that is new"
    assert counts["8 requests with new images, first time"] == 11 * one
    assert counts["8 requests with new images"] == 19 * one
    assert all(each["ms"] > 0 for each in tell)

    file = tmp_path / "rows.jsonl"
    assert images.main(["--size", "tiny", "--repeats", "1", "--json", str(file)]) == 0
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == 6


def test_the_full_shape_is_the_goals() -> None:
    """An image of 6,256 patches and 1,564 positions."""
    from PIL import Image

    from bough.multimodal.families import processor_of

    config = {**images.FULL.config, "processor_config": {"image_processor": images.FULL.processor}}
    processor = processor_of(config)
    assert processor is not None
    _, (item,) = processor.image(Image.new("RGB", (images.FULL.width, images.FULL.height)), {})
    assert (item.cost, item.count) == (6256, 1564)
