"""Qwen3-ASR against transformers: spectra, positions of sounds, tower outputs, greedy answers."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from in_process import InProcess, Setup
from seeing import CPU
from test_in_engine import GREEDY, NEW
from test_sound import sound
from tiny import SIZES, shake
from tiny_vision import EOS, VOCAB

from bough.config.hf import open_checkpoint
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed

AUDIO, RATE = 300, 16_000
EXTRACTOR = {"feature_size": 16, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400, "min_length": 8000}


@cache
def speaks() -> tuple[Any, Decoder, Any, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    config = transformers.Qwen3ASRConfig(
        text_config={
            **SIZES, "model_type": "qwen3", "vocab_size": VOCAB, "eos_token_id": EOS, "head_dim": 16,
            "tie_word_embeddings": False,
        },
        audio_config={
            "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 56,
            "output_dim": 48, "n_window_infer": 200, "downsample_hidden_size": 6,
        },
        audio_token_id=AUDIO, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(9)
    reference = transformers.Qwen3ASRForConditionalGeneration(config).eval()
    shake(reference)
    reference.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": EXTRACTOR}))
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=256)
    assert isinstance(model, Decoder)
    return reference, model, checkpoint, processor_of(checkpoint.config)


def test_answers_are_transformers() -> None:
    reference, model, checkpoint, processor = speaks()
    facts = facts_of(checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    extractor = transformers.Qwen3ASRFeatureExtractor(**EXTRACTOR)
    engine = InProcess(model, VOCAB, Setup(chunk_tokens=7, page_size=4, media_rows=96, step_patches=1))
    assert model.tower is not None
    answers = set()
    for number, samples in enumerate([sound(3.31), sound(0.2, seed=1), sound(1.0, seed=2)]):
        given = extractor(samples, sampling_rate=RATE, padding=True, return_attention_mask=True)
        mask = given["attention_mask"]
        array, items = processor.audio(samples, {})
        assert array.T.shape == given["input_features"][0].shape
        assert np.abs(array.T - given["input_features"][0].numpy()).max() < 1e-4
        assert sum(item.grid[0] for item in items) == int(mask.sum())
        where = Features(path=str(number), digest=bytes([number]) * 32, dtype="float32", shape=array.shape)
        processed = Processed(dtype="float32", shape=array.shape, items=items)
        medium = Prepared(kind="audio", digest=where.digest, processed=processed, features=where)
        placed = Placer(processor, None).place_ids(np.array([1, 2, AUDIO, 4, 5], np.int32), [medium])
        ids = torch.from_numpy(placed.ids.astype(np.int64))[None]
        beside = {"input_features": given["input_features"], "input_features_mask": mask}
        with torch.no_grad():
            wanted = reference.model.get_audio_features(**beside, return_dict=True).pooler_output
            inputs = [TowerInput(torch.from_numpy(array[item.first : item.last]), item.grid) for item in items]
            assert (model.tower(inputs) - wanted).abs().max() < 1e-4
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                eos_token_id=None, pad_token_id=0, **beside,
            )[0, ids.shape[1] :].tolist()  # fmt: skip
        engine.features[where.path] = array
        for _ in range(2):
            (found,) = engine.finish([engine.submit(placed.ids.tolist(), GREEDY, media=placed.items)])
            assert found.tokens == out
        answers.add(tuple(out))
    assert len(answers) == 3
