"""Media in the scheduler: which embeddings the device has, and which a step computes and reads.

The device keeps embeddings in a store of rows, one for each position of an item. The host allocates these rows, and
every step names the rows that it writes and reads. Steps run in order, so rows can be reused as soon as the last step
that reads them is committed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from bough.config.step_memory import MEDIA_BLOCK_ROWS
from bough.core.errors import BoughError, InvalidRequest, RequestFailed
from bough.core.kv import KvLayout
from bough.core.media import KEY_BYTES, Features, MediaItem, key_ids
from bough.core.messages import Generate, Ids
from bough.core.step import I32, I64, Encode, MediaLimits, Pages, StepMedia

Open = Callable[[Features], npt.NDArray[np.generic]]
"""Opens the features of an item. Raises `OSError` or `ValueError` if they are gone or do not match."""


class MediaSight(NamedTuple):
    """The media that tokens attend to by cross attention, from token `start` on."""

    start: int
    """The first of these tokens."""
    column: int
    """First of the media's columns, among the columns of pages of all the request's media."""
    length: int
    """Positions of the media; 0: the tokens see none."""


class FixedOrder(NamedTuple):
    """How a request's media lie in the pages that cross attention reads."""

    sights: tuple[MediaSight, ...]
    """By their first token. What answers see is the last one, and begins in column 0."""
    starts: tuple[int, ...]
    """By item: its first position."""
    size: int
    """Positions with what is left free at the end of columns."""


