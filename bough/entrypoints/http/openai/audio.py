"""POST /v1/audio/transcriptions and /v1/audio/translations: multipart uploads, in OpenAI's format."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from bough.config.speech import LANGUAGES, SpeechFacts
from bough.core.errors import InvalidRequest
from bough.engine_client import Request
from bough.entrypoints.http.body import too_large
from bough.entrypoints.http.openai.chat import Handler, make_request
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.openai.schema import ChatRequest
from bough.entrypoints.http.replies import EventReply, client_of, json_reply, placed
from bough.entrypoints.service import Service
from bough.entrypoints.speech.forms import ScoredSegment, SpeechTranscript, duration_usage, srt, verbose, vtt
from bough.entrypoints.speech.marks import BehindMark
from bough.entrypoints.speech.quiet import quiet_pieces
from bough.entrypoints.speech.whisper import FALLBACK, SpeechTask, WhisperRun, language_code
from bough.entrypoints.stream import DONE, ClientGone, Events, event
from bough.multimodal.desk import MediaInput
from bough.multimodal.media import Media
from bough.multimodal.sound import wav_bytes

FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
_MOST_FIELDS = 32
_FIELD_BYTES = 64 * 1024
_FORM_BYTES = 1024 * 1024
"""Maximum bytes of a form in addition to its file."""
_MOST_TEMPERATURES = 16
_KNOWN = frozenset({
    "file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities[]",
    "timestamp_granularities", "stream", "include[]", "include", "chunking_strategy",
})  # fmt: skip


class SpeechForm(Struct, frozen=True, kw_only=True):
    """A form, checked."""

    task: str
    data: bytes
    """The file."""
    language: str
    """As the client names it; empty: not."""
    prompt: str
    response_format: str
    temperatures: tuple[float, ...]
    stream: bool

    @property
    def wants_segments(self) -> bool:
        return self.response_format in ("srt", "vtt", "verbose_json")


def speech_to_text(task: str, service: Service) -> Handler:
    """The handler of the route for a task."""

    async def handle(request: HttpRequest) -> Response:
        media = _hearing(service)
        form = await read_form(request, task, service)
        samples = await media.desk.decode_sound(form.data)
        like = placed(Request(prompt="", stream=form.stream), request)
        job = _Job(service, media, form, samples, like)
        if form.stream:
            return EventReply(job.events())
        transcript = await client_of(request).wait_for(job.transcript())
        return rendered(transcript, form.response_format)

    return handle


def rendered(transcript: SpeechTranscript, form: str) -> Response:
    """A transcript in the requested format."""
    segments = [each.segment for each in transcript.segments]
    match form:
        case "text":
            return PlainTextResponse(transcript.text + "\n")
        case "srt":
            return PlainTextResponse(srt(segments))
        case "vtt":
            return PlainTextResponse(vtt(segments), media_type="text/vtt")
        case "verbose_json":
            return json_reply(verbose(transcript, with_segments=True))
    return json_reply({"text": transcript.text, "usage": duration_usage(transcript.duration_s)})


class _Job:
    """One audio file of one client."""

    def __init__(
        self, service: Service, media: Media, form: SpeechForm, samples: npt.NDArray[np.float32], like: Request
    ) -> None:
        self._service, self._media, self._form, self._samples, self._like = service, media, form, samples, like
        self._rules = media.desk.processor.sound
        self._scored: list[ScoredSegment] = []
        self._language = ""
        self._texts = self._by_whisper() if service.served.speech is not None else self._by_chat()

    @property
    def _duration_s(self) -> float:
        return len(self._samples) / self._rules.rate

    async def transcript(self) -> SpeechTranscript:
        text = "".join([text async for text in self._texts])
        return SpeechTranscript(
            task=self._form.task, language=LANGUAGES.get(self._language, self._language), text=text.strip(),
            duration_s=self._duration_s, segments=tuple(self._scored),
        )  # fmt: skip

    async def events(self) -> Events:
        whole = ""
        async with contextlib.aclosing(self._texts) as texts:
            async for text in texts:
                new = text if whole else text.lstrip()
                whole += new
                if new:
                    yield event({"type": "transcript.text.delta", "delta": new})
        usage = duration_usage(self._duration_s)
        yield event({"type": "transcript.text.done", "text": whole, "usage": usage})
        yield DONE

    async def _by_whisper(self) -> AsyncGenerator[str, None]:
        """The text of windows as they are done; segments are collected."""
        served = self._service.served
        facts, tokenizer, form = served.speech, served.tokenizer, self._form
        assert facts is not None
        assert tokenizer is not None, "marks of a transcript are its tokens"
        language = language_code(form.language, facts) if form.language else None
        if form.task == "translate":
            _check_translates(facts)
        prompt = tuple(tokenizer.encode(" " + form.prompt.strip(), False)) if form.prompt.strip() else ()
        task = SpeechTask(
            task=form.task, language=language, prompt=prompt, temperatures=form.temperatures,
            timestamps=form.wants_segments, like=self._like,
        )  # fmt: skip
        run = WhisperRun(self._service, facts, tokenizer, self._rules, task)
        async with contextlib.aclosing(run.windows(self._samples)) as windows:
            async for news in windows:
                if isinstance(news, str):
                    yield news
                    continue
                self._scored += news.segments
                self._language = "en" if form.task == "translate" else news.language
                if not form.stream:
                    yield "".join(each.segment.text for each in news.segments)

    async def _by_chat(self) -> AsyncGenerator[str, None]:
        """Lets a chat model transcribe the audio, piece by piece."""
        rules, form = self._rules, self._form
        for piece in quiet_pieces(self._samples, rules.rate, rules.piece_s or rules.seconds):
            media = (MediaInput(kind="audio", source=wav_bytes(piece, rules.rate), param="file"),)
            request = replace(self._asked(), media=media, caller=self._like.caller, deadline_s=self._like.deadline_s)
            behind = BehindMark(_SAID if self._marks_speech and not form.language else "")
            if form.stream:
                async for _, _, delta in self._service.run([request]):
                    yield behind.more(delta.text)
            else:
                [(_, _, delta)] = await self._service.collect([request])
                yield behind.more(delta.text)
            yield behind.rest() + " "

    @property
    def _marks_speech(self) -> bool:
        """Whether the model writes the language and a marker before the transcript (Qwen3-ASR)."""
        tokenizer = self._service.served.tokenizer
        return self._form.task == "transcribe" and tokenizer is not None and tokenizer.id_of(_SAID) is not None

    def _asked(self) -> Request:
        """The request for a piece, without its audio."""
        served, form = self._service.served, self._form
        chat: dict[str, Any] = {"temperature": form.temperatures[0], "stream": form.stream}
        tokenizer = served.tokenizer
        if form.task == "transcribe" and tokenizer is not None and tokenizer.id_of(_TRANSCRIBE) is not None:
            ids = tokenizer.encode(_transcription_prompt(form.language, served.markers["audio"]), False)
            made, _ = make_request(ChatRequest(messages=[], input_ids=ids, **chat), self._service, raw=True)
            return made
        if self._marks_speech:
            asked = ChatRequest(messages=_asr_messages(form), continue_final_message=bool(form.language), **chat)
            made, _ = make_request(asked, self._service)
            return made
        content = [_SOUND, {"type": "text", "text": _instruction(form)}]
        made, _ = make_request(ChatRequest(messages=[{"role": "user", "content": content}], **chat), self._service)
        return made


_TRANSCRIBE: Final = "[TRANSCRIBE]"
"""Voxtral's mark."""


