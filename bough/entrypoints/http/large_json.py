"""Large JSON texts: measured before they are parsed, and parsed in pieces, so that other requests do not wait.

A parser in C holds the interpreter until it is done, a second and more for some texts, and builds twenty times their size
from others. Here a text is first measured block by block (numbers, strings, containers, depth) and refused if it has more
than it may. Then long texts and long lists of integers are cut out and read piece by piece, and what is left is small enough
to be parsed as usual. Every generator here yields between pieces of work that take a few milliseconds at most.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Generator
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.core.integers import shared

LARGE_BYTES: Final = 256 * 1024
"""Smaller texts are parsed at once: in a few milliseconds, whatever they hold."""
_BLOCK: Final = 64 * 1024
_LONG_TEXT: Final = 64 * 1024
_LONG_LIST: Final = 16 * 1024
"""Minimum bytes of a string, and of a list of numbers, that is cut out."""
_PIECE: Final = 64 * 1024
_PLAIN_PIECE: Final = 1024 * 1024
"""Bytes that are read at once: of lists and of texts with escapes, and of texts without."""
_QUOTE, _BACKSLASH, _OPENING, _CLOSING = b'"\\[]'
_OPEN, _CLOSE, _COMMA = 1, 2, 3
_KINDS: Final = np.zeros(256, np.uint8)
_KINDS[list(b"{[")] = _OPEN
_KINDS[list(b"}]")] = _CLOSE
_KINDS[list(b",")] = _COMMA
_DEEPER: Final = np.array([0, 1, -1, 0], np.int8)
"""What each kind of character adds to the depth."""
_WHOLE_ESCAPES: Final = re.compile(
    rb'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]'
    rb"|\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*"
)
"""The inside of a string, up to its last whole character."""
_MARK: Final = f"bough-{secrets.token_hex(16)}-"
_NUMBERS: Final = -(2**60) - secrets.randbits(48)
"""What stands where something was cut out: a text with the number of the cut, or a list of one integer that has it. No
client can know them."""

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


class Survey(NamedTuple):
    """Measures of a JSON text: what a parser would build from it."""

    commas: int
    strings: int
    containers: int
    depth: int
    cuts: list[tuple[int, int]]
    """Where long texts (within their quotation marks) and long lists of numbers (within their brackets) begin and end."""

    @property
    def numbers(self) -> int:
        """About how many numbers (or true, false, null) there are in lists; never too few."""
        return max(0, self.commas + self.containers - self.strings)


def parse_large(raw: bytes) -> Generator[None, None, tuple[bytes, list[str | list[int]]]]:
    """A large text without its long texts and lists, which are returned beside it: `graft` puts them back.

    Raises `InvalidRequest` for a text that would take too long, or too much memory, to read, or that is not JSON there.
    """
    found = yield from survey(raw)
    left: list[bytes] = []
    cut: list[str | list[int]] = []
    at = 0
    for begin, end in found.cuts:
        left.append(raw[at:begin])
        at = end
        if raw[begin - 1] == _QUOTE:
            _refuse_long_name(raw, end)
            left.append(f"{_MARK}{len(cut)}".encode())
            cut.append((yield from _text(raw, begin, end)))
        else:
            left.append(b"%d" % (_NUMBERS - len(cut)))
            cut.append((yield from _integers(raw, begin, end)))
    left.append(raw[at:])
    return b"".join(left), cut


def graft(value: Any, cut: list[str | list[int]]) -> Any:
    """`value` with what was cut out put back, wherever it is. Lists, objects and structs are changed in place."""
    if type(value) is str:
        return cut[int(value.removeprefix(_MARK))] if value.startswith(_MARK) else value
    if type(value) is list:
        if len(value) == 1 and type(value[0]) is int and 0 <= _NUMBERS - value[0] < len(cut):
            return cut[_NUMBERS - value[0]]
        for place, each in enumerate(value):
            if type(each) in _GRAFTED or isinstance(each, msgspec.Struct):
                value[place] = graft(each, cut)
    elif type(value) is dict:
        for name, each in value.items():
            if type(each) in _GRAFTED or isinstance(each, msgspec.Struct):
                value[name] = graft(each, cut)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            each = getattr(value, name)
            if type(each) in _GRAFTED or isinstance(each, msgspec.Struct):
                msgspec.structs.force_setattr(value, name, graft(each, cut))
    return value


_GRAFTED: Final = frozenset({str, list, dict})


# -- measuring ------------------------------------------------------------------------------------


def survey(raw: bytes) -> Generator[None, None, Survey]:
    """Measures a text, which may be no JSON at all: whatever it is, a parser meets no more than this. Raises
    `InvalidRequest` as soon as it has more than it may."""
    scan = _Scan()
    for begin in range(0, len(raw), _BLOCK):
        scan.add(raw, begin, min(len(raw), begin + _BLOCK))
        _check(scan.found())
        yield
    return scan.found()


def _check(found: Survey) -> None:
    if found.depth > bounds.BOUNDS["json_depth"].most:
        raise bounds.too_deep("json_depth", None)
    for bound, count in (("json_numbers", found.numbers), ("json_parts", found.containers + found.strings)):
        limit = bounds.BOUNDS[bound]
        if count > limit.most:
            raise InvalidRequest(
                what=f"there are too many {limit.unit}",
                why=f"at most {limit.most} are read",
                fix="send several requests",
            )


class _Scan:
    """What is known of the text so far."""

    def __init__(self) -> None:
        self.commas = self.quotes = self.containers = self.deepest = 0
        self.cuts: list[tuple[int, int]] = []
        self._depth = 0
        self._inside = False
        """Within a string."""
        self._backslashes = 0
        """How many the text so far ends with."""
        self._last_place, self._last_mark = -1, 0
        """The last quotation mark or bracket that is no part of a string."""

    def found(self) -> Survey:
        return Survey(self.commas, self.quotes // 2, self.containers, self.deepest, self.cuts)

    def add(self, raw: bytes, begin: int, end: int) -> None:
        """The next block. Most of a large body is within long texts: of these only their ends are looked at."""
        if self._inside:
            first = raw.find(b'"', begin, end)
            first = end if first < 0 else first
            self._note_backslashes(raw, begin, first)
            begin = first
        last = raw.rfind(b'"', begin, end) + 1
        if last > begin:
            self._scan(raw, begin, last)
            begin = last
        if self._inside:
            self._note_backslashes(raw, begin, end)
        elif begin < end:
            self._scan(raw, begin, end)

    def _scan(self, raw: bytes, begin: int, end: int) -> None:
        """Part of a block, at least a character."""
        block = np.frombuffer(raw, np.uint8, end - begin, begin)
        quotes = self._quotes(block)
        toggles = np.zeros(len(block), np.bool_)
        toggles[quotes] = True
        inside = np.logical_xor.accumulate(toggles)
        if self._inside:
            np.logical_not(inside, out=inside)
        kinds = _KINDS[block]
        kinds[inside] = 0
        depths = np.cumsum(_DEEPER[kinds], dtype=np.int32)
        self.deepest = max(self.deepest, self._depth + int(depths.max(initial=0)))
        self._depth += int(depths[-1])
        self.commas += int(np.count_nonzero(kinds == _COMMA))
        brackets = np.flatnonzero((kinds == _OPEN) | (kinds == _CLOSE))
        self.containers += int(np.count_nonzero(kinds == _OPEN))
        self._find_cuts(block, quotes, brackets, begin)
        self.quotes += len(quotes)
        self._inside = bool(inside[-1])
        self._note_backslashes(raw, begin, end)

    def _quotes(self, block: Bytes) -> Places:
        """Quotation marks that begin or end a string: those behind an even number of backslashes."""
        quotes = np.flatnonzero(block == _QUOTE)
        escapes = block == _BACKSLASH
        if not self._backslashes and not escapes.any():
            return quotes
        others = np.maximum.accumulate(np.where(escapes, -1, np.arange(len(block))))
        before = np.concatenate([[-1], others[:-1]])[quotes]
        """The last character before each quotation mark that is no backslash; -1: not in this block."""
        run = quotes - 1 - before + np.where(before < 0, self._backslashes, 0)
        real: Places = quotes[run % 2 == 0]
        return real

    def _note_backslashes(self, raw: bytes, begin: int, end: int) -> None:
        if begin == end:
            return
        if raw[end - 1] != _BACKSLASH:
            self._backslashes = 0
            return
        kept = len(raw[begin:end].rstrip(b"\\"))
        self._backslashes = end - begin - kept + (0 if kept else self._backslashes)

    def _find_cuts(self, block: Bytes, quotes: Places, brackets: Places, begin: int) -> None:
        """Two marks far apart have a long text between them, or a long list of numbers, or white space."""
        marks = np.sort(np.concatenate([quotes, brackets]))
        if not len(marks):
            return
        places = np.concatenate([[self._last_place], marks + begin])
        letters = np.concatenate([[self._last_mark], block[marks]])
        for at in np.flatnonzero(np.diff(places) > _LONG_LIST).tolist():
            first, last = int(letters[at]), int(letters[at + 1])
            span = (int(places[at]) + 1, int(places[at + 1]))
            if first == last == _QUOTE:
                seen = self.quotes + int(np.count_nonzero(letters[1 : at + 1] == _QUOTE))
                if seen % 2 and span[1] - span[0] > _LONG_TEXT:
                    self.cuts.append(span)
            elif (first, last) == (_OPENING, _CLOSING):
                self.cuts.append(span)
        self._last_place, self._last_mark = int(places[-1]), int(letters[-1])


# -- reading what was cut out ---------------------------------------------------------------------


def _refuse_long_name(raw: bytes, end: int) -> None:
    if raw[end + 1 : end + 65].lstrip()[:1] == b":":
        raise InvalidRequest(
            what="the body has a field whose name is too long",
            why=f"names have at most {_LONG_TEXT} bytes",
            fix="send a shorter one",
        )


def _text(raw: bytes, begin: int, end: int) -> Generator[None, None, str]:
    pieces: list[str] = []
    if raw.find(b"\\", begin, end) < 0:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for at in range(begin, end, _PLAIN_PIECE):
            until = min(end, at + _PLAIN_PIECE)
            if np.frombuffer(raw, np.uint8, until - at, at).min() < 32:
                raise _no_json("a text has control characters")
            try:
                pieces.append(decoder.decode(raw[at:until], until == end))
            except UnicodeDecodeError:
                raise _no_json("a text is not UTF-8") from None
            yield
        return "".join(pieces)
    while begin < end:
        whole = _WHOLE_ESCAPES.match(raw, begin, min(end, begin + _PIECE))
        piece = _up_to_character(raw, begin, whole.end(), end) if whole is not None else b""
        if not piece:
            raise _no_json("a text has a wrong escape or a control character")
        try:
            pieces.append(msgspec.json.decode(b'"%s"' % piece, type=str))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _no_json("a text is not UTF-8") from None
        begin += len(piece)
        yield
    return "".join(pieces)


def _up_to_character(raw: bytes, begin: int, end: int, last: int) -> bytes:
    """The piece without the beginning of a character that goes on behind it."""
    if end < last:
        while end > begin and raw[end] & 0xC0 == 0x80:
            end -= 1
    return raw[begin:end]


def _integers(raw: bytes, begin: int, end: int) -> Generator[None, None, list[int]]:
    found: list[int] = []
    while begin < end:
        until = end if end - begin <= _PIECE else raw.rfind(b",", begin, begin + _PIECE)
        if until < 0:
            until = raw.find(b",", begin, end)
        until = end if until < 0 else until
        piece = raw[begin:until].strip()
        if len(piece) > _PIECE:
            raise _no_json("a number has too many digits")
        try:
            numbers = msgspec.json.decode(b"[%s]" % piece, type=list[int])
        except msgspec.ValidationError:
            numbers = _whole_numbers(piece)
        except msgspec.DecodeError as error:
            raise _no_json(str(error)) from None
        found += shared(numbers)
        begin = until + 1
        yield
    if raw[end - 1 : end] == b",":
        raise _no_json("a list ends with a comma")
    return found


def _whole_numbers(piece: bytes) -> list[int]:
    """Numbers with a point that are integers all the same: some clients write all of theirs so."""
    try:
        numbers = msgspec.json.decode(b"[%s]" % piece, type=list[float])
    except msgspec.DecodeError:
        numbers = [0.5]
    if not all(map(float.is_integer, numbers)):
        raise InvalidRequest(
            what="a long list in the body has something else than integers",
            why="only lists of token ids are that long",
            fix="send integers",
        )
    return list(map(int, numbers))


def _no_json(why: str) -> InvalidRequest:
    return InvalidRequest(what="the body is not JSON", why=why, fix="send a valid JSON object")
