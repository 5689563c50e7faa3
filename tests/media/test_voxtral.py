"""Voxtral against transformers: windows of a sound as items, tower outputs, greedy answers."""

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
from seeing import CPU
from test_in_engine import GREEDY, NEW
from test_sound import sound
from tiny import SIZES, shake
from tiny_vision import EOS, VOCAB, make_tokenizer

from bough.config.hf import open_checkpoint
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed

AUDIO, BEGIN = 300, 301
SPECIAL = {EOS: "<|endoftext|>", AUDIO: "[AUDIO]", BEGIN: "[BEGIN_AUDIO]"}
RATE, SECONDS, POSITIONS = 16_000, 2, 25
EXTRACTOR = {"feature_size": 8, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400, "chunk_length": SECONDS}


@cache
def voxtral() -> tuple[Any, Decoder, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    config = transformers.VoxtralConfig(
        text_config={**SIZES, "model_type": "llama", "vocab_size": VOCAB, "eos_token_id": EOS, "head_dim": 16},
        audio_config={
            "model_type": "voxtral_encoder", "num_mel_bins": 8, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "intermediate_size": 128, "max_source_positions": 4 * POSITIONS,
        },
        audio_token_id=AUDIO, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(11)
    reference = transformers.VoxtralForConditionalGeneration(config).eval()
    shake(reference)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    make_tokenizer(folder, SPECIAL)
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=256)
    assert isinstance(model, Decoder)
    return reference, model, checkpoint


def spectra(sounds: list[np.ndarray]) -> torch.Tensor:
    """As transformers' processor makes them: each sound with silence to whole windows, then cut."""
    extractor = transformers.WhisperFeatureExtractor(**EXTRACTOR)
    found = []
    for samples in sounds:
        made = extractor(
            samples, sampling_rate=RATE, return_tensors="pt", padding=True, truncation=False,
            pad_to_multiple_of=RATE * SECONDS,
        )["input_features"]  # fmt: skip
        found.append(made[0].reshape(8, -1, 100 * SECONDS).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize(
    "setup", [Setup(overlap=False, radix_cache=False), Setup(chunk_tokens=7, page_size=4, media_rows=96)]
)
def test_answers_are_transformers(setup: Setup) -> None:
    reference, model, checkpoint = voxtral()
    processor = processor_of(checkpoint.config)
    assert processor is not None
    sounds = [sound(0.7), sound(3.1, seed=1)]
    media, features = [], {}
    for number, samples in enumerate(sounds):
        array, items = processor.audio(samples, {})
        digest = bytes([number]) * 32
        where = Features(path=str(number), digest=digest, dtype="float32", shape=array.shape)
        processed = Processed(dtype="float32", shape=array.shape, items=items)
        media.append(Prepared(kind="audio", digest=digest, processed=processed, features=where))
        features[where.path] = array
    asked = np.array([1, 2, BEGIN, AUDIO, 3, BEGIN, AUDIO, 4, 5], np.int32)
    placed = Placer(processor, None).place_ids(asked, media)
    assert len(placed.items) == 3
    assert int((placed.ids == AUDIO).sum()) == 3 * POSITIONS

    given = spectra(sounds)
    ours = np.concatenate([features["0"], features["1"]]).reshape(3, -1, 8).transpose(0, 2, 1)
    assert np.abs(given.numpy() - ours).max() < 1e-4
    ids = torch.from_numpy(placed.ids.astype(np.int64))[None]
    with torch.no_grad():
        wanted = reference.generate(
            ids, input_features=given, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        hidden = reference.model.audio_tower(given).last_hidden_state.reshape(-1, 128)
        tower = reference.model.multi_modal_projector(hidden)
        assert model.tower is not None
        inputs = [
            TowerInput(torch.from_numpy(features[item.features.path][item.first : item.last].copy()), item.grid)
            for item in placed.items
        ]
        assert (model.tower(inputs) - tower).abs().max() < 1e-4
    assert tower.std() > 0.01
    engine = InProcess(model, VOCAB, setup)
    engine.features |= features
    for _ in range(2):
        (found,) = engine.finish([engine.submit(placed.ids.tolist(), GREEDY, media=placed.items)])
        assert found.tokens == wanted
    assert found.end is not None
    assert found.end.media_tokens == {"audio": 3 * POSITIONS}


def test_facts_count_the_parameters() -> None:
    _, model, checkpoint = voxtral()
    facts = facts_of(checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert facts.tower is not None
    assert facts.tower.max_positions == POSITIONS