def fixed_order(items: Sequence[MediaItem], column: int) -> FixedOrder:
    """A token sees the last items that stand before it side by side, or at its place; media that stand nowhere in the
    prompt are seen by all tokens. `column`: positions of a column of pages."""
    groups: list[list[int]] = []
    for number, item in enumerate(items):
        if groups and items[number - 1].stop == item.start:
            groups[-1].append(number)
        else:
            groups.append([number])
    sights, starts, size = [], [0] * len(items), 0
    for group in reversed(groups):  # answers see the last one
        first, length = size, 0
        seen = []
        for number in group:
            starts[number] = first + length
            length += items[number].count
            seen.append(MediaSight(items[number].start, first // column, length))
        sights.append(seen if items[group[0]].length else seen[-1:])
        size += -(-length // column) * column
    ordered = [sight for seen in reversed(sights) for sight in seen]
    if ordered and ordered[0].start > 0:
        ordered.insert(0, MediaSight(0, 0, 0))
    return FixedOrder(tuple(ordered), tuple(starts), size)


class JobMedia:
    """The media of one request."""

    def __init__(
        self,
        items: Sequence[MediaItem],
        prompt: Ids,
        positions: npt.NDArray[np.int32] | None,
        *,
        atomic: bool = False,
        column: int = 0,
    ) -> None:
        """`column`: where cross attention reads the media, positions of a column of their pages; 0: it does not."""
        self.items = tuple(items)
        self.fixed = fixed_order(items, column) if column else FixedOrder((), (), 0)
        placed_keys = [
            item.key + start.to_bytes(8, "little") for item, start in zip(items, self.fixed.starts, strict=False)
        ]
        self.fixed_key = sha256(b"".join(placed_keys)).digest() if column else b""
        """Where cross attention reads the media: what all of them together are. Empty: they stand in the prompt."""
        self.atomic = atomic
        """Items are computed in one chunk each, and no cached prefix ends inside one."""
        self.starts = [item.start for item in items]
        self.stops = [item.stop for item in items]
        self.passed: list[int] = np.maximum.accumulate([0, *self.stops])[1:].tolist()
        """By item: where it and all before it have ended."""
        self.bundle = _bundles(self.starts, self.passed)
        """By item: those that stand between one another, among them it, which are held together; from the first to the one
        behind the last. Others are alone."""
        placed = () if column else self.items
        found = [item.start + np.flatnonzero(prompt[item.start : item.stop] == item.token) for item in placed]
        self.places: I64 = np.concatenate(found) if found else np.empty(0, np.int64)
        """Positions of the prompt that get embeddings, in order."""
        self.first_place = np.cumsum([0, *(len(each) for each in found)]).tolist()
        self.positions = positions
        """[axes, prompt tokens]; None: positions have one axis."""
        self.num_prompt = len(prompt)
        self.features: dict[str, npt.NDArray[np.generic]] = {}
        """Those of the items, opened, by path."""

    @property
    def end_turn(self) -> int:
        """Difference between positions after the prompt and their indices in the KV cache."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.num_prompt

    def tokens(self) -> dict[str, int]:
        """Positions of the prompt, by kind of media."""
        counts: Counter[str] = Counter()
        for item in self.items:
            counts[item.kind] += item.count
        return dict(counts)

    def sights_between(self, start: int, stop: int) -> Iterator[tuple[MediaSight, int, int]]:
        """What tokens `start .. stop - 1` see by cross attention, where it is not what answers see: the sight, and the first
        of its tokens and the one behind the last of them."""
        sights = self.fixed.sights
        for sight, following in pairwise(sights):
            low, high = max(start, sight.start), min(stop, following.start)
            if low < high:
                yield sight, low, high

    def fixed_places(self, layout: KvLayout, pages: Pages) -> I64:
        """[lines of media, positions]: where each position of each item lies in these pages, as `page * page size + offset`
        of its line."""
        spans = [np.arange(at, at + item.count) for at, item in zip(self.fixed.starts, self.items, strict=True)]
        position = np.concatenate(spans)
        places, page = [], 0
        for parts in layout.fixed_parts:
            size = layout.page_size // parts
            columns, part, offset = position // layout.page_size, position % layout.page_size // size, position % size
            places.append(pages[page + part, columns].astype(np.int64) * size + offset)
            page += parts
        return np.stack(places)

    def between(self, start: int, stop: int) -> list[int]:
        """Numbers of the items that have a position in `start .. stop - 1`, and of those that are held with them and not
        passed."""
        low, high = bisect_right(self.passed, start), bisect_left(self.starts, stop)
        if self.fixed_key or low >= high:
            return []
        return [number for number in range(low, self.bundle[high - 1][1]) if self.stops[number] > start]

    def bundled(self, number: int, start: int) -> list[MediaItem]:
        """The items that are held with an item, it among them, but for those that end before `start`."""
        return [item for item in self.items[slice(*self.bundle[number])] if item.stop > start]

    def outside(self, count: int) -> int:
        """The longest prefix of at most `count` tokens that may have been computed before the rest."""
        if not self.atomic:
            return count
        at = bisect_left(self.starts, count) - 1
        return self.starts[at] if at >= 0 and count < self.stops[at] else count

    def features_of(self, item: MediaItem) -> npt.NDArray[np.generic]:
        whole = self.features[item.features.path]
        return whole[item.first : item.last] if item.last else whole


def _bundles(starts: list[int], passed: list[int]) -> list[tuple[int, int]]:
    """By item: the first and the one behind the last of the items whose extents overlap, it among them."""
    begins = [number for number, start in enumerate(starts) if not number or start >= passed[number - 1]]
    ends = [*begins[1:], len(starts)]
    return [bundle for bundle in zip(begins, ends, strict=False) for _ in range(*bundle)]


def job_media(
    ask: Generate, prompt: Ids, limits: MediaLimits | None, open_features: Open | None, *, page_size: int
) -> JobMedia:
    """The media of a request, with their features opened. Raises `BoughError` if they can't be computed, or if what the
    message says of them does not hold."""
    if limits is None or open_features is None:
        raise InvalidRequest(
            what="the request has media", why="the served model takes text only", fix="send text", param="messages"
        )
    _check(ask, prompt, limits)
    positions = None
    if limits.axes:
        positions = np.frombuffer(ask.positions, "<i4").reshape(limits.axes, len(prompt))
    media = JobMedia(ask.media, prompt, positions, atomic=limits.atomic, column=page_size if limits.fixed else 0)
    if media.fixed.size > -(-limits.fixed // page_size) * page_size:
        raise InvalidRequest(
            what=f"the request's media take {media.fixed.size:,} positions, at most {limits.fixed:,} are read",
            why="that is the room of cross attention for a request",
            fix="send fewer or smaller media",
            param="messages",
        )
    _check_room(media, limits)
    try:
        for item in ask.media:
            if item.features.path not in media.features:
                media.features[item.features.path] = open_features(item.features)
    except (OSError, ValueError) as error:
        raise RequestFailed(
            what="the request's media can't be read", why="their memory is gone", fix="send the request again"
        ) from error
    return media


def _check(ask: Generate, prompt: Ids, limits: MediaLimits) -> None:
    if limits.fixed:
        _check_fixed(ask, prompt, limits)
        return
    before = 0
    for item in ask.media:
        held = int(np.count_nonzero(prompt[item.start : item.stop] == item.token))
        fits = before <= item.start < item.stop <= len(prompt) and held == item.count > 0
        if not fits or len(item.key) != KEY_BYTES:
            raise _malformed("an item does not stand where it says")
        if limits.atomic and item.length > limits.most_atomic:
            raise InvalidRequest(
                what=f"an {item.kind} takes {item.length:,} positions, at most {limits.most_atomic:,} are prefilled at once",
                why="tokens of an image see each other, so that it can't be cut into chunks",
                fix="start the server with a larger --chunked-prefill-size",
                param="messages",
            )
        before = item.stop if limits.atomic else item.start
    if len(ask.positions) != 4 * limits.axes * len(prompt):
        raise _malformed("positions are not as many as tokens")


def _check_room(media: JobMedia, limits: MediaLimits) -> None:
    for bundle in {} if media.fixed_key else set(media.bundle):
        items = media.items[slice(*bundle)]
        if sum(blocks_of(item.count) for item in items) > limits.num_rows // MEDIA_BLOCK_ROWS:
            count = sum(item.count for item in items)
            raise InvalidRequest(
                what=f"an {items[0].kind} takes {count:,} positions, at most {limits.num_rows:,} can be kept",
                why="embeddings are kept until the prompt is computed (--mm-cache-size)",
                fix="send a smaller one, or start the server with a larger --mm-cache-size",
                param="messages",
            )


def _check_fixed(ask: Generate, prompt: Ids, limits: MediaLimits) -> None:
    """Media that cross attention reads: they take no positions of the prompt, but all of them are computed in one step."""
    before = 0
    for item in ask.media:
        if not before <= item.start <= item.stop <= len(prompt) or item.count <= 0 or len(item.key) != KEY_BYTES:
            raise _malformed("an item does not stand where it says")
        before = item.stop
    count = sum(item.count for item in ask.media)
    if sum(blocks_of(item.count) for item in ask.media) > limits.num_rows // MEDIA_BLOCK_ROWS:
        raise InvalidRequest(
            what=f"the request's media take {count:,} positions, at most {limits.num_rows:,} can be kept",
            why="all media of a request are computed in one step (--mm-cache-size)",
            fix="send fewer, or start the server with a larger --mm-cache-size",
            param="messages",
        )


def _malformed(why: str) -> BoughError:
    return RequestFailed(what="the request's media can't be used", why=why)


def media_key(key: I64, media: JobMedia) -> I64:
    """A prompt's radix key with ids that stand for the content of its media."""
    if media.fixed_key:
        return key
    key = key.copy()
    for item, first, last in zip(media.items, media.first_place, media.first_place[1:], strict=False):
        key[media.places[first:last]] = key_ids(item.key, last - first)
    return key


class Kept(Struct, eq=False):
    """An item whose embeddings are in the store, or will be when the steps in flight have run."""

    rows: I32
    blocks: list[int]
    step: int
    """The step that computes it."""
    users: set[int] = set()
    """Requests whose prompts are in the middle of it."""


class EmbeddingStore:
    """Which rows of the store hold which item. Items that no request is in the middle of stay as a cache, the one that was
    used longest ago going first."""

    def __init__(self, num_rows: int) -> None:
        self.kept: OrderedDict[bytes, Kept] = OrderedDict()
        self.num_blocks = num_rows // MEDIA_BLOCK_ROWS
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._used = 0
        """Blocks of items that some request is in the middle of."""

    @property
    def num_available(self) -> int:
        """Blocks that are free, or hold what no request needs now."""
        return self.num_blocks - self._used

    @property
    def num_held(self) -> int:
        """Blocks that hold something."""
        return self.num_blocks - len(self._free)

    def take(self, key: bytes, count: int, user: int, step: int) -> tuple[I32, bool]:
        """The rows of an item for a request, and whether `step` has to compute it. There must be room."""
        kept = self.kept.get(key)
        fresh = kept is None
        if kept is None:
            blocks = self._alloc(blocks_of(count))
            rows = (np.array(blocks)[:, None] * MEDIA_BLOCK_ROWS + np.arange(MEDIA_BLOCK_ROWS)).reshape(-1)[:count]
            kept = self.kept[key] = Kept(rows.astype(np.int32), blocks, step)
        self.kept.move_to_end(key)
        if not kept.users:
            self._used += len(kept.blocks)
        kept.users.add(user)
        return kept.rows, fresh

    def let_go(self, key: bytes, user: int) -> None:
        """The request no longer needs the item."""
        kept = self.kept.get(key)
        if kept is not None and user in kept.users:
            kept.users.remove(user)
            if not kept.users:
                self._used -= len(kept.blocks)

    def drop_step(self, step: int) -> set[bytes]:
        """`step` has failed. Returns the keys of what it was to compute: their rows hold anything."""
        lost = {key for key, kept in self.kept.items() if kept.step == step}
        for key in lost:
            self._drop(key)
        return lost

    def clear(self) -> int:
        """Forgets all items that no request is in the middle of. Returns how many."""
        unused = [key for key, kept in self.kept.items() if not kept.users]
        for key in unused:
            self._drop(key)
        return len(unused)

    def _alloc(self, count: int) -> list[int]:
        while len(self._free) < count:
            oldest = next(key for key, kept in self.kept.items() if not kept.users)
            self._drop(oldest)
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def _drop(self, key: bytes) -> None:
        kept = self.kept.pop(key)
        if kept.users:
            self._used -= len(kept.blocks)
        self._free += kept.blocks


def blocks_of(count: int) -> int:
    return -(-count // MEDIA_BLOCK_ROWS)


class MediaCounters(Struct):
    """Since the start."""

    items: int = 0
    """Items of requests whose prompts reached them: computed, or found in the store."""
    hits: int = 0
    """Of those, found."""
    tower_tokens: int = 0
    """Computed."""


class MediaAccount:
    """The scheduler's media state: the store, limits per step, and counters."""

    def __init__(self, limits: MediaLimits, open_features: Open) -> None:
        self.limits = limits
        self.open_features = open_features
        self.store = EmbeddingStore(limits.num_rows)
        self.counters = MediaCounters()

    def let_go(self, job_id: int, media: JobMedia) -> None:
        """A request leaves its slot, for good or to come back."""
        for item in media.items:
            self.store.let_go(item.key, job_id)


class EncodePlan:
    """Plans one step's media: which items fit into it. Pure: `MediaStep` changes the store."""

    def __init__(self, account: MediaAccount) -> None:
        self._store = account.store
        self._limits = account.limits
        self._blocks = account.store.num_available
        self._tokens = account.limits.step_tokens
        self._counted: set[bytes] = set()
        self._encodes = False

    def fit(self, media: JobMedia, start: int, count: int, most: int = 0) -> int:
        """How many of the `count` tokens from `start` on the step can have: those before the first item that must wait.
        `most`: how many more there could be, for an item that is computed whole."""
        for number in media.between(start, start + count):
            item = media.items[number]
            if media.atomic and item.stop > start + count:
                if item.stop > start + most:
                    return max(0, item.start - start)
                count = item.stop - start
            if not self._has_room(media.bundled(number, start)):
                return max(0, media.starts[media.bundle[number][0]] - start)
        return count

    def fit_fixed(self, media: JobMedia) -> bool:
        """Whether the step can compute all media of a request whose cross attention reads them."""
        if media.fixed_key not in self._counted and not self._has_room(media.items):
            return False
        self._counted.add(media.fixed_key)
        return True

    def _has_room(self, items: Sequence[MediaItem]) -> bool:
        """Whether the step can have all of these items, which then count as its own."""
        wanted = {item.key: item for item in items if item.key not in self._counted}
        missing = [item for item in wanted.values() if item.key not in self._store.kept]
        unused = [key for key in wanted if key in self._store.kept and not self._store.kept[key].users]
        blocks = sum(blocks_of(wanted[key].count) for key in [*unused, *(item.key for item in missing)])
        cost = sum(item.cost for item in missing)
        if blocks > self._blocks or (missing and cost > self._tokens and self._encodes):
            return False
        self._counted |= set(wanted)
        self._blocks -= blocks
        self._tokens -= cost
        self._encodes = self._encodes or bool(missing)
        return True


class FixedRow(Struct):
    """What the cross attention of a row that begins reads."""

    length: int = 0
    """Positions of the media that its answer sees; 0: it has none."""
    places: I64 | None = None
    """Where the step has to write its media (`JobMedia.fixed_places`); None: they are there."""


class MediaChunk(Struct):
    """A prompt's chunk, as far as media are concerned."""

    slot: int
    job_id: int
    media: JobMedia | None
    start: int
    stop: int
    at: int
    """Its first token's place in the step."""
    fixed: FixedRow | None = None
    """Of a row that begins in this step, where cross attention reads media."""

    def needed_items(self) -> list[MediaItem]:
        """Whose embeddings the step reads."""
        if self.media is None:
            return []
        if self.fixed is not None and self.fixed.places is not None:
            return list(self.media.items)
        return [self.media.items[number] for number in self.media.between(self.start, self.stop)]


class MediaStep:
    """Makes `StepMedia` of the chunks of a step: the store changes as planned."""

    def __init__(self, account: MediaAccount, turns: I32, step: int, lengths: I32 | None = None) -> None:
        """`turns`, `lengths`: by slot, what the device has; brought up to date here. `lengths`: where cross attention reads
        media."""
        self._account = account
        self._turns = turns
        self._media_lengths = lengths
        self._step = step
        self._encode: list[Encode] = []
        self._at: list[I64] = []
        self._rows: list[I32] = []
        self._axes_at: list[I64] = []
        self._axes: list[npt.NDArray[np.int32]] = []
        self._turned: dict[int, int] = {}
        self._passed: list[tuple[bytes, int]] = []
        self._spans: list[tuple[int, int, int, int]] = []
        self._lengths: dict[int, int] = {}
        self._sights: list[tuple[int, int, int, int, int]] = []
        self._fixed_rows: list[I32] = []
        self._fixed_at: list[I64] = []

    def add_all(self, chunks: Sequence[MediaChunk]) -> None:
        store = self._account.store
        for chunk in chunks:  # what is there stays there while others' items get their rows
            if chunk.media is not None:
                for item in chunk.needed_items():
                    if item.key in store.kept:
                        store.take(item.key, item.count, chunk.job_id, self._step)
        for chunk in chunks:
            self._add(chunk)

    def _add(self, chunk: MediaChunk) -> None:
        media = chunk.media
        turn = 0
        if chunk.fixed is not None:
            self._begin_fixed(chunk, chunk.fixed)
        if media is not None:
            for sight, low, high in media.sights_between(chunk.start, chunk.stop):
                self._sights.append((chunk.slot, sight.column, sight.length, chunk.at + low - chunk.start, high - low))
            numbers = media.between(chunk.start, chunk.stop)
            for number in numbers:
                self._read(chunk, media, number)
            turn = self._turn_of(chunk, media, with_media=bool(numbers))
        if turn != self._turns[chunk.slot]:
            self._turns[chunk.slot] = self._turned[chunk.slot] = turn

    def _read(self, chunk: MediaChunk, media: JobMedia, number: int) -> None:
        item, counters, store = media.items[number], self._account.counters, self._account.store
        held = item.start >= chunk.stop or item.start < chunk.start  # counted where it begins
        rows, fresh = store.take(item.key, item.count, chunk.job_id, self._step)
        if fresh:
            features = media.features_of(item)
            self._encode.append(Encode(features=features, grid=item.grid, rows=rows, embedded=item.embedded))
            counters.tower_tokens += item.cost
        counters.items += not held
        counters.hits += not (held or fresh)
        first, last = media.first_place[number], media.first_place[number + 1]
        places = media.places[first:last]
        lo, hi = np.searchsorted(places, (chunk.start, chunk.stop))
        self._at.append(places[lo:hi] - chunk.start + chunk.at)
        self._rows.append(rows[lo:hi])
        if media.atomic:
            assert chunk.start <= item.start < item.stop <= chunk.stop, "it is computed in one chunk"
            self._spans.append((chunk.slot, item.start - chunk.start + chunk.at, item.start, item.length))
        if item.key not in {each.key for each in media.bundled(number, chunk.stop)}:
            self._passed.append((item.key, chunk.job_id))

    def _begin_fixed(self, chunk: MediaChunk, row: FixedRow) -> None:
        """The media of a row that begins: how many positions it reads and, if they are not there, what is written where."""
        media, counters, known = chunk.media, self._account.counters, self._media_lengths
        assert known is not None, "cross attention reads media"
        if row.length != known[chunk.slot]:
            known[chunk.slot] = self._lengths[chunk.slot] = row.length
        if media is None:
            return
        counters.items += len(media.items)
        if row.places is None:
            counters.hits += len(media.items)
            return
        for item in media.items:
            rows, fresh = self._account.store.take(item.key, item.count, chunk.job_id, self._step)
            if fresh:
                features = media.features_of(item)
                self._encode.append(Encode(features=features, grid=item.grid, rows=rows, embedded=item.embedded))
                counters.tower_tokens += item.cost
            counters.hits += not fresh
            self._fixed_rows.append(rows)
            self._passed.append((item.key, chunk.job_id))
        self._fixed_at.append(row.places)

    def _turn_of(self, chunk: MediaChunk, media: JobMedia, *, with_media: bool) -> int:
        """The slot's turn from now on. Chunks with media bring their positions with them."""
        if media.positions is None:
            return 0
        if not with_media:
            inside = chunk.start < media.num_prompt
            return int(media.positions[0, chunk.start]) - chunk.start if inside else media.end_turn
        self._axes_at.append(np.arange(chunk.at, chunk.at + chunk.stop - chunk.start))
        self._axes.append(positions_of(media, chunk.start, chunk.stop))
        return media.end_turn if chunk.stop >= media.num_prompt else int(self._turns[chunk.slot])

    def done(self) -> StepMedia | None:
        """Call once, after the last chunk. None: the step has no media, and nothing that slots have of them changes."""
        for key, job_id in self._passed:
            self._account.store.let_go(key, job_id)
        if not (self._at or self._turned or self._lengths or self._fixed_rows or self._sights):
            return None
        made = StepMedia(encode=self._encode)
        if self._sights:
            made.sights = np.array(self._sights, np.int32)
        if self._lengths:
            made.fixed_slots = np.array(list(self._lengths), np.int32)
            made.fixed_lengths = np.array(list(self._lengths.values()), np.int32)
        if self._fixed_rows:
            made.fixed_rows = np.concatenate(self._fixed_rows)
            made.fixed_at = np.concatenate(self._fixed_at, axis=1)
        if self._at:
            made.at = np.concatenate(self._at).astype(np.int32)
            made.rows = np.concatenate(self._rows)
        if self._spans:
            made.spans = np.array(self._spans, np.int32)
        if self._axes:
            made.axes_at = np.concatenate(self._axes_at).astype(np.int32)
            made.axes = np.concatenate(self._axes, axis=1)
        if self._turned:
            made.turn_slots = np.array(list(self._turned), np.int32)
            made.turns = np.array(list(self._turned.values()), np.int32)
        return made


def positions_of(media: JobMedia, start: int, stop: int) -> npt.NDArray[np.int32]:
    """[axes, stop - start]: positions of tokens of a prompt, and of an answer behind it."""
    assert media.positions is not None
    cut = min(stop, media.num_prompt)
    inside = media.positions[:, start:cut]
    if stop <= media.num_prompt:
        return inside
    rest = np.arange(max(start, cut), stop, dtype=np.int32) + media.end_turn
    return np.concatenate([inside, np.broadcast_to(rest, (len(inside), len(rest)))], axis=1).astype(np.int32)


def lost_rows(media: JobMedia, lost: set[bytes], computed: int) -> bool:
    """Whether what a request computes beyond its first `computed` tokens depends on an item among `lost`."""
    if media.fixed_key:
        return False  # what was written of them is lost (`FixedPages.drop_step`)
    return any(item.key in lost and item.stop > computed for item in media.items)
