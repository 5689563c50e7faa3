"""Cuts long texts at places where a token always ends, so that each piece can be encoded separately.

The tokenizer library uses about a hundred bytes of memory per byte of text while it encodes; with pieces it uses that
for one piece at a time. Whether a tokenizer allows it is tested once, on words of its vocabulary: encoding two texts
separately must give the same ids as encoding them together.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from bough.core.errors import InvalidRequest

LONG_CHARS: Final = 32 * 1024
"""A text with more characters is cut into pieces of about this size."""
MOST_UNCUT_CHARS: Final = 128 * 1024
"""Maximum number of characters without a place to cut; a longer text is refused."""
_NEAR: Final = 2048
_TRIES: Final = 256
_ALPHABETS: Final = ("abcdefghij", "KLMNOPQRST", "0123456789", "éüñçßøåž", "漢字日本語文", "абвгдежз", "אבגד", "ไทย")

Encode = Callable[[Sequence[str]], list[list[int]]]


class UncuttableText(InvalidRequest):
    """A text that is too long to be encoded whole and has no place to cut it."""


def uncuttable(num_chars: int) -> UncuttableText:
    return UncuttableText(
        what=f"a text has {num_chars} characters without a word's end",
        why=f"at most {MOST_UNCUT_CHARS} are tokenised at once",
        fix="put spaces or line breaks between its words, or send token ids",
        param="prompt",
    )


class Rule:
    """Where to cut: behind a letter or digit, before a single space or line break that a letter follows.

    `keep_space`: the space goes to the piece behind it; otherwise it is dropped, for tokenizers that put one before every
    text. Line breaks stay.
    """

    def __init__(self, *, keep_space: bool, at_breaks: bool) -> None:
        self.place = re.compile(r"[^\W_](?=[ \n][^\W\d_])" if at_breaks else r"[^\W_](?= [^\W\d_])")
        self._keep_space = keep_space

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the pieces of a text begin and end. Raises `UncuttableText`, perhaps after some of them."""
        begin = 0
        while len(text) - begin > LONG_CHARS:
            near = list(self.place.finditer(text, begin + LONG_CHARS - _NEAR, begin + LONG_CHARS + 2))
            found = near[-1] if near else self.place.search(text, begin + LONG_CHARS, begin + MOST_UNCUT_CHARS + 2)
            if found is None:
                break
            yield begin, found.end()
            begin = found.end()
            if not self._keep_space and text[begin] == " ":
                begin += 1
        if len(text) - begin > MOST_UNCUT_CHARS:
            raise uncuttable(len(text) - begin)
        yield begin, len(text)


def find_rule(encode: Encode, whole: Iterable[str]) -> Rule | None:
    """The rule that this tokenizer's encoding (without special tokens) follows; None: no cut is safe. `whole`: texts that
    must not be cut."""
    pick = random.Random(0)

    def word() -> str:
        letters = pick.choice(_ALPHABETS)
        return "".join(pick.choice(letters) for _ in range(pick.randint(1, 8)))

    lefts = [pick.choice(["", " ", "(", "\n"]) + word() for _ in range(_TRIES)]
    rights = [pick.choice(_ALPHABETS[:2] + _ALPHABETS[3:])[0] + word() for _ in range(_TRIES)]
    alone = encode(lefts)
    spaced = encode([f"{left} {right}" for left, right in zip(lefts, rights, strict=True)])
    for keep_space in (True, False):
        behind = encode([f" {right}" if keep_space else right for right in rights])
        if all(one + two == both for one, two, both in zip(alone, behind, spaced, strict=True)):
            broken = encode([f"{left}\n{right}" for left, right in zip(lefts, rights, strict=True)])
            after = encode([f"\n{right}" for right in rights])
            at_breaks = all(one + two == both for one, two, both in zip(alone, after, broken, strict=True))
            rule = Rule(keep_space=keep_space, at_breaks=at_breaks)
            return None if any(map(rule.place.search, whole)) else rule
    return None
