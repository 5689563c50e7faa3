"""Whisper against transformers: the encoder, logits, greedy answers, however they are computed."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_process import InProcess, Setup
from seeing import CPU
from test_sound import sound
from tiny import shake
from tiny_vision import make_tokenizer
from transformers import LogitsProcessorList
from transformers.generation import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from bough.config.hf import open_checkpoint
from bough.config.speech import SpeechFacts, read_speech
from bough.core.media import Features, MediaItem
from bough.core.messages import Abort
from bough.core.sampling import SamplingParams
from bough.core.speech import SPEECH_RULES
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of

VOCAB, EOS, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_STAMPS = 367, 256, *range(258, 266)
FIRST_STAMP = NO_STAMPS + 1
SECONDS, POSITIONS = 2, 100
NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW)
EXTRACTOR = {"feature_size": 8, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400, "chunk_length": SECONDS}
SPECIAL = {
    EOS: "<|endoftext|>", START: "<|startoftranscript|>", EN: "<|en|>", DE: "<|de|>", TRANSLATE: "<|translate|>",
    TRANSCRIBE: "<|transcribe|>", PREVIOUS: "<|startofprev|>", NO_SPEECH: "<|nospeech|>",
    NO_STAMPS: "<|notimestamps|>", **{FIRST_STAMP + n: f"<|{n * 0.02:.2f}|>" for n in range(101)},
}  # fmt: skip
GENERATION = {
    "decoder_start_token_id": START, "eos_token_id": EOS, "pad_token_id": EOS, "bos_token_id": EOS,
    "no_timestamps_token_id": NO_STAMPS, "prev_sot_token_id": PREVIOUS, "is_multilingual": True,
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE}, "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "suppress_tokens": [3, 5, 7, 11], "begin_suppress_tokens": [220, EOS], "max_initial_timestamp_index": 50,
    "max_length": 96, "return_timestamps": False,
}  # fmt: skip


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bough-tiny-"))


@cache
def whisper() -> tuple[Any, Decoder, Any, Any]:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=56, decoder_ffn_dim=48, max_source_positions=POSITIONS,
        max_target_positions=96, decoder_start_token_id=START, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=EOS,
        suppress_tokens=None, begin_suppress_tokens=None, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    reference = transformers.WhisperForConditionalGeneration(config).eval()
    shake(reference)
    with torch.no_grad():  # otherwise it repeats one token, whatever it hears: embedding and head are one
        reference.model.decoder.embed_tokens.weight *= 0.1
        reference.model.decoder.embed_positions.weight *= 10
        for layer in reference.model.decoder.layers:
            layer.encoder_attn.q_proj.weight *= 16
            layer.encoder_attn.out_proj.weight *= 8
    reference.generation_config = transformers.GenerationConfig(**GENERATION)
    reference.save_pretrained(folder())
    (folder() / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    make_tokenizer(folder(), SPECIAL)
    checkpoint = open_checkpoint(str(folder()))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=96)
    assert isinstance(model, Decoder)
    processor = processor_of(checkpoint.config)
    assert processor is not None
    return reference, model, checkpoint, processor


def heard(seed: int, seconds: float = 1.3) -> tuple[np.ndarray, MediaItem]:
    features, items = whisper()[3].audio(sound(seconds, seed), {})
    digest = sha256(features.tobytes()).digest()
    where = Features(path=digest.hex(), digest=digest, dtype="float32", shape=features.shape)
    item = MediaItem(
        key=digest, kind="audio", start=0, length=0, token=0, count=items[0].count, cost=items[0].cost,
        grid=items[0].grid, features=where,
    )  # fmt: skip
    return features, item


@cache
def facts() -> SpeechFacts:
    checkpoint = whisper()[2]
    found = read_speech(checkpoint.config, checkpoint.generation_config, lambda _: None)
    assert found is not None
    return found


def theirs(prompt: tuple[int, ...], timestamps: bool) -> LogitsProcessorList:
    """Transformers' own rules for a transcript behind a prompt."""
    settings = transformers.GenerationConfig(**GENERATION)
    made = [
        SuppressTokensLogitsProcessor(GENERATION["suppress_tokens"]),
        SuppressTokensAtBeginLogitsProcessor(GENERATION["begin_suppress_tokens"], len(prompt)),
    ]
    if timestamps:
        made.append(WhisperTimeStampLogitsProcessor(settings, begin_index=len(prompt)))
    return LogitsProcessorList(made)


@cache
def expected(seed: int, prompt: tuple[int, ...], rules: bool | None = None) -> list[int]:
    """Greedy; `rules`: those of transcripts, with timestamps or without, up to the end."""
    reference = whisper()[0]
    features, _ = heard(seed)
    ids = list(prompt)
    shape = LogitsProcessorList() if rules is None else theirs(prompt, rules)
    with torch.no_grad():
        encoded = reference.model.encoder(torch.from_numpy(features.T[None].copy()))
        while len(ids) < len(prompt) + NEW and (rules is None or ids[-1] != EOS):
            given = torch.tensor([ids])
            logits = reference(encoder_outputs=encoded, decoder_input_ids=given).logits[:, -1]
            ids.append(int(shape(given, logits)[0].argmax()))
    return ids[len(prompt) :]


