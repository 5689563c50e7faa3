"""The tokenizer as matchers need it: the bytes of every token, the ids that end an answer, and how text is
tokenised."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from bough.core.step import I32
from bough.grammar.bits import bits

if TYPE_CHECKING:
    from bough.tokenizer import Tokenizer

I64s = np.ndarray[tuple[int], np.dtype[np.int64]]


class WorkerVocabulary(Struct, frozen=True):
    """The vocabulary as a worker process gets it."""

    names: list[bytes]
    """Bytes by id; empty: the id is unused."""
    size: int
    """Ids the model has; masks have a bit for each."""
    stop_ids: tuple[int, ...]
    special_ids: tuple[int, ...]
    """Control tokens, which are not text unless a grammar names one."""

    def spelled(self, visible: Iterable[int] = ()) -> list[bytes]:
        """Bytes by id as a grammar sees them: special tokens are empty, except the visible ones."""
        hidden = set(self.special_ids) - set(visible)
        names = [b"" if i in hidden else name for i, name in enumerate(self.names[: self.size])]
        return names + [b""] * (self.size - len(names))

    def named_in(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Special tokens whose names occur in the texts."""
        joined = "\0".join(texts).encode()
        return tuple(i for i in self.special_ids if i < len(self.names) and self.names[i] and self.names[i] in joined)


class Vocabulary:
    """Tokens, tokenization of forced text, and lookup of tokens by their first bytes."""

    def __init__(self, tokenizer: Tokenizer, size: int, stop_ids: Iterable[int]) -> None:
        names = tokenizer.token_bytes()
        if names is None:
            raise ValueError("the model's tokenizer has no table of bytes, so its answers can't be constrained")
        self.tokens = WorkerVocabulary(
            names=names,
            size=size,
            stop_ids=tuple(sorted({i for i in (*stop_ids, *tokenizer.eos_ids) if 0 <= i < size})),
            special_ids=tuple(sorted(tokenizer.special_ids)),
        )
        self._tokenizer = tokenizer
        self._cut: dict[str, tuple[int, ...]] = {}
        self._stems: dict[bytes, tuple[tuple[int, bytes], ...]] = {}

    @property
    def size(self) -> int:
        return self.tokens.size

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.tokens.names), default=1)

    def bytes_of(self, token: int) -> bytes:
        return self.tokens.names[token] if token < len(self.tokens.names) else b""

    def cut(self, text: str) -> tuple[int, ...]:
        """The tokenizer's own tokens of a text; empty if they don't join to exactly that text."""
        found = self._cut.get(text)
        if found is None:
            ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
            whole = b"".join(self.bytes_of(i) for i in ids) == text.encode() and all(i < self.size for i in ids)
            found = ids if whole else ()
            if len(self._cut) >= 8192:
                self._cut.clear()
            self._cut[text] = found
        return found

    @cached_property
    def _by_bytes(self) -> tuple[list[bytes], I64s]:
        pairs = sorted((name, i) for i, name in enumerate(self.tokens.spelled()) if name)
        return [name for name, _ in pairs], np.array([i for _, i in pairs], np.int64)

    def extends(self, start: bytes, mask: I32) -> bool:
        """Whether the mask allows a token that begins with these bytes and is longer."""
        names, ids = self._by_bytes
        low = bisect_left(names, start)
        while low < len(names) and names[low] == start:
            low += 1
        high = bisect_left(names, _after(start)) if start.strip(b"\xff") else len(names)
        some = ids[low:high]
        return bool(((mask[some >> 5] >> (some & 31).astype(np.int32)) & 1).any())

    def stems(self, mask: I32) -> tuple[tuple[int, bytes], ...]:
        """The tokens of a small mask that are prefixes of another one within a word, with their bytes."""
        key = mask.tobytes()
        found = self._stems.get(key)
        if found is None:
            names = sorted((self.bytes_of(token), token) for token in bits(mask))
            found = tuple((token, name) for (name, token), (longer, _) in pairwise(names) if _in_word(name, longer))
            if len(self._stems) >= 512:
                self._stems.clear()
            self._stems[key] = found
        return found


def _in_word(name: bytes, longer: bytes) -> bool:
    """Whether `longer` continues `name` within a word."""
    if not name or len(longer) <= len(name) or not longer.startswith(name):
        return False
    return all(byte >= 128 or chr(byte).isalnum() for byte in (name[-1], longer[len(name)]))


def _after(start: bytes) -> bytes:
    """The first bytes string that sorts after everything that begins with `start`."""
    trimmed = start.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1])
