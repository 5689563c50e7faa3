"""The account of the embedding store against a plain model of it, and what steps are made of."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bough.config.step_memory import MEDIA_BLOCK_ROWS as BLOCK_ROWS
from bough.core.errors import BoughError
from bough.core.media import Features, MediaItem, key_ids
from bough.core.messages import Generate, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import MediaLimits
from bough.scheduler.media import (
    EmbeddingStore,
    EncodePlan,
    JobMedia,
    MediaAccount,
    MediaChunk,
    MediaStep,
    blocks_of,
    job_media,
    media_key,
    positions_of,
)

PAD = 9


def key(number: int) -> bytes:
    return sha256(bytes([number])).digest()


def item(number: int, start: int, count: int, *, length: int | None = None, cost: int = 8) -> MediaItem:
    features = Features(path=f"f{number}", digest=key(number), dtype="uint8", shape=(1,))
    return MediaItem(
        key=key(number), kind="image", start=start, length=length or count, token=PAD, count=count, cost=cost,
        grid=(1, 2, 2), features=features,
    )  # fmt: skip


def media(*items: MediaItem, prompt: list[int], positions: np.ndarray | None = None) -> JobMedia:
    made = JobMedia(items, np.array(prompt, np.int32), positions)
    made.features = {each.features.path: np.zeros(1, np.uint8) for each in items}
    return made


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_rows_have_one_owner_and_used_items_stay(moves: list[tuple[int, int, bool]]) -> None:
    """Random uses and releases of items of several sizes: rows never overlap, and what is in use is never dropped."""
    store = EmbeddingStore(8 * BLOCK_ROWS)
    counts = {number: 1 + 20 * number for number in range(6)}
    users: dict[int, set[int]] = {number: set() for number in range(6)}
    for number, user, takes in moves:
        in_use = sum(blocks_of(counts[each]) for each, held in users.items() if held)
        if takes and (users[number] or in_use + blocks_of(counts[number]) <= 8):
            there = key(number) in store.kept
            rows, fresh = store.take(key(number), counts[number], user, step=0)
            assert fresh is not there
            assert len(set(rows.tolist())) == counts[number]
            users[number].add(user)
        elif not takes:
            store.let_go(key(number), user)
            users[number].discard(user)
        for each, held in users.items():
            assert not held or store.kept[key(each)].users == held
        owned = [row for kept in store.kept.values() for row in kept.rows.tolist()]
        assert len(set(owned)) == len(owned)
        assert store.num_available == 8 - sum(blocks_of(counts[each]) for each, held in users.items() if held)
        assert store.num_held == sum(blocks_of(len(kept.rows)) for kept in store.kept.values())


def test_the_item_used_longest_ago_goes_first() -> None:
    store = EmbeddingStore(3 * BLOCK_ROWS)
    for number in (1, 2, 3):
        store.take(key(number), 5, user=0, step=0)
        store.let_go(key(number), 0)
    store.take(key(1), 5, user=0, step=1)
    store.let_go(key(1), 0)
    store.take(key(4), 5, user=0, step=1)
    assert set(store.kept) == {key(1), key(3), key(4)}
    assert store.drop_step(1) == {key(4)}
    assert store.num_available == 3
    assert store.clear() == 2


def test_content_stands_in_the_radix_key() -> None:
    prompt = [1, 2, PAD, PAD, PAD, PAD, 3]
    one, other = (media(item(number, 2, 4), prompt=prompt) for number in (1, 2))
    plain = np.array(prompt, np.int64)
    keys = [media_key(plain, each) for each in (one, other, one)]
    assert keys[0].tolist() == keys[2].tolist()
    assert keys[0][[0, 1, 6]].tolist() == [1, 2, 3]
    assert not set(keys[0][2:6].tolist()) & set(keys[1][2:6].tolist())
    assert (keys[0][2:6] < 0).all()
    assert len(set(key_ids(key(1), 1000).tolist())) == 1000
    assert plain.tolist() == prompt, "the prompt itself keeps ids of the vocabulary"


def test_a_chunk_ends_before_what_can_not_be_computed() -> None:
    account = MediaAccount(MediaLimits(num_rows=2 * BLOCK_ROWS, step_tokens=10), lambda given: np.zeros(1, np.uint8))
    prompt = [0, *[PAD] * 4, 1, *[PAD] * 4, 2, *[PAD] * 40]
    mine = media(item(1, 1, 4), item(2, 6, 4), prompt=prompt)
    plan = EncodePlan(account)
    assert plan.fit(mine, 0, 20) == 6, "the second would take the step beyond its patches"
    assert plan.fit(mine, 0, 4) == 4
    large = media(item(3, 1, 4, cost=99), item(1, 6, 4), prompt=prompt)
    assert EncodePlan(account).fit(large, 0, 20) == 6, "one item alone may have more than a step's patches"
    account.store.take(key(7), 20, user=1, step=0)
    assert EncodePlan(account).fit(mine, 0, 20) == 1, "another request holds the rows"
    account.store.let_go(key(7), 1)
    assert EncodePlan(account).fit(mine, 0, 20) == 6
    account.store.take(key(1), 4, user=1, step=0)
    assert EncodePlan(account).fit(mine, 0, 20) == 20, "what is there costs nothing"


def test_steps_name_rows_places_and_positions() -> None:
    account = MediaAccount(MediaLimits(num_rows=64, step_tokens=100, axes=3), lambda given: np.zeros(1, np.uint8))
    prompt = [0, 1, PAD, PAD, 5, PAD, PAD, 2, 3]
    axes = np.array([[0, 1, 2, 2, 2, 2, 2, 4, 5]] * 3, np.int32)
    axes[2, 2:7] = [2, 3, 2, 2, 3]
    mine = media(item(1, 2, 4, length=5), prompt=prompt, positions=axes)
    turns = np.zeros(4, np.int32)

    def step(start: int, stop: int, at: int, number: int) -> object:
        made = MediaStep(account, turns, number)
        made.add_all([MediaChunk(3, 77, mine, start, stop, at)])
        return made.done()

    assert step(0, 2, 0, 0) is None, "text before media is as any text"
    first = step(2, 6, 10, 1)
    assert first.at.tolist() == [10, 11, 13]  # type: ignore[attr-defined]
    assert first.axes_at.tolist() == [10, 11, 12, 13]  # type: ignore[attr-defined]
    assert first.axes.tolist() == axes[:, 2:6].tolist()  # type: ignore[attr-defined]
    assert len(first.encode) == 1  # type: ignore[attr-defined]
    second = step(6, 9, 0, 2)
    assert second.encode == []  # type: ignore[attr-defined]
    rows = first.encode[0].rows.tolist()  # type: ignore[attr-defined]
    assert [*first.rows.tolist(), *second.rows.tolist()] == rows  # type: ignore[attr-defined]
    assert (second.turn_slots.tolist(), second.turns.tolist()) == ([3], [-3])  # type: ignore[attr-defined]
    assert turns.tolist() == [0, 0, 0, -3]
    assert account.store.num_available == account.store.num_blocks
    assert positions_of(mine, 7, 12).tolist() == [[4, 5, 6, 7, 8]] * 3, "an answer goes on behind the prompt"
    made = MediaStep(account, turns, 3)
    made.add_all([MediaChunk(3, 78, None, 0, 2, 0)])
    back = made.done()
    assert back is not None
    assert back.turns.tolist() == [0], "the slot's next request has text only"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"start": 3}, "stand where"),
        ({"count": 3}, "stand where"),
        ({"key": b"short"}, "stand where"),
        ({"length": 40}, "stand where"),
        ({"count": 40, "length": 40}, "stand where"),
    ],
)
def test_messages_that_contradict_themselves_are_refused(change: dict[str, object], why: str) -> None:
    from msgspec.structs import replace

    prompt = np.array([0, 1, PAD, PAD, PAD, PAD, 2], np.int32)
    good = item(1, 2, 4)
    limits = MediaLimits(num_rows=64, step_tokens=100)

    def ask(given: MediaItem, positions: bytes = b"") -> Generate:
        sampling = SamplingParams()
        return Generate(id=1, rid="r", prompt=pack_ids(prompt), sampling=sampling, media=(given,), positions=positions)

    opened = lambda _: np.zeros(1, np.uint8)
    assert job_media(ask(good), prompt, limits, opened, page_size=4).places.tolist() == [2, 3, 4, 5]
    with pytest.raises(BoughError, match=why):
        job_media(ask(replace(good, **change)), prompt, limits, opened, page_size=4)
    with pytest.raises(BoughError, match="positions"):
        job_media(ask(good, b"1234"), prompt, limits, opened, page_size=4)
    with pytest.raises(BoughError, match="at most 0 can be kept"):
        job_media(ask(item(1, 2, 4)), prompt, MediaLimits(num_rows=0, step_tokens=1), opened, page_size=4)

    def gone(_: Features) -> np.ndarray:
        raise FileNotFoundError

    with pytest.raises(BoughError, match="memory is gone"):
        job_media(ask(good), prompt, limits, gone, page_size=4)
    with pytest.raises(BoughError, match="text only"):
        job_media(ask(good), prompt, None, None, page_size=4)


def test_atomic_items_are_neither_cut_nor_found_in_part() -> None:
    prompt = [1, 2, *[PAD] * 6, 3, *[PAD] * 6, 4]
    items = (item(0, 2, 6), item(1, 9, 6))
    made = JobMedia(items, np.array(prompt, np.int32), None, atomic=True)
    assert [made.outside(count) for count in range(17)] == [0, 1, 2, 2, 2, 2, 2, 2, 8, 9, 9, 9, 9, 9, 9, 15, 16]
    assert [media(*items, prompt=prompt).outside(count) for count in (0, 5, 16)] == [0, 5, 16]
    limits = MediaLimits(num_rows=4 * BLOCK_ROWS, step_tokens=64, atomic=True, most_atomic=5)
    account = MediaAccount(limits, lambda _: np.zeros(1, np.uint8))
    for start, count, most, fits in (
        (0, 5, 5, 2),
        (0, 7, 8, 8),
        (0, 8, 8, 8),
        (2, 4, 5, 0),
        (2, 4, 6, 6),
        (8, 8, 8, 8),
    ):
        assert EncodePlan(account).fit(made, start, count, most) == fits, (start, count, most)
    ask = Generate(id=1, rid="a", prompt=pack_ids(prompt), sampling=SamplingParams(), media=items)
    with pytest.raises(BoughError, match="chunked-prefill-size"):
        job_media(ask, np.array(prompt, np.int32), limits, account.open_features, page_size=4)
    made.features = {each.features.path: np.zeros(1, np.uint8) for each in items}
    step = MediaStep(account, np.zeros(4, np.int32), 0)
    step.add_all([MediaChunk(slot=3, job_id=1, media=made, start=1, stop=8, at=5)])
    found = step.done()
    assert found is not None
    assert found.spans.tolist() == [[3, 6, 2, 6]]
