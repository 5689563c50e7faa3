"""Transcripts through real processes: OpenAI's client, all forms, long sounds against transformers, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from test_qwen3_asr import AUDIO, speaks
from test_sound import hearing, pcm, sound
from test_whisper import (
    EN,
    EOS,
    EXTRACTOR,
    FIRST_STAMP,
    PREVIOUS,
    SECONDS,
    START,
    TRANSCRIBE,
    expected,
    folder,
    theirs,
    whisper,
)
from tiny_vision import make_tokenizer

from .conftest import Server

pytestmark = pytest.mark.e2e
RATE = 16_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    whisper()
    made = Server({
        "model_path": str(folder()), "dtype": "float32", "device": "cpu", "cpu_threads": 1, "custom_kernels": False,
        "page_size": 4, "max_media_bytes": 2_000_000, "max_audio_s": 20,
    })  # fmt: skip
    yield made
    made.end()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def wav(seconds: float, seed: int = 0) -> tuple[str, bytes]:
    return "speech.wav", pcm(sound(seconds, seed), RATE)


def long_sound() -> np.ndarray:
    return np.concatenate([sound(1.3, seed) for seed in range(4)])


def ask(client: openai.OpenAI, file: tuple[str, bytes], **extra: Any) -> Any:
    """Greedily, as a rule: what random weights say is unlikely, so that other temperatures would be tried."""
    return client.audio.transcriptions.create(**{"model": "default", "file": file, "temperature": "0,0", **extra})


def test_all_forms_of_one_transcript(client: openai.OpenAI) -> None:
    shown = ask(client, wav(1.3), response_format="verbose_json", language="en")
    assert (shown.language, shown.duration) == ("english", 1.3)
    assert shown.segments
    for segment in shown.segments:
        assert 0 <= segment.start < segment.end <= SECONDS
        assert segment.avg_logprob <= 0
        assert 0 <= segment.no_speech_prob <= 1
    assert shown.text == "".join(segment.text for segment in shown.segments).strip()
    subtitles = ask(client, wav(1.3), response_format="srt", language="en")
    assert subtitles.startswith("1\n00:00:0")
    assert subtitles.count(" --> ") == len(shown.segments)
    assert ask(client, wav(1.3), response_format="vtt", language="en").startswith("WEBVTT\n\n00:00:0")
    plain = ask(client, wav(1.3), response_format="json", language="en")
    assert ask(client, wav(1.3), response_format="text", language="en") == plain.text + "\n"
    assert plain.usage.type == "duration"
    assert plain.usage.seconds == 2


def test_streams_say_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, wav(1.3, 1), language="en")
    events = list(ask(client, wav(1.3, 1), language="en", stream=True))
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas) == events[-1].text
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text.strip() == whole.text
    assert len(deltas) > 1


def test_unlikely_texts_are_tried_again(client: openai.OpenAI) -> None:
    shown = ask(client, wav(1.3), response_format="verbose_json", language="en", temperature=0.0)
    assert all(segment.temperature > 0 for segment in shown.segments)  # random weights are never sure
    fixed = ask(client, wav(1.3), response_format="verbose_json", language="en", temperature=0.4)
    assert all(segment.temperature == 0.4 for segment in fixed.segments)


def test_translations_and_prompts_and_languages(client: openai.OpenAI) -> None:
    one = client.audio.translations.create(model="default", file=wav(1.3), response_format="verbose_json")
    assert one.language == "english"
    told = ask(client, wav(1.3), language="german", prompt="some words before", response_format="verbose_json")
    assert told.language == "german"
    assert ask(client, wav(1.3), response_format="verbose_json").language in ("english", "german")


def test_long_sounds_are_transformers(client: openai.OpenAI) -> None:
    samples = long_sound()
    shown = ask(client, ("long.wav", pcm(samples, RATE)), response_format="verbose_json", language="en")
    assert shown.segments[-1].end > SECONDS
    reference = whisper()[0]
    heard = np.round(samples * 32767).astype(np.int16).astype(np.float32) / 32768
    extractor = transformers.WhisperFeatureExtractor(**EXTRACTOR)
    spell = transformers.AutoTokenizer.from_pretrained(folder())
    found: list[tuple[float, float, list[int]]] = []
    at, before = 0, list[int]()
    while at < len(heard):  # Whisper's algorithm, by transformers' model and rules
        window = heard[at : at + SECONDS * RATE]
        features = extractor(window, sampling_rate=RATE, return_tensors="pt")["input_features"]
        tokens = _window(reference, features, before)
        stamps = [place for place in range(1, len(tokens)) if min(tokens[place - 1 : place + 1]) >= FIRST_STAMP]
        alone = len(tokens) > 1 and tokens[-1] >= FIRST_STAMP > tokens[-2]
        ends = [*stamps, *([len(tokens)] if alone or not stamps else [])]
        pieces = [tokens[low:high] for low, high in zip([0, *ends], ends, strict=False)]
        for piece in pieces:
            start, end = at / RATE + stamp_s(piece[0], 0), at / RATE + stamp_s(piece[-1], len(window) / RATE)
            if end > start and spell.decode([token for token in piece if token < EOS]).strip():
                found.append((start, end, piece))
                before += piece
        done = round(stamp_s(pieces[-1][-1], SECONDS) * RATE) if stamps and not alone else 0
        at += done or SECONDS * RATE
    assert [segment.start for segment in shown.segments] == pytest.approx([start for start, _, _ in found], abs=1e-3)
    assert [segment.end for segment in shown.segments] == pytest.approx([end for _, end, _ in found], abs=1e-3)
    assert [segment.tokens for segment in shown.segments] == [tokens for _, _, tokens in found]


def stamp_s(token: int, otherwise: float) -> float:
    return (token - FIRST_STAMP) * 0.02 if token >= FIRST_STAMP else otherwise


def _window(reference: Any, features: torch.Tensor, before: list[int]) -> list[int]:
    prompt = (*([PREVIOUS, *before[-47:]] if before else []), START, EN, TRANSCRIBE)
    ids = list(prompt)
    rules = theirs(prompt, True)
    with torch.no_grad():
        encoded = reference.model.encoder(features)
        while len(ids) < len(prompt) + min(48, 96 - len(prompt)):
            logits = reference(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids])).logits[:, -1]
            ids.append(int(rules(torch.tensor([ids]), logits)[0].argmax()))
            if ids[-1] == EOS:
                return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def test_many_at_once_and_again_from_the_cache(client: openai.OpenAI, server: Server) -> None:
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda seed: ask(client, wav(1.0, seed % 2), language="en").text, range(6)))
    assert answers[0] == answers[2] == answers[4]
    assert answers[1] == answers[3] == answers[5]
    numbers = httpx.get(f"{server.url}/metrics").text
    assert "media_tower_tokens_total" in numbers


BAD: list[tuple[dict[str, Any], bytes, str]] = [
    ({}, b"no sound at all", "kind that is taken"),
    ({}, b"RIFF....WAVEfmt ", "can't be decoded"),
    ({}, b"", "empty"),
    ({"language": "klingon"}, wav(0.5)[1], "language"),
    ({"response_format": "docx"}, wav(0.5)[1], "response_format"),
    ({"temperature": "hot"}, wav(0.5)[1], "temperature"),
    ({"temperature": "3"}, wav(0.5)[1], "temperature"),
    ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, wav(0.5)[1], "words have no times"),
    ({"timestamp_granularities[]": "segment"}, wav(0.5)[1], "verbose_json"),
    ({"stream": "true", "response_format": "srt"}, wav(0.5)[1], "can't be streamed"),
    ({"include[]": "logprobs"}, wav(0.5)[1], "include"),
    ({}, pcm(sound(21.0), RATE), "at most 20 s"),
    ({"model": "other"}, wav(0.5)[1], "there is no model"),
]


@pytest.mark.parametrize(("fields", "data", "says"), BAD)
def test_what_is_refused(server: Server, fields: dict[str, Any], data: bytes, says: str) -> None:
    reply = httpx.post(
        f"{server.url}/v1/audio/transcriptions", data={"model": "default", **fields}, files={"file": ("a.wav", data)}
    )
    assert reply.status_code == (404 if fields.get("model") else 400), reply.text
    assert says in reply.json()["error"]["message"]


def test_what_is_no_upload(server: Server) -> None:
    url = f"{server.url}/v1/audio/transcriptions"
    assert httpx.post(url, json={"model": "default"}).status_code == 400
    missing = httpx.post(url, data={"model": "default"}, files={"other": ("a.wav", b"x")})
    assert missing.status_code == 400
    assert "file is missing" in missing.json()["error"]["message"]
    large = httpx.post(url, data={"model": "default"}, files={"file": ("a.wav", io.BytesIO(bytes(4_000_000)))})
    assert large.status_code in (400, 413)
    silent = httpx.post(f"{server.url}/v1/completions", json={"model": "default", "prompt": "hello", "max_tokens": 4})
    assert silent.status_code == 400
    assert "no sound" in silent.json()["error"]["message"]


def test_native_requests_take_sounds_too(server: Server) -> None:
    prompt = (START, EN, TRANSCRIBE)
    reply = httpx.post(
        f"{server.url}/generate",
        json={
            "input_ids": list(prompt), "audio_data": _data_url(pcm(sound(1.3, 0), RATE)),
            "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        },
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    assert reply.json()["output_ids"] == expected(0, prompt)[:12]
    assert reply.json()["meta_info"]["audio_tokens"] == 100


def _data_url(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def chatting() -> Iterator[Server]:
    made = Server({
        "model_path": str(hearing()[0]), "dtype": "float32", "device": "cpu", "cpu_threads": 1, "custom_kernels": False,
        "context_length": 256,
    })  # fmt: skip
    yield made
    made.end()


@pytest.mark.long
def test_models_that_chat_write_down_what_they_hear(chatting: Server) -> None:
    client = openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="none", max_retries=0)
    short = ask(client, wav(1.3), language="en", prompt="names")
    assert ask(client, wav(1.3), language="en", prompt="names").text == short.text
    assert short.text
    pieces = ask(client, ("long.wav", pcm(long_sound(), RATE)))
    assert len(pieces.text) > len(short.text)
    events = list(ask(client, wav(1.3), language="en", prompt="names", stream=True))
    assert events[-1].text.strip() == short.text
    assert client.audio.translations.create(model="default", file=wav(1.0)).text
    with pytest.raises(openai.BadRequestError, match="gives no times"):
        ask(client, wav(1.3), response_format="srt")


@pytest.mark.long
def test_qwen3_asr_is_asked_in_its_own_words() -> None:
    folder = Path(speaks()[2].path)
    make_tokenizer(folder, {256: "<|endoftext|>", AUDIO: "<|audio_pad|>", 303: "<asr_text>"})
    made = Server({
        "model_path": str(folder), "dtype": "float32", "device": "cpu", "cpu_threads": 1, "custom_kernels": False,
        "context_length": 256,
    })  # fmt: skip
    try:
        client = openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0)
        short = ask(client, wav(1.3))
        assert short.text == ask(client, wav(1.3)).text
        forced = ask(client, wav(1.3), language="en", prompt="names")
        assert forced.text != short.text
        events = list(ask(client, wav(1.3), language="en", prompt="names", stream=True))
        assert events[-1].text.strip() == forced.text
    finally:
        made.end()
