"""The bytes of a token, derived from its name in the vocabulary.

Byte-level BPE spells each byte as a printable character; SentencePiece spells a space as U+2581 and lone bytes as `<0x1F>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

TokenForm = Literal["byte-level", "metaspace", "other"]

SPACE_MARK: Final = "\u2581"
_LONE_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for place, byte in enumerate(sorted(set(range(256)) - set(printable))):
        table[chr(0x100 + place)] = byte
    return table


def form_of_decoder(decoder: Mapping[str, Any] | None) -> TokenForm:
    """How tokens' names spell bytes, from the decoder of a tokenizer.json."""
    if decoder is None:
        return "other"
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return "byte-level"
    turns_marks = any(
        step["type"] == "Metaspace"
        or (step["type"] == "Replace" and step["pattern"] == {"String": SPACE_MARK} and step["content"] == " ")
        for step in steps
    )
    if turns_marks and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return "metaspace"
    return "other"


def bytes_of_tokens(
    names: Sequence[str | None], added: Mapping[int, tuple[str, bool]], form: Literal["byte-level", "metaspace"]
) -> list[bytes]:
    """The bytes of each id. The bytes of an added token are its text; ids without a token have none."""
    spell = _from_byte_level if form == "byte-level" else _from_metaspace
    table = [b"" if name is None else spell(name) for name in names]
    for token_id, (text, _) in added.items():
        table[token_id] = (text if form == "byte-level" else text.replace(SPACE_MARK, " ")).encode()
    return table


def _from_byte_level(name: str) -> bytes:
    alphabet = byte_of_character()
    try:
        return bytes([alphabet[character] for character in name])
    except KeyError:
        return name.encode()


def _from_metaspace(name: str) -> bytes:
    lone = _LONE_BYTE.fullmatch(name)
    return bytes([int(lone[1], 16)]) if lone else name.replace(SPACE_MARK, " ").encode()
