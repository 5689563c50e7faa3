"""Gemma 3n through real processes: images and sounds in one chat, as recorded of transformers, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from test_gemma3n import ASKED, NEW
from test_sound import sound
from tiny_gemma3n import IMAGES, SOUNDS, golden, load_gemma3n

from bough.multimodal.sound import wav_bytes

from .conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.long]
RATE = 16_000
TEMPLATE = (
    "{%- for message in messages -%}{{ '<' ~ message['role'] ~ '>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'audio' -%}{{ '<audio_soft_token>' }}"
    "{%- elif item['type'] == 'image' -%}{{ '<image_soft_token>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<model>' }}{%- endif -%}"
)
"""As that of published checkpoints: it names parts by `type`, and trims texts."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gemma3n") / "model"
    shutil.copytree(load_gemma3n().folder, folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = Path(folder / name)
        if name.endswith("json"):
            found = json.loads(path.read_text())
            found.pop("chat_template", None)
            path.write_text(json.dumps(found))
        else:
            path.write_text(TEMPLATE)
    made = Server({
        "model_path": str(folder), "dtype": "float32", "device": "cpu", "cpu_threads": 1, "custom_kernels": False,
        "page_size": 4, "max_audio_s": 20, "context_length": 256,
    })  # fmt: skip
    yield made
    made.end()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def picture(number: int) -> str:
    file = io.BytesIO()
    IMAGES[number].save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def speech(number: int) -> str:
    return base64.b64encode(wav_bytes(SOUNDS[number], RATE)).decode()


def generate(server: Server, **asked: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    found = httpx.post(f"{server.url}/generate", json={"sampling_params": sampling, **asked}, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", ASKED)
def test_answers_are_those_recorded_of_transformers(case: str, server: Server) -> None:
    text, images, sounds = ASKED[case]
    media = {"image_data": [picture(each) for each in images], "audio_data": [speech(each) for each in sounds]}
    found = generate(server, text=text, **{name: each for name, each in media.items() if each})
    assert found["output_ids"] == golden()["answers"][case]


def test_a_chat_about_an_image_and_a_sound(server: Server, client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": picture(0)}},
        {"type": "input_audio", "input_audio": {"data": speech(1), "format": "wav"}},
        {"type": "text", "text": "  and hear "},
    ]
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(
        model="default", messages=messages, temperature=0, max_tokens=NEW, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details.model_dump()  # type: ignore[union-attr]
    assert (details["image_tokens"], details["audio_tokens"]) == (9, 12)
    written = "<system>be brief<user>see<image_soft_token><audio_soft_token>and hear<model>"
    same = generate(server, text=written, image_data=[picture(0)], audio_data=[speech(1)])
    assert answer.choices[0].message.content == same["text"]
    assert same["meta_info"]["prompt_tokens"] == answer.usage.prompt_tokens


def test_speech_is_transcribed_in_pieces(client: openai.OpenAI) -> None:
    """Of what it takes at once, less than a second here."""
    file = ("speech.wav", wav_bytes(sound(1.5), RATE))
    found = client.audio.transcriptions.create(model="default", file=file, response_format="json")
    assert found.text.strip()


def test_what_is_refused(client: openai.OpenAI) -> None:
    too_long = base64.b64encode(wav_bytes(sound(3.0), RATE)).decode()
    for part, words in (
        ({"type": "input_audio", "input_audio": {"data": too_long, "format": "wav"}}, "takes at most 0.98"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "video"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="default", messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item,misc]