def _transcription_prompt(language: str, marker: str) -> str:
    """Voxtral's prompt, with the language if it is known. `marker`: placeholder of the audio."""
    spoken = f"lang:{language.lower()}" if language else ""
    return f"<s>[INST][BEGIN_AUDIO]{marker}[/INST]{spoken}{_TRANSCRIBE}"


_SAID: Final = "<asr_text>"
"""Qwen3-ASR's marker: the language is before it, the transcript after it."""


def _asr_messages(form: SpeechForm) -> list[dict[str, Any]]:
    """Qwen3-ASR's prompt: a context, the audio, and the beginning of the answer if its language is known."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [_SOUND]}]
    if form.prompt.strip():
        messages.insert(0, {"role": "system", "content": form.prompt.strip()})
    if form.language:
        name = LANGUAGES.get(form.language.lower(), form.language).title()
        messages.append({"role": "assistant", "content": f"language {name}{_SAID}"})
    return messages


_SOUND: Final = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,"}}
"""Placeholder of the audio, replaced when the prompt is complete."""


def _instruction(form: SpeechForm) -> str:
    if form.task == "translate":
        text = "Translate the speech into English. Write down the translation, and nothing else."
    else:
        text = "Transcribe the speech. Write down what is said, and nothing else."
    if form.language:
        text += f" The speech is in {LANGUAGES.get(form.language.lower(), form.language)}."
    return f"{text} Context: {form.prompt.strip()}" if form.prompt.strip() else text


def _check_translates(facts: SpeechFacts) -> None:
    if "translate" not in facts.tasks:
        raise InvalidRequest(
            what="the served model does not translate",
            why="it knows English only",
            fix="use /v1/audio/transcriptions, or serve a model of several languages",
        )


def _hearing(service: Service) -> Media:
    """The preparation of audio. Raises `InvalidRequest` if the model takes none."""
    media = service.engine_client.media
    if media is None or "audio" not in media.kinds:
        raise InvalidRequest(
            what="the served model takes no sound",
            why=f"{service.served.name} is no speech model",
            fix="serve a model that hears, such as openai/whisper-large-v3-turbo",
            param="model",
        )
    return media


# -- forms ----------------------------------------------------------------------------------------


async def read_form(request: HttpRequest, task: str, service: Service) -> SpeechForm:
    """The request's form. Raises `InvalidRequest`."""
    server, most = service.config.server, service.config.media.max_media_bytes
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest(
            what="the body is no form", why="a sound comes as multipart/form-data", fix="send file and model as a form"
        )
    body = _bounded(request, min(most + _FORM_BYTES, server.max_body_bytes))
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=_MOST_FIELDS, max_part_size=_FIELD_BYTES)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise InvalidRequest(
            what="the form can't be read", why=str(error)[:200], fix="send multipart/form-data"
        ) from error
    try:
        unknown = sorted(set(form) - _KNOWN)
        if unknown and server.strict_api:
            raise InvalidRequest(
                what=f"there is no field {unknown[0][:60]!r}", fix="leave it out", param=unknown[0][:60]
            )
        return await _checked(form, task, service)
    finally:
        await form.close()


