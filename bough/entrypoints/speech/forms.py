"""Output formats of transcripts: plain text, subtitles (SRT, WebVTT), verbose JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from bough.entrypoints.speech.segments import SpeechSegment


class ScoredSegment(Struct, frozen=True, kw_only=True):
    """A segment, with facts about its window."""

    segment: SpeechSegment
    seek_s: float
    """Start of the window, in seconds."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class SpeechTranscript(Struct, frozen=True, kw_only=True):
    """The transcript of one audio file."""

    task: str
    language: str
    """Its name."""
    duration_s: float
    segments: tuple[ScoredSegment, ...]
    text: str


def srt(segments: Iterable[SpeechSegment]) -> str:
    blocks = [
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each.text)}\n"
        for number, each in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def vtt(segments: Iterable[SpeechSegment]) -> str:
    blocks = [f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each.text)}\n" for each in segments]
    return "\n".join(["WEBVTT\n", *blocks])


def verbose(transcript: SpeechTranscript, *, with_segments: bool) -> dict[str, Any]:
    """OpenAI's `verbose_json`."""
    shown: dict[str, Any] = {
        "task": transcript.task,
        "language": transcript.language,
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
        "usage": duration_usage(transcript.duration_s),
    }
    if with_segments:
        shown["segments"] = _segments(transcript.segments)
    return shown


def duration_usage(seconds: float) -> dict[str, Any]:
    """Usage in seconds, rounded up as OpenAI does."""
    return {"type": "duration", "seconds": int(-(-seconds // 1))}


def _segments(segments: Sequence[ScoredSegment]) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "seek": round(each.seek_s * 100),
            "start": round(each.segment.start, 3),
            "end": round(each.segment.end, 3),
            "text": each.segment.text,
            "tokens": list(each.segment.tokens),
            "temperature": each.temperature,
            "avg_logprob": each.avg_logprob,
            "compression_ratio": each.compression_ratio,
            "no_speech_prob": each.no_speech_prob,
        }
        for number, each in enumerate(segments)
    ]


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _line(text: str) -> str:
    """Subtitles end at an empty line, and an arrow begins one."""
    return " ".join(text.split()).replace("-->", "->")
