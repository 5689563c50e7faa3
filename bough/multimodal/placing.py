"""From a prompt with a marker for each medium to one with a placeholder for each position, and where each item stands.

Texts are expanded before they are tokenised, so that what a family writes around its placeholders is tokenised with the
prompt; each run of placeholders stands as one token there, and gets its length afterwards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from bough.core.errors import InvalidRequest
from bough.core.media import MediaItem, MediaKind
from bough.core.messages import Ids
from bough.multimodal.processor import Mark, Marker, Piece, PlaceholderRun, Prepared, Processor, Token
from bough.tokenizer import Tokenizer


class Placed(Struct, frozen=True):
    """A prompt's token ids with all placeholders, and its items in order."""

    ids: Ids
    items: tuple[MediaItem, ...]


class Placer:
    """Puts media into prompts of one model."""

    def __init__(self, processor: Processor, tokenizer: Tokenizer | None) -> None:
        """`tokenizer` None: prompts are token ids."""
        self._processor = processor
        self._tokenizer = tokenizer

    def marker_text(self, kind: MediaKind) -> str:
        """What stands for a medium in a text whose template knows none."""
        return self._spell(self._processor.marker(kind).insert)

    def spelled(self, text: str, media: Sequence[Prepared]) -> str:
        """The text with each medium's pieces in place of its marker; a run of placeholders is one of them. Media of a kind
        whose marker the text does not have come first. Raises `InvalidRequest` if markers and media differ in number."""
        if not self._processor.in_prompt:
            return text
        text, by_text = self._marked(text, media)
        left = iter(self._numbered(self.ordered(text, media)))

        def replaced(match: re.Match[str]) -> str:
            each, pieces = next(left)
            return "".join(self._text_of(each, piece) for piece in pieces)

        text, once = re.sub("|".join(map(re.escape, by_text)), replaced, text), self._processor.once
        return self._processor.tidied(text.replace(once + once, once) if once else text)

    def ordered(self, text: str, media: Sequence[Prepared]) -> list[Prepared]:
        """The media of a text in the order in which they will stand there. Raises as `spelled` does."""
        if len(kinds_of(media)) == 1 or not self._processor.in_prompt:
            return list(media)
        text, by_text = self._marked(text, media)
        left = {kind: iter([each for each in media if each.kind == kind]) for kind in by_text.values()}
        return [next(left[by_text[match[0]]]) for match in re.finditer("|".join(map(re.escape, by_text)), text)]

    def place_spelled(self, ids: Sequence[int], media: Sequence[Prepared]) -> Placed:
        """Of the ids of a spelled text and its media, ordered: every placeholder gets its run's length."""
        array = np.asarray(ids, np.int32)
        if not self._processor.in_prompt:
            return self._beside(array, media)
        runs = [(medium, *owned) for medium, each in enumerate(media) for owned in self._runs(each)]
        wanted = [self._processor.marker(each.kind).token for _, each, _ in runs]
        at = np.flatnonzero(np.isin(array, wanted))
        if array[at].tolist() != wanted:
            raise _mismatch("the prompt has placeholders of its own")
        counts = np.ones(len(array), np.int64)
        counts[at] = [run.count for _, _, run in runs]
        starts = np.cumsum(counts) - counts
        places = [_Place(*run, int(starts[i])) for i, run in zip(at, runs, strict=True)]
        return Placed(array.repeat(counts), _items(places, self._processor))

    def place_ids(self, ids: Ids, media: Sequence[Prepared]) -> Placed:
        """Of token ids as a client sends them: with a marker for each medium, or with all placeholders already."""
        if not self._processor.in_prompt:
            return self._beside(ids, media)
        if self._is_expanded(ids, media):
            return self._placed_as_is(ids, media)
        patterns = {kind: self._pattern(ids, self._processor.marker(kind)) for kind in kinds_of(media)}
        found = {kind: _find(ids, pattern) for kind, pattern in patterns.items()}
        if any(not places for places in found.values()):
            first = [each for each in media if not found[each.kind]]
            before = [token for each in first for token in self._ids(self._processor.marker(each.kind).insert)]
            return self.place_ids(np.concatenate([np.array(before, np.int32), ids]), media)
        _check_counts(Counter({kind: len(places) for kind, places in found.items()}), media)
        left = {kind: iter([each for each in media if each.kind == kind]) for kind in found}
        parts: list[Ids] = []
        places: list[_Place] = []
        begin = length = 0
        marks = sorted((at, kind) for kind, where in found.items() for at in where)
        numbered = self._numbered([next(left[kind]) for _, kind in marks])
        for medium, ((at, kind), (each, pieces)) in enumerate(zip(marks, numbered, strict=True)):
            parts.append(ids[begin:at])
            length += at - begin
            begin = at + len(patterns[kind])
            for piece in pieces:
                if isinstance(piece, PlaceholderRun):
                    owner = _owner(each, piece)
                    places.append(_Place(medium, owner, piece, length))
                    parts.append(np.full(piece.count, self._processor.marker(owner.kind).token, np.int32))
                elif isinstance(piece, Token):
                    parts.append(np.array([piece.id], np.int32))
                elif piece == self._processor.once and _ends_with(parts, self._encode(piece)):
                    continue
                else:
                    parts.append(np.asarray(self._encode(piece), np.int32))
                length += len(parts[-1])
        parts.append(ids[begin:])
        return Placed(np.concatenate(parts), _items(places, self._processor))

    def _beside(self, ids: Ids, media: Sequence[Prepared]) -> Placed:
        """A prompt in which nothing stands for its media."""
        items = [_item(each, number, 0, 0, token=0) for each in media for number in range(len(each.processed.items))]
        return Placed(ids, tuple(items))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _numbered(self, media: Sequence[Prepared]) -> list[tuple[Prepared, list[Piece]]]:
        """The media of a prompt, in order, each with its pieces and what stands before them."""
        counts: Counter[MediaKind] = Counter()
        made = []
        for each in media:
            made.append((each, [*self._processor.prefix(each.kind, counts[each.kind]), *self._pieces(each)]))
            counts[each.kind] += 1
        return made

    def _pieces(self, each: Prepared) -> Sequence[Piece]:
        return self._processor.pieces(each.kind, each.processed)

    def _runs(self, each: Prepared) -> list[tuple[Prepared, PlaceholderRun]]:
        """Runs of placeholders, and whose they are: the medium's, or its sound's."""
        return [(_owner(each, run), run) for run in self._pieces(each) if isinstance(run, PlaceholderRun)]

    def _text_of(self, each: Prepared, piece: Piece) -> str:
        match piece:
            case str():
                return piece
            case Token(id=token):
                return self._spell((token,))
            case PlaceholderRun():
                return self._spell((self._processor.marker(_owner(each, piece).kind).token,))

    def _found(self, text: str, marker: Marker) -> str:
        """What stands for a medium in this text, if anything does."""
        usual = self._spell(marker.find)
        return usual if not marker.also or usual in text else self._spell(marker.also)

    def _marked(self, text: str, media: Sequence[Prepared]) -> tuple[str, dict[str, MediaKind]]:
        """The text with a marker for each medium, and what the markers stand for."""
        kinds = {kind: self._processor.marker(kind) for kind in kinds_of(media)}
        for marker in kinds.values():
            if marker.numbered:
                pattern = re.escape(marker.numbered).replace("%d", r"\d+")
                text = re.sub(pattern, lambda _, mark=marker.find: self._spell(mark), text)  # type: ignore[misc]
        missing = [kind for kind, marker in kinds.items() if self._found(text, marker) not in text]
        text = "".join(self.marker_text(each.kind) for each in media if each.kind in missing) + text
        markers = {kind: self._found(text, marker) for kind, marker in kinds.items()}
        _check_counts(Counter({kind: text.count(marker) for kind, marker in markers.items()}), media)
        return text, {marker: kind for kind, marker in markers.items()}

    def _pattern(self, ids: Ids, marker: Marker) -> tuple[int, ...]:
        """What stands for a medium in these ids, if anything does."""
        usual = self._ids(marker.find)
        return usual if not marker.also or _find(ids, usual) else self._ids(marker.also)

    def _ids(self, mark: Mark) -> tuple[int, ...]:
        return mark if isinstance(mark, tuple) else tuple(self._encode(mark))

    def _spell(self, mark: Mark) -> str:
        if isinstance(mark, str):
            return mark
        assert self._tokenizer is not None, "texts are refused without a tokenizer"
        return "".join(self._tokenizer.token_text(token) for token in mark)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest(
                what="this model's media need a tokenizer",
                why="text stands around their placeholders, and the server has none (--skip-tokenizer-init)",
                fix="send the prompt with all placeholders, or start the server with its tokenizer",
                param="input_ids",
            )
        return self._tokenizer.encode(text, False)

    def _is_expanded(self, ids: Ids, media: Sequence[Prepared]) -> bool:
        """Whether the ids have as many placeholders as the media have positions, and not one for each."""
        wanted: Counter[int] = Counter()
        for each in media:
            for owner, run in self._runs(each):
                wanted[self._processor.marker(owner.kind).token] += run.count
        return all(int(np.count_nonzero(ids == token)) == count for token, count in wanted.items()) and sum(
            wanted.values()
        ) > len(media)

    def _placed_as_is(self, ids: Ids, media: Sequence[Prepared]) -> Placed:
        kinds = {owner.kind for each in media for owner, _ in self._runs(each)}
        tokens = {self._processor.marker(kind).token for kind in kinds}
        if len(tokens) < len(kinds):
            raise _mismatch("kinds of media share a placeholder here: their places are known by their markers alone")
        where = {token: iter(np.flatnonzero(ids == token).tolist()) for token in tokens}
        places = []
        for medium, each in enumerate(media):
            for owner, run in self._runs(each):
                token = self._processor.marker(owner.kind).token
                mine = [next(where[token]) for _ in range(run.count)]
                if mine[-1] - mine[0] + 1 != run.count:
                    raise _mismatch("placeholders of an item do not stand together")
                places.append(_Place(medium, owner, run, mine[0]))
        return Placed(ids, _items(places, self._processor))