def submit(engine: InProcess, seed: int, prompt: tuple[int, ...], rules: bool | None = None, **extra: Any) -> int:
    features, item = heard(seed)
    engine.features[item.features.path] = features
    sampling = GREEDY
    if rules is not None:
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=NEW, logit_processor=SPEECH_RULES, stop_token_ids=(EOS,),
            custom_params=facts().rules(timestamps=rules).params(),
        )  # fmt: skip
    return engine.submit(list(prompt), sampling, media=(item,), **extra)


def test_the_encoder_is_transformers() -> None:
    reference, model, checkpoint, _ = whisper()
    features, item = heard(0)
    extractor = transformers.WhisperFeatureExtractor(**EXTRACTOR)
    spectrum = extractor(sound(1.3, 0), sampling_rate=16_000, return_tensors="pt")["input_features"]
    assert np.abs(features.T - spectrum[0].numpy()).max() < 1e-4
    with torch.no_grad():
        wanted = reference.model.encoder(spectrum).last_hidden_state[0]
        assert model.tower is not None
        ours = model.tower([TowerInput(torch.from_numpy(features), item.grid)] * 2)
    assert wanted.std() > 0.1
    assert (ours[:POSITIONS] - wanted).abs().max() < 1e-4
    assert (ours[POSITIONS:] - wanted).abs().max() < 1e-4
    shapes = facts_of(checkpoint.config)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert shapes.num_parameters() == held


ASKED = ((0, (START, 7, 8)), (1, (START, 7, 8)), (0, (START, 7, 8, 9)), (2, (START, *range(20, 50))), (0, (START,)))
SETUPS = {
    "plain": Setup(overlap=False, radix_cache=False, context_length=96),
    "in fives": Setup(chunk_tokens=5, page_size=4, context_length=96),
    "one at a time in a small store": Setup(
        chunk_tokens=13, page_size=8, media_rows=128, step_patches=1, context_length=96
    ),
    "cpu attention": Setup(page_size=16, chunk_tokens=11, attention="cpu", shared_spans=False, context_length=96),
    "drafts": Setup(page_size=1, drafts="ngram", context_length=96),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_answers_are_transformers_and_again_from_the_cache(setup: str) -> None:
    engine = InProcess(whisper()[1], VOCAB, SETUPS[setup])
    wanted = [expected(*asked) for asked in ASKED]
    assert len({tuple(each) for each in wanted}) == len(wanted)
    encoded = 0
    for turn in range(2):
        answers = engine.finish([submit(engine, *asked) for asked in ASKED])
        assert [answer.tokens for answer in answers] == wanted
        assert engine.queues.media is not None
        counters = engine.queues.media.counters
        if turn and SETUPS[setup].radix_cache:
            assert counters.tower_tokens == encoded  # neither the encoder nor cross attention's KV is computed again
            if SETUPS[setup].page_size <= 4:
                assert all(answer.end is not None and answer.end.cached_tokens for answer in answers[2:4])
        encoded = counters.tower_tokens
    assert answers[0].end is not None
    assert answers[0].end.media_tokens == {"audio": POSITIONS}


SPOKEN = ((0, (START, EN, TRANSCRIBE)), (1, (START, EN, TRANSCRIBE)), (2, (PREVIOUS, 20, 21, START, DE, TRANSLATE)))


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_rules_of_transcripts_are_transformers(timestamps: bool, overlap: bool) -> None:
    asked = [(seed, prompt if timestamps else (*prompt, NO_STAMPS)) for seed, prompt in SPOKEN]
    engine = InProcess(whisper()[1], VOCAB, Setup(context_length=96, page_size=4, chunk_tokens=5, overlap=overlap))
    wanted = [expected(*each, rules=timestamps) for each in asked]
    for _ in range(2):
        answers = engine.finish([submit(engine, *each, rules=timestamps) for each in asked])
        assert [answer.tokens for answer in answers] == wanted
    assert all(answer[0] >= FIRST_STAMP for answer in wanted) or not timestamps


def test_after_retractions() -> None:
    engine = InProcess(whisper()[1], VOCAB, Setup(context_length=96, page_size=4, overlap=True))
    asked = SPOKEN
    ids = [submit(engine, *each, rules=True) for each in asked]
    answers = engine.finish_with_a_retraction(ids)
    assert [answer.tokens for answer in answers] == [expected(*each, rules=True) for each in asked]
    assert engine.queues.counters.retractions >= 3


def test_an_aborted_request_lets_go_of_its_media() -> None:
    engine = InProcess(whisper()[1], VOCAB, Setup(context_length=96, page_size=4))
    asked = submit(engine, *ASKED[0])
    for _ in range(3):
        engine.loop.turn()
    engine.mailbox.incoming.append(Abort(asked, "gone"))
    engine.finish([asked])
    assert engine.cache.fixed.num_cached > 0
    assert engine.cache.fixed.num_evictable == engine.cache.fixed.num_cached
    assert engine.cache.num_available == engine.cache.total
