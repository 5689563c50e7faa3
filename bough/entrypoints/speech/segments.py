"""Converts the tokens of one window to segments with times, and finds the start of the next window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from msgspec import Struct

from bough.config.speech import TIMESTAMP_S, SpeechFacts


class SpeechSegment(Struct, frozen=True, kw_only=True):
    """A segment of speech with its times."""

    start: float
    end: float
    """Seconds from the beginning of the sound."""
    text: str
    tokens: tuple[int, ...]
    """Of the text, with the timestamps around it."""


class WindowText(Struct, frozen=True):
    """The result of a window."""

    segments: tuple[SpeechSegment, ...]
    advance_s: float
    """Seconds from the window's beginning to that of the next one."""


def whole_window(
    tokens: Sequence[int], facts: SpeechFacts, decode: Callable[[list[int]], str], *, begin_s: float, length_s: float
) -> WindowText:
    """A window without timestamps: one segment."""
    ids = [token for token in tokens if token < facts.end]
    said = SpeechSegment(start=begin_s, end=begin_s + length_s, text=decode(ids), tokens=tuple(ids))
    return WindowText(_said([said]), length_s)


def cut_window(
    tokens: Sequence[int], facts: SpeechFacts, decode: Callable[[list[int]], str], *, begin_s: float, length_s: float
) -> WindowText:
    """Segments of a window that begins at `begin_s` of the sound and has `length_s` of it.

    Two timestamps in a row end one segment and begin another. The text after the last such pair is repeated in the next
    window, which begins there, unless the window ends with a single timestamp: then no more speech follows in it.
    """
    first = facts.first_timestamp
    ids = [token for token in tokens if token != facts.end]
    is_stamp = [token >= first for token in ids]

    def made(piece: Sequence[int], start_s: float, end_s: float) -> SpeechSegment:
        text = decode([token for token in piece if token < facts.end])
        return SpeechSegment(start=begin_s + start_s, end=begin_s + end_s, text=text, tokens=tuple(piece))

    def seconds(token: int) -> float:
        return (token - first) * TIMESTAMP_S

    cuts = [at for at in range(1, len(ids)) if is_stamp[at] and is_stamp[at - 1]]
    ends_alone = len(ids) >= 2 and is_stamp[-1] and not is_stamp[-2]
    if cuts:
        bounds = [0, *cuts, *([len(ids)] if ends_alone else [])]
        pieces = [ids[low:high] for low, high in itertools.pairwise(bounds)]
        segments = [made(piece, seconds(piece[0]), seconds(piece[-1])) for piece in pieces if piece]
        return WindowText(_said(segments), length_s if ends_alone else seconds(ids[cuts[-1] - 1]) or length_s)
    stamps = [token for token in ids if token >= first]
    last_s = seconds(stamps[-1]) if stamps and stamps[-1] != first else length_s
    start_s = seconds(ids[0]) if ids and is_stamp[0] else 0.0
    return WindowText(_said([made(ids, start_s, max(start_s, last_s))] if ids else []), length_s)


def _said(segments: Sequence[SpeechSegment]) -> tuple[SpeechSegment, ...]:
    """The segments with text and a positive duration."""
    return tuple(each for each in segments if each.text.strip() and each.end > each.start)