def kinds_of(media: Sequence[Prepared]) -> list[MediaKind]:
    return list(dict.fromkeys(each.kind for each in media))


def _owner(each: Prepared, run: PlaceholderRun) -> Prepared:
    if not run.of_sound:
        return each
    assert each.sound is not None, "its pieces say so"
    return each.sound


def item_key(digest: bytes, number: int) -> bytes:
    """The content key of one of a medium's items."""
    return sha256(digest + number.to_bytes(4, "little")).digest()


class _Place(NamedTuple):
    """A run of placeholders in a prompt."""

    medium: int
    """Which medium of the prompt: the same one may stand there twice."""
    each: Prepared
    run: PlaceholderRun
    at: int


def _items(places: Sequence[_Place], processor: Processor) -> tuple[MediaItem, ...]:
    """One for each item of each medium: from its first run to the end of its last."""
    extents: dict[tuple[int, bool, int], tuple[Prepared, int, int]] = {}
    for medium, each, run, at in places:
        key = (medium, run.of_sound, run.item)
        _, start, _ = extents.get(key, (each, at, at))
        extents[key] = (each, start, at + run.count)
    made = []
    for (*_, number), (each, start, stop) in extents.items():
        made.append(_item(each, number, start, stop, token=processor.marker(each.kind).token))
    return tuple(sorted(made, key=lambda item: item.start))


