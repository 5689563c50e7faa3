"""Families beside Qwen's through real processes: images that are prefilled whole, and sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prompts import noise
from test_sound import hearing, sound
from tiny_tiles import load_tiled

from bough.offline import Engine

pytestmark = pytest.mark.e2e
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


def twice(folder: Path, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = Engine(
        model_path=str(folder), dtype="float32", device="cpu", cpu_threads=1, context_length=256, custom_kernels=False,
        chunked_prefill_size=16, page_size=4,
    )  # fmt: skip
    try:
        first, again = (engine.generate(sampling_params=GREEDY, **asked) for _ in range(2))
    finally:
        engine.shutdown()
    return first, again


def test_images_of_gemma3() -> None:
    tiled = load_tiled("gemma3")
    images = [Image.fromarray(noise(24, 40)), np.asarray(noise(37, 20))]
    text = "see <start_of_image> and a few more words, then <start_of_image>?"
    first, again = twice(tiled.folder, prompt=text, image_data=images)
    assert first["text"] == again["text"]
    assert first["meta_info"]["image_tokens"] == 8
    assert again["meta_info"]["cached_tokens"] >= again["meta_info"]["prompt_tokens"] - 8


def test_sounds_of_qwen2_audio() -> None:
    text = "hear <|audio_bos|><|AUDIO|><|audio_eos|> now"
    first, again = twice(hearing()[0], prompt=text, audio_data=sound(0.7))
    assert first["text"] == again["text"]
    assert first["meta_info"]["audio_tokens"] == 17
    assert again["meta_info"]["cached_tokens"] > 20
