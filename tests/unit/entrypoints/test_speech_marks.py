"""Transcripts behind a mark, however they are cut."""

from __future__ import annotations

import pytest

from bough.entrypoints.speech.marks import BehindMark

TEXT = "language English<asr_text>Hello <asr_text> there"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_what_stands_behind_the_first_mark(size: int) -> None:
    behind = BehindMark("<asr_text>")
    parts = [behind.more(TEXT[at : at + size]) for at in range(0, len(TEXT), size)]
    assert "".join(parts) + behind.rest() == "Hello <asr_text> there"


def test_texts_without_a_mark_are_whole() -> None:
    behind = BehindMark("<asr_text>")
    assert behind.more("Hello <asr") == ""
    assert behind.rest() == "Hello <asr"
    assert BehindMark("").more(TEXT) == TEXT
