"""A tiny model that was trained on rendered scenes (`train_vision.py`): its answers are right, they follow the image, and
they stay however they are computed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import InProcess, Setup
from prompts import Prompt
from renders import QUESTIONS, Scene, draw_scene, render

from bough.config.hf import open_checkpoint
from bough.core.media import Features
from bough.core.sampling import SamplingParams
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed, Processor
from bough.tokenizer import Tokenizer
from bough.tokenizer.load import load_tokenizer

FOLDER = Path(__file__).parents[1] / "golden" / "vision"
PLAIN = Setup(overlap=False, radix_cache=False)
CHUNKED = Setup(chunk_tokens=7, page_size=4)


@dataclass(frozen=True)
class Trained:
    """The model, and what makes prompts for it."""

    model: Decoder
    processor: Processor
    tokenizer: Tokenizer
    end: int
    vocab: int

    def prompt(self, scene: Scene, question: str, *said: str) -> Prompt:
        """`said`: an answer and a question, and so on, before the last answer."""
        pixels = render(scene)
        array, items = self.processor.image(pixels, {})
        digest = repr(scene).encode()[-32:].rjust(32, b".")
        where = Features(path=repr(scene), digest=digest, dtype="uint8", shape=array.shape)
        processed = Processed(dtype="uint8", shape=array.shape, items=items)
        media = [Prepared(kind="image", digest=digest, processed=processed, features=where)]
        text = f"<|im_start|>user\n<image>{question}<|im_end|>\n<|im_start|>assistant\n"
        for answer, asked in zip(said[::2], said[1::2], strict=True):
            text += f"{answer}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        placer = Placer(self.processor, self.tokenizer)
        placed = placer.place_spelled(self.tokenizer.encode(placer.spelled(text, media), False), media)
        return Prompt(placed.ids.tolist(), placed.items, b"", {where.path: np.array(array)})

    def engine(self, setup: Setup) -> InProcess:
        return InProcess(self.model, self.vocab, setup)

    def ask(self, engine: InProcess, prompts: list[Prompt]) -> list[str]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=6, stop_token_ids=(self.end,))
        found = engine.finish([prompt.submit(engine, sampling) for prompt in prompts])
        return [self.tokenizer.decode([token for token in each.tokens if token != self.end]) for each in found]


@cache
def trained() -> Trained:
    checkpoint = open_checkpoint(str(FOLDER))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=256)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    assert processor is not None
    tokenizer = load_tokenizer(FOLDER)
    (end,) = tokenizer.encode("<|im_end|>", False)
    return Trained(model, processor, tokenizer, end, checkpoint.config["text_config"]["vocab_size"])


def asked(count: int) -> list[tuple[Scene, str, str]]:
    """Scenes that training never draws from, what is asked about each, and the kind of the question."""
    found = []
    for number in range(count):
        rng = random.Random(f"asked {number}")
        kind = rng.choice(list(QUESTIONS))
        found.append((draw_scene(rng), rng.choice(QUESTIONS[kind]), kind))
    return found


def test_it_is_small() -> None:
    assert sum(each.numel() for each in trained().model.parameters()) <= 2_000_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4 * 2**20


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.long)])
def test_answers_about_new_scenes_are_right(count: int) -> None:
    seen = trained()
    engine = seen.engine(PLAIN)
    answers = seen.ask(engine, [seen.prompt(scene, question) for scene, question, _ in asked(count)])
    right = [answer == scene.answer(kind) for answer, (scene, _, kind) in zip(answers, asked(count), strict=True)]
    assert sum(right) >= 0.95 * count, f"{sum(right)} of {count}"
    assert len(set(answers)) >= 18, "digits, shapes and colours are all named"


def test_the_answer_is_that_of_the_image() -> None:
    """The text stays, the image is swapped: the answer becomes the other image's."""
    seen = trained()
    engine = seen.engine(Setup())
    kinds = [kind for _, _, kind in asked(36)]
    pairs, texts = [], []
    for number, (scene, question, kind) in enumerate(asked(36)):
        rng = random.Random(f"swapped {number}")
        other = draw_scene(rng)
        while other.answer(kind) == scene.answer(kind):
            other = draw_scene(rng)
        pairs.append((scene, other))
        texts.append(question)
    both = [
        seen.ask(engine, [seen.prompt(pair[side], text) for pair, text in zip(pairs, texts, strict=True)])
        for side in (0, 1)
    ]
    changed = sum(before != after for before, after in zip(*both, strict=True))
    assert changed >= 34, f"{changed} of 36"
    followed = sum(
        after == pair[1].answer(kind) for after, pair, kind in zip(both[1], pairs, kinds, strict=True)
    )  # fmt: skip
    assert followed >= 34, f"{followed} of 36"


def test_answers_stay_when_chunked_and_when_cached() -> None:
    seen = trained()
    prompts = [seen.prompt(scene, question) for scene, question, _ in asked(24)]
    plain = seen.ask(seen.engine(PLAIN), prompts)
    chunked = seen.engine(CHUNKED)
    assert seen.ask(chunked, prompts) == plain
    account = chunked.queues.media
    assert account is not None
    encoded = account.counters.tower_tokens
    assert encoded > 0
    assert seen.ask(chunked, prompts) == plain, "from the cache"
    assert account.counters.tower_tokens == encoded, "no image is encoded twice"


def test_a_second_question_finds_the_image_in_the_cache() -> None:
    seen = trained()
    engine = seen.engine(Setup(page_size=4))
    account = engine.queues.media
    assert account is not None
    scenes = [scene for scene, _, _ in asked(30)]
    first, second = QUESTIONS["digit"][0], QUESTIONS["colour"][0]
    digits = seen.ask(engine, [seen.prompt(scene, first) for scene in scenes])
    encoded = account.counters.tower_tokens
    colours = seen.ask(
        engine, [seen.prompt(scene, first, digit, second) for scene, digit in zip(scenes, digits, strict=True)]
    )
    assert account.counters.tower_tokens == encoded
    right = sum(colour == scene.colour for colour, scene in zip(colours, scenes, strict=True))
    assert right >= 28, f"{right} of 30"
