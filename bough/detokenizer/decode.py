"""Decodes token ids incrementally; never returns part of a character.

Most vocabularies are tables of bytes: the text is the bytes joined. For other vocabularies (whose decoders look at
neighbouring tokens) the tokenizer library decodes a short window before and after each token, and the difference is the
new text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from bough.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MOST_STUMPS = 8
"""Maximum number of tokens in one character. If more arrive without completing it, the bytes are invalid and decoded as
U+FFFD."""


class TokenDecoder(Protocol):
    """Decodes one answer."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        ...

    def finish(self) -> str:
        """The rest of the text: an incomplete character becomes U+FFFD."""
        ...


class Tables:
    """What each id adds to the text: a string if it consists of whole characters, else bytes."""

    __slots__ = ("spelled", "texts")

    def __init__(self, token_bytes: Sequence[bytes], silent: frozenset[int]) -> None:
        self.spelled = [b"" if i in silent else spelled for i, spelled in enumerate(token_bytes)]
        self.texts = [_whole(spelled) for spelled in self.spelled]


def _whole(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


class ByteDecoder:
    """For vocabularies that are tables of bytes."""

    __slots__ = ("_pending", "_tables")

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._pending = b""

    def feed(self, ids: Sequence[int]) -> str:
        texts, pending = self._tables.texts, self._pending
        try:
            if not pending and len(ids) == 1:
                text = texts[ids[0]]
                if text is not None:
                    return text
            return "".join([self._one(token_id) for token_id in ids])
        except (
            IndexError
        ):  # an id beyond the vocabulary (padding of the embedding); the ids before it are decoded again
            self._pending = pending
            return "".join([self._one(token_id) for token_id in ids if token_id < len(texts)])

    def _one(self, token_id: int) -> str:
        if not self._pending:
            text = self._tables.texts[token_id]
            if text is not None:
                return text
        self._pending += self._tables.spelled[token_id]
        text, used = codecs.utf_8_decode(self._pending, "replace", False)
        self._pending = self._pending[used:]
        return text

    def finish(self) -> str:
        rest, self._pending = self._pending, b""
        return rest.decode("utf-8", "replace")


class WindowDecoder:
    """Decoder for all other vocabularies, by the tokenizer library. `tail`: last ids of the prompt, as left context.
    `silent`: ids that have no text."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], silent: frozenset[int], spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._spaces = spaces
        self._ids = [token_id for token_id in tail if token_id not in silent]
        self._read = len(self._ids)
        """Number of ids whose text was returned. The last of them serve as context."""

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._one(token_id) for token_id in ids])

    def _one(self, token_id: int) -> str:
        if token_id in self._silent:
            return ""
        self._ids.append(token_id)
        text = self._news()
        if not text or (text.endswith(_REPLACEMENT) and len(self._ids) - self._read < _MOST_STUMPS):
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        text = self._news()
        self._advance()
        return text

    def _news(self) -> str:
        before = self._decode(self._ids[: self._read])
        after = self._decode(self._ids)
        return after[len(before) :]

    def _advance(self) -> None:
        del self._ids[: max(0, self._read - 1)]
        self._read = len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, False, self._spaces) if ids else ""


class DecoderFactory:
    """Makes decoders for one tokenizer; tables are shared by all answers of the same kind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spelled = tokenizer.token_bytes()
        self._tables = lru_cache(maxsize=16)(self._make_tables)
        if self._spelled is not None:
            self._tables(True, frozenset())

    def make(self, *, skip_special: bool, spaces: bool, keep: frozenset[str], tail: Sequence[int]) -> TokenDecoder:
        """`keep`: special tokens that are decoded although special tokens are skipped."""
        kept = self._tokenizer.special_among(keep)
        if self._spelled is None:
            return WindowDecoder(self._tokenizer, tail, self._tokenizer.silent_ids(skip_special, kept), spaces)
        return ByteDecoder(self._tables(skip_special, kept))

    def token_text(self, token_id: int) -> str:
        """Text of a single token; the name of a special token."""
        return self._tokenizer.token_text(token_id)

    def _make_tables(self, skip_special: bool, kept: frozenset[int]) -> Tables:
        assert self._spelled is not None
        return Tables(self._spelled, self._tokenizer.silent_ids(skip_special, kept))