def _item(each: Prepared, number: int, start: int, stop: int, *, token: int) -> MediaItem:
    """An item of a medium, at `start .. stop - 1` of a prompt."""
    shape = each.processed.items[number]
    return MediaItem(
        key=item_key(each.digest, number),
        kind=each.kind,
        start=start,
        length=stop - start,
        token=token,
        count=shape.count,
        cost=shape.cost,
        grid=shape.grid,
        features=each.features,
        first=shape.first,
        last=shape.last,
        embedded=shape.embedded,
    )


def _ends_with(parts: Sequence[Ids], ids: Sequence[int]) -> bool:
    last = next((part for part in reversed(parts) if len(part)), np.empty(0, np.int32))
    return bool(np.array_equal(last[-len(ids) :], ids))


def _find(ids: Ids, wanted: tuple[int, ...]) -> list[int]:
    """Where a run of ids begins."""
    at = np.flatnonzero(ids[: len(ids) - len(wanted) + 1] == wanted[0])
    for offset, token in enumerate(wanted[1:], 1):
        at = at[ids[at + offset] == token]
    return [int(each) for each in at]


def _check_counts(found: Counter[MediaKind], media: Sequence[Prepared]) -> None:
    wanted = Counter(each.kind for each in media)
    for kind, count in wanted.items():
        if found[kind] != count:
            raise _mismatch(f"the prompt has {found[kind]} {kind} placeholders for {count} of them")


def _mismatch(why: str) -> InvalidRequest:
    return InvalidRequest(
        what="the prompt's placeholders don't match its media",
        why=why,
        fix="write as many placeholders as you send media, or none at all",
        param="messages",
    )
