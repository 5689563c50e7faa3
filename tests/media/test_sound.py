"""Sounds: spectra against transformers' feature extractor, decoding, and Qwen2-Audio's ids, features and greedy answers."""

from __future__ import annotations

import io
import json
import tempfile
import wave
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
from tiny import SIZES, shake
from tiny_vision import EOS, VOCAB, make_tokenizer
from transformers import WhisperFeatureExtractor
from transformers.processing_utils import ProcessorMixin

from bough.config.hf import open_checkpoint
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.errors import MediaError
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed
from bough.multimodal.sound import read_sound, sniff_sound, wav_bytes
from bough.multimodal.spectrum import log_mel
from bough.tokenizer.load import load_tokenizer

AUDIO = 300
RATE, HOP, SECONDS = 16_000, 160, 2
SPECIAL = {EOS: "<|endoftext|>", AUDIO: "<|AUDIO|>", 301: "<|audio_bos|>", 302: "<|audio_eos|>"}
EXTRACTOR = {
    "feature_size": 8, "sampling_rate": RATE, "hop_length": HOP, "n_fft": 400, "chunk_length": SECONDS,
    "return_attention_mask": True,
}  # fmt: skip


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    rng = np.random.default_rng(seed)
    at = np.arange(int(seconds * rate)) / rate
    made = 0.4 * np.sin(2 * np.pi * (200 + 100 * seed) * at) + 0.1 * rng.standard_normal(len(at))
    return made.astype(np.float32)


@pytest.mark.parametrize("mels", [80, 128])
def test_spectra_are_transformers(mels: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=mels)
    samples = sound(2.3, rate=16_000)
    wanted = extractor(samples, sampling_rate=16_000, return_tensors="np", padding="max_length")["input_features"][0]
    whole = np.zeros(480_000, np.float32)
    whole[: len(samples)] = samples
    ours = log_mel(whole, mels=mels, rate=16_000, window=400, hop=160)
    assert ours.shape == (3000, mels)
    assert np.abs(ours.T - wanted).max() < 1e-4


def pcm(samples: np.ndarray, rate: int, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.repeat(samples, channels) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def test_wav_files() -> None:
    samples = sound(0.5, rate=16_000)
    for file in (pcm(samples, 16_000), pcm(samples, 16_000, 2), wav_bytes(samples, 16_000)):
        assert sniff_sound(file) == "wav"
        assert np.abs(read_sound(file, "wav", 16_000, 1.0) - samples).max() < 1e-4
    with pytest.raises(MediaError, match=r"at most 0\.25 s"):
        read_sound(pcm(samples, 16_000), "wav", 16_000, 0.25)
    for broken in (b"RIFF....WAVE", b"RIFF....WAVEfmt \x10\0\0\0", pcm(samples[:0], 16_000)):
        with pytest.raises(MediaError, match="can't be decoded"):
            read_sound(broken, "wav", 16_000, 1.0)


def test_other_files_and_rates() -> None:
    av = pytest.importorskip("av", reason="PyAV is an extra")
    samples = sound(1.0, rate=8000)
    again = read_sound(pcm(samples, 8000), "wav", 16_000, 2.0)
    assert abs(len(again) - 16_000) < 200
    assert np.corrcoef(again[200:15_000:2], samples[100:7500])[0, 1] > 0.9
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        stream = out.add_stream("flac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray((sound(0.5, rate=16_000) * 32767).astype(np.int16)[None], "s16", "mono")
        frame.sample_rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode()]:
            out.mux(packet)
    assert sniff_sound(file.getvalue()) == "flac"
    assert np.abs(read_sound(file.getvalue(), "flac", 16_000, 1.0) - sound(0.5, rate=16_000)).max() < 1e-3


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match=r"install bough\[video\]"):
        read_sound(pcm(sound(0.1), 8000), "wav", 16_000, 1.0)


@cache
def hearing() -> tuple[Path, Any, Decoder, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    config = transformers.Qwen2AudioConfig(
        text_config={**SIZES, "model_type": "qwen2", "vocab_size": VOCAB, "eos_token_id": EOS},
        audio_config={
            "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2,
            "encoder_attention_heads": 2, "encoder_ffn_dim": 56, "max_source_positions": RATE * SECONDS // HOP // 2,
        },
        audio_token_index=AUDIO, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(7)
    reference = transformers.Qwen2AudioForConditionalGeneration(config).eval()
    shake(reference)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    make_tokenizer(folder, SPECIAL)
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=512)
    assert isinstance(model, Decoder)
    return folder, reference, model, checkpoint


def test_ids_features_and_answers_are_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reference, model, checkpoint = hearing()
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    theirs = transformers.Qwen2AudioProcessor(
        WhisperFeatureExtractor(**EXTRACTOR), transformers.AutoTokenizer.from_pretrained(folder)
    )
    sounds = [sound(0.53), sound(1.2, seed=1), sound(2.0, seed=2)]
    mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    text = f"Audio 1: {mark}\nand {mark}{mark} what?"
    wanted = theirs(text=[text], audio=sounds, sampling_rate=RATE, return_tensors="pt")

    processor = processor_of(checkpoint.config)
    assert processor is not None
    media, features = [], {}
    for number, samples in enumerate(sounds):
        array, items = processor.audio(samples, {})
        digest = bytes([number]) * 32
        where = Features(path=str(number), digest=digest, dtype="float32", shape=array.shape)
        processed = Processed(dtype="float32", shape=array.shape, items=items)
        media.append(Prepared(kind="audio", digest=digest, processed=processed, features=where))
        features[where.path] = array
    tokenizer = load_tokenizer(folder)
    placer = Placer(processor, tokenizer)
    placed = placer.place_spelled(tokenizer.encode(placer.spelled(text, media), True), media)
    ids = wanted["input_ids"]
    assert placed.ids.tolist() == ids[0].tolist()

    given = {"input_features": wanted["input_features"], "feature_attention_mask": wanted["feature_attention_mask"]}
    with torch.no_grad():
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, **given,
        )  # fmt: skip
        logits = reference(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits
        assert model.tower is not None
        ours = model.tower([TowerInput(torch.from_numpy(features[i.features.path]), i.grid) for i in placed.items])
    assert ours.std() > 0.05
    assert logits.std() > 0.1
    answer = out[0, ids.shape[1] :].tolist()
    for setup in (Setup(overlap=False, radix_cache=False), Setup(chunk_tokens=7, page_size=4, media_rows=96)):
        engine = InProcess(model, VOCAB, setup)
        engine.features |= features
        for _ in range(2):
            (found,) = engine.finish([engine.submit(placed.ids.tolist(), GREEDY, media=placed.items)])
            assert found.tokens == answer
        assert found.end is not None
        assert found.end.media_tokens == {"audio": sum(item.count for item in placed.items)}
    facts = facts_of(checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert facts.tower is not None
    assert all(item.count <= facts.tower.max_positions for item in placed.items)