async def _checked(form: FormData, task: str, service: Service) -> SpeechForm:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidRequest(
            what="file is missing", why="it holds the sound", fix="send a file (WAV, MP3, FLAC, Ogg, MP4, WebM)",
            param="file",
        )  # fmt: skip
    served_name(service.served, _text(form, "model"))
    chosen = _text(form, "response_format") or "json"
    stream = _flag(form, "stream")
    if chosen not in FORMATS:
        raise _bad("response_format", chosen, f"it must be one of {', '.join(FORMATS)}")
    if service.served.speech is None and chosen not in ("json", "text"):
        raise _bad("response_format", chosen, "the served model gives no times: it can be json or text")
    if stream and chosen not in ("json", "text"):
        raise _bad("stream", "true", f"a transcript in {chosen} can't be streamed: it can be json or text")
    _check_granularities(form, chosen)
    if any(form.getlist(name) for name in ("include", "include[]")):
        raise _bad(
            "include", str(form.get("include[]") or form.get("include")), "log-probabilities are not reported here"
        )
    data = await upload.read()
    if not data:
        raise InvalidRequest(what="the file is empty", fix="send a sound", param="file")
    return SpeechForm(
        task=task, data=data, language=_text(form, "language"), prompt=_text(form, "prompt"), response_format=chosen,
        temperatures=_temperatures(form), stream=stream,
    )  # fmt: skip


def _check_granularities(form: FormData, chosen: str) -> None:
    name = "timestamp_granularities"
    for given in (*form.getlist(name), *form.getlist(f"{name}[]")):
        if given == "word":
            raise _bad(name, "word", "words have no times here: segments have")
        if given != "segment":
            raise _bad(name, str(given), "it can be segment")
        if chosen != "verbose_json":
            raise _bad(name, "segment", f"it goes with response_format verbose_json, which is {chosen}")


def _temperatures(form: FormData) -> tuple[float, ...]:
    """Those that are tried, in order: of one above 0 itself, of 0 or none Whisper's own, of several (repeated, or separated
    by commas) all."""
    given = [part for each in form.getlist("temperature") for part in str(each).split(",") if part.strip()]
    try:
        numbers = tuple(map(float, given))
    except ValueError:
        numbers = (math.nan,)
    if len(numbers) > _MOST_TEMPERATURES or not all(0.0 <= each <= 1.0 for each in numbers):
        raise _bad(
            "temperature", ", ".join(given)[:40], f"it must be a number from 0 to 1, or up to {_MOST_TEMPERATURES}"
        )
    return FALLBACK if numbers in ((), (0.0,)) else numbers


def _text(form: FormData, name: str) -> str:
    given = form.get(name, "")
    if not isinstance(given, str):
        raise _bad(name, "a file", "it must be text")
    return given


def _flag(form: FormData, name: str) -> bool:
    given = _text(form, name).lower()
    if given not in ("", "true", "false", "1", "0"):
        raise _bad(name, given, "it must be true or false")
    return given in ("true", "1")


def _bad(name: str, value: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        what=f"{name} is {value[:40]!r}", why=why, fix=f"send another {name}, or leave it out", param=name
    )


async def _bounded(request: HttpRequest, most: int) -> AsyncGenerator[bytes, None]:
    """The body's chunks, up to `most` bytes."""
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise too_large(most, close=True)
            yield chunk
    except ClientDisconnect as error:
        raise ClientGone from error
