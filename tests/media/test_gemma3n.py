"""Gemma 3n against transformers: spectra, what its encoder of sounds makes of them, and greedy answers. What timm's tower
makes of images was recorded; where timm is installed, it is compared anew (`write_gemma3n_golden.py`)."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_process import InProcess, Setup
from PIL import Image
from prompts import noise
from test_in_engine import NEW
from test_sound import sound
from tiny_gemma3n import (
    AUDIO_ID,
    EOA,
    EOI,
    EXTRACTOR,
    IMAGE_ID,
    IMAGES,
    SETTINGS,
    SOUNDS,
    golden,
    heard,
    load_gemma3n,
)
from tiny_vision import VOCAB

from bough.config.fields import Fields
from bough.config.gemma3n_media import read_gemma3n_media
from bough.config.usm import read_usm_spectrum
from bough.core.errors import BoughError, ConfigError
from bough.core.sampling import SamplingParams
from bough.layers.tower import TowerInput
from bough.models.registry import facts_of
from bough.multimodal.gemma3n import Gemma3nProcessor
from bough.multimodal.placing import Placed, Placer
from bough.multimodal.processor import Prepared
from bough.multimodal.usm_spectrum import usm_spectrum

IMAGE, AUDIO = "<image_soft_token>", "<audio_soft_token>"
ASKED: dict[str, tuple[str, list[int], list[int]]] = {
    "image": (f"see {IMAGE}what?", [0], []),
    "another image": (f"see {IMAGE}what?", [1], []),
    "sound": (f"hear {AUDIO}what?", [], [0]),
    "short sound": (f"hear {AUDIO}what?", [], [2]),
    "several images": (f"{IMAGE}{IMAGE} or {IMAGE}", [0, 1, 2], []),
    "interleaved": (f"a{IMAGE}b {AUDIO}c{AUDIO}\n{IMAGE} d", [2, 0], [1, 0]),
    "text": ("neither <end_of_image> nor <end_of_audio>", [], []),
}
"""Texts, and the numbers of their images and sounds."""


def media_of(case: str) -> list[tuple[Prepared, np.ndarray]]:
    """In the order of the text."""
    text, images, sounds = ASKED[case]
    tiny, left = load_gemma3n(), {IMAGE: iter(images), AUDIO: iter(sounds)}
    found = []
    for at in range(len(text)):
        for mark, take in ((IMAGE, tiny.image), (AUDIO, tiny.sound)):
            if text.startswith(mark, at):
                found.append(take(next(left[mark])))
    return found


@cache
def placed(case: str) -> Placed:
    tiny = load_gemma3n()
    media = [each for each, _ in media_of(case)]
    placer = Placer(tiny.processor, tiny.tokenizer)
    text = ASKED[case][0]
    if not media:
        return Placed(np.array(tiny.tokenizer.encode(text, True), np.int32), ())
    return placer.place_spelled(tiny.tokenizer.encode(placer.spelled(text, media), True), media)


def given(case: str) -> dict[str, torch.Tensor]:
    """What transformers' model takes beside ids; of images their numbers."""
    _, images, sounds = ASKED[case]
    found = heard(sounds) if sounds else {}
    return {**found, "pixel_values": torch.tensor(images)[:, None].float()} if images else found


@cache
def expected(case: str) -> list[int]:
    ids = torch.from_numpy(placed(case).ids.astype(np.int64))[None]
    out = load_gemma3n().reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0, **given(case),
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", ASKED)
def test_ids_are_transformers(case: str) -> None:
    """By its processor's own rule for each placeholder."""
    tiny = load_gemma3n()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.folder)
    text = ASKED[case][0]
    for kind, mark, count in (("image", IMAGE, 9), ("audio", AUDIO, 12)):
        around = f"\n\n<start_of_{kind}>{mark * count}<end_of_{kind}>\n\n"
        text = text.replace(mark, around)
    assert placed(case).ids.tolist() == tokenizer(text)["input_ids"]
    if media := [each for each, _ in media_of(case)]:
        by_ids = np.array(tiny.tokenizer.encode(ASKED[case][0], True), np.int32)
        again = Placer(tiny.processor, tiny.tokenizer).place_ids(by_ids, media)
        assert (again.ids.tolist(), again.items) == (placed(case).ids.tolist(), placed(case).items)


def test_images_are_timms() -> None:
    tiny = load_gemma3n()
    wanted = torch.tensor(golden()["features"])
    assert wanted.std() > 0.5
    assert (wanted[0] - wanted[1]).abs().max() > 0.1
    assert tiny.model.tower is not None
    made = [tiny.image(number) for number in range(len(IMAGES))]
    inputs = [TowerInput(torch.from_numpy(array), each.processed.items[0].grid) for each, array in made]
    with torch.no_grad():
        assert (tiny.model.tower(inputs).view(wanted.shape) - wanted).abs().max() < 1e-4
        assert (tiny.model.tower(inputs[1:2]) - wanted[1]).abs().max() < 1e-4


def test_the_published_tower_has_timms_tensors() -> None:
    """Names and shapes, in its own size."""
    from bough.models.gemma3n_mm import WEIGHTS
    from bough.models.mobilenet_v5 import MobileNetV5
    from bough.weights.slots import owners_of

    facts = read_gemma3n_media(Fields({})).seeing
    build = load_gemma3n().model.layers[0].attn  # any build would do
    del build
    assert facts.num_parameters() == 294_126_912


@pytest.mark.parametrize("case", [case for case in ASKED])
def test_answers_are_transformers(case: str) -> None:
    tiny = load_gemma3n()
    at = placed(case)
    if case in golden()["answers"]:
        assert expected(case)[:12] == golden()["answers"][case], "with timm's tower"
    for setup in (
        Setup(overlap=False, radix_cache=False, context_length=512),
        Setup(chunk_tokens=7, page_size=4, media_rows=96, step_patches=1, context_length=512),
    ):
        engine = InProcess(tiny.model, VOCAB, setup)
        engine.features |= {each.features.path: array for each, array in media_of(case)}
        for _ in range(2):
            sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
            (found,) = engine.finish([engine.submit(at.ids.tolist(), sampling, media=at.items)])
            assert found.tokens == expected(case)
        assert found.end is not None
        _, images, sounds = ASKED[case]
        counts = {"image": 9 * len(images), "audio": 12 * len(sounds)}
        assert found.end.media_tokens == {kind: count for kind, count in counts.items() if count}
        assert not setup.radix_cache or found.end.cached_tokens > len(at.ids) - 5


def test_answers_differ() -> None:
    assert len({tuple(expected(case)) for case in ASKED}) == len(ASKED)
