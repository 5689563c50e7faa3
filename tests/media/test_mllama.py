"""Llama 3.2 Vision against transformers: tiles, the tower, and answers of requests with one image, several, and none.

transformers lets tokens that no image precedes attend to all images, and masks only what follows; Meta's model masks both.
Its cross attention is masked here, too (`masked`).
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_process import InProcess, Setup
from PIL import Image
from prompts import Prompt, make_prompt, noise
from seeing import CPU
from test_in_engine import GREEDY, NEW
from tiny import SIZES, shake
from tiny_vision import EOS, VOCAB
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from bough.config.hf import open_checkpoint
from bough.core.messages import Abort, LogprobSpec
from bough.core.sampling import SamplingParams
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of

IMAGE = VOCAB - 8
"""The first id behind those that have logits."""
SETTINGS = {
    "size": {"height": 16, "width": 16}, "max_image_tiles": 4, "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}  # fmt: skip
TOKENS = 17
"""Of a tile."""
SHAPES = [(9, 12), (24, 40), (37, 20), (16, 70), (90, 11), (200, 150), (12, 30)]


def masked(reference: Any) -> None:
    """Tokens that see no image get nothing from cross attention."""
    for number in reference.config.text_config.cross_attention_layers:
        layer, seen = reference.model.language_model.layers[number], {}

        def remember(_: Any, args: Any, kwargs: Any, seen: dict[str, Any] = seen) -> None:
            seen["mask"] = kwargs["full_text_row_masked_out_mask"]

        def mask(_: Any, args: Any, out: Any, seen: dict[str, Any] = seen) -> Any:
            return out[0] * seen["mask"][:, 0], out[1]

        layer.register_forward_pre_hook(remember, with_kwargs=True)
        layer.cross_attn.register_forward_hook(mask)


@cache
def mllama() -> tuple[Any, Decoder, Any, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    config = transformers.MllamaConfig(
        text_config={
            **SIZES, "vocab_size": IMAGE, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "eos_token_id": EOS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 3, "num_global_layers": 2, "attention_heads": 2, "image_size": 16,
            "intermediate_size": 56, "patch_size": 4, "intermediate_layers_indices": [0, 2], "vision_output_dim": 96,
        },
        image_token_index=IMAGE, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(3)
    reference = transformers.MllamaForConditionalGeneration(config).eval()
    shake(reference)
    with torch.no_grad():
        for number in (1, 3):
            layer = reference.model.language_model.layers[number]
            layer.cross_attn_attn_gate.fill_(1.5)
            layer.cross_attn.o_proj.weight *= 8
            layer.cross_attn.q_norm.weight *= 4
    masked(reference)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=256)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    return reference, model, checkpoint, processor


def theirs(images: list[np.ndarray]) -> Any:
    return MllamaImageProcessorPil(**SETTINGS)([[Image.fromarray(each) for each in images]], return_tensors="pt")


def test_tiles_and_tower_are_transformers() -> None:
    reference, model, checkpoint, processor = mllama()
    images = [noise(*shape) for shape in SHAPES]
    given = theirs(images)
    found = [processor.image(Image.fromarray(each), {}) for each in images]
    assert model.tower is not None
    for (pixels, (item,)), wanted, count in zip(found, given["pixel_values"][0], given["num_tiles"][0], strict=True):
        assert item.grid[0] == len(pixels) == count
        assert item.count == TOKENS * count
        ours = model.tower.normalise(torch.from_numpy(pixels)).permute(0, 3, 1, 2)
        assert (ours - wanted[:count]).abs().max() < 1e-5
    assert {item.grid for _, (item,) in found} > {(1, 1, 1), (4, 2, 2), (4, 1, 4), (2, 1, 2)}
    tiles = [(torch.from_numpy(pixels), item.grid) for pixels, (item,) in found]
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    with torch.no_grad():
        features = reference.model.vision_model(**{name: given[name] for name in names}).last_hidden_state[0]
        wanted = torch.cat([each[:count].flatten(0, 1) for each, (_, (count, *_)) in zip(features, tiles, strict=True)])
        wanted = reference.model.multi_modal_projector(wanted)
        ours = model.tower([TowerInput(*each) for each in tiles])
    assert wanted.std() > 0.1
    assert (ours - wanted).abs().max() < 1e-4
    facts = facts_of(checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert facts.tower is not None
    assert facts.tower.max_positions == max(item.count for _, (item,) in found)


ONE, OTHER, WIDE = noise(24, 40), noise(24, 40, seed=1), noise(16, 70)
LONG = [40 + number % 60 for number in range(45)]
ASKED: tuple[tuple[list[int], list[np.ndarray]], ...] = (
    ([IMAGE, 5, 6, 9, 10, 11], [ONE]),
    ([5, 6, 7, IMAGE, 9, 10, 11], [ONE]),
    ([5, 6, 7, IMAGE, 9, 10, 11], [OTHER]),
    ([5, 6, 7, 8, 9], []),
    ([5, IMAGE, IMAGE, 9, 10, 11], [ONE, WIDE]),
    ([5, 6, IMAGE, *LONG, IMAGE, IMAGE, 10, IMAGE, 11, 12], [WIDE, ONE, OTHER, noise(9, 12)]),
)


@cache
def prompts() -> tuple[Prompt, ...]:
    return tuple(make_prompt(mllama()[3], ids, images) for ids, images in ASKED)


@cache
def expected() -> list[list[int]]:
    answers = []
    for ids, images in ASKED:
        beside = {}
        if images:
            beside = dict(theirs(images))
            sees = [get_cross_attention_token_mask(ids, IMAGE)]
            mask = convert_sparse_cross_attention_mask_to_dense(sees, beside.pop("num_tiles"), 4, len(ids))
            beside["cross_attention_mask"] = torch.from_numpy(mask)
        given = torch.tensor([ids])
        out = mllama()[0].generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, **beside,
        )  # fmt: skip
        answers.append(out[0, len(ids) :].tolist())
    return answers


SETUPS = {
    "plain": Setup(overlap=False, radix_cache=False),
    "in fives": Setup(chunk_tokens=5, page_size=4),
    "one at a time in a small store": Setup(chunk_tokens=13, page_size=8, media_rows=384, step_patches=1),
    "cpu attention": Setup(page_size=16, chunk_tokens=11, attention="cpu", shared_spans=False),
}


def ask(engine: InProcess, **extra: Any) -> list[int]:
    return [prompt.submit(engine, GREEDY, **extra) for prompt in prompts()]


@pytest.mark.parametrize("setup", SETUPS)
def test_answers_are_transformers_and_again_from_the_cache(setup: str) -> None:
    wanted = expected()
    assert len({tuple(each) for each in wanted}) == len(wanted), "images change answers, and so does where they stand"
    engine = InProcess(mllama()[1], VOCAB, SETUPS[setup])
    encoded = 0
    for turn in range(2):
        answers = engine.finish(ask(engine))
        assert [answer.tokens for answer in answers] == wanted
        assert engine.queues.media is not None
        if turn and SETUPS[setup].radix_cache:
            assert engine.queues.media.counters.tower_tokens == encoded
            if SETUPS[setup].page_size == 4:
                assert all(answer.end is not None and answer.end.cached_tokens >= 4 for answer in answers)
        encoded = engine.queues.media.counters.tower_tokens
    assert answers[0].end is not None
    assert answers[0].end.media_tokens == {"image": 4 * TOKENS}


def test_after_retractions_and_aborts() -> None:
    engine = InProcess(mllama()[1], VOCAB, Setup(page_size=4, overlap=True))
    answers = engine.finish_with_a_retraction(ask(engine))
    assert [answer.tokens for answer in answers] == expected()
    assert engine.queues.counters.retractions >= 3
    gone = prompts()[-1].submit(engine, GREEDY)
    engine.loop.turn()
    engine.mailbox.incoming.append(Abort(gone, "gone"))
    engine.finish([gone])
    assert engine.cache.num_available == engine.cache.total


def test_marks_of_images_are_scored_and_never_sampled() -> None:
    engine = InProcess(mllama()[1], VOCAB, Setup(page_size=4))
    wild = SamplingParams(temperature=50.0, max_new_tokens=60, repetition_penalty=1.1)
    (answer,) = engine.finish([prompts()[1].submit(engine, wild, logprobs=LogprobSpec(start=0))])
    assert max(answer.tokens) < IMAGE
    assert answer.prompt_logprobs is not None
    assert all(np.isfinite(each) for each in answer.prompt_logprobs.logprobs if each is not None)


def test_more_images_than_there_is_room_for_are_refused() -> None:
    engine = InProcess(mllama()[1], VOCAB, Setup(page_size=4, media_rows=2048, context_length=128))
    images = [noise(70, 70, seed) for seed in range(16)]
    ids = (make_prompt(mllama()[3], [IMAGE, 7] * count, images[:count]).submit(engine) for count in (15, 16))
    kept, refused = engine.finish(list(ids))
    assert refused.end is not None
    assert "at most 1,024 are read" in refused.end.message
    assert kept.tokens
