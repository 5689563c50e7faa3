"""Prompts with media in random traffic: whatever is cached, evicted, retracted, aborted or fails, everybody reads rows of
their own items, at the right positions, and gets what they would get alone."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

from bough.bench.fake_media import media_tokens, positions_of
from bough.core.media import Features, MediaItem
from bough.core.messages import LogprobSpec
from bough.core.step import MediaLimits, Step
from tests.sim.harness import VOCAB, Sim, check_answer
from tests.sim.test_traffic import EXAMPLES, engines, play, prompts

PAD, SOUND = VOCAB - 1, VOCAB - 2
SIZES = (4, 9, 17, 30)
"""Positions of items 0, 1, 2 ..., by turns."""
_QUICK = settings(max_examples=max(10, EXAMPLES // 2), deadline=None, suppress_health_check=list(HealthCheck))


def item(number: int, start: int, length: int = 0, token: int = PAD) -> MediaItem:
    count = SIZES[number % len(SIZES)]
    key = sha256(str(number).encode()).digest()
    features = Features(path=str(number), digest=key, dtype="uint8", shape=(count,))
    return MediaItem(
        key=key, kind="image", start=start, length=length or count, token=token, count=count, cost=4 * count, grid=(1,),
        features=features,
    )  # fmt: skip


def with_media(parts: list[list[int] | int | tuple[int, ...]], axes: int) -> dict[str, Any]:
    """A prompt of texts, items (by number), and several of them, between which a sound stands: the first."""
    ids: list[int] = []
    seen: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            ids += [token % (VOCAB - 2) for token in part]
            seen += [token % (VOCAB - 2) for token in part]
            continue
        sound, *frames = part if isinstance(part, tuple) else (-1, part)
        heard = media_tokens(sound, SIZES[sound % len(SIZES)]).tolist() if sound >= 0 else []
        begin, pieces = len(ids), len(frames) + 1
        for number, frame in enumerate([*frames, -1]):
            piece = heard[len(heard) * number // pieces : len(heard) * (number + 1) // pieces]
            ids += [SOUND] * len(piece)
            seen += piece
            if frame >= 0:
                items.append(item(frame, len(ids)))
                ids += [PAD] * items[-1].count
                seen += media_tokens(frame, items[-1].count).tolist()
        if heard:
            items.append(item(sound, begin, len(ids) - begin, SOUND))
    items.sort(key=lambda each: each.start)
    positions = b""
    if axes and items:
        positions = np.tile(positions_of(np.array(seen)).astype(np.int32), (axes, 1)).tobytes()
    return {"prompt": ids, "media": tuple(items), "positions": positions}


@st.composite
def asks(draw: st.DrawFn, axes: int) -> dict[str, Any]:
    numbers = st.integers(0, 5)
    film = st.tuples(st.integers(6, 9), numbers, numbers)
    parts = draw(st.lists(st.one_of(prompts(longest=12), numbers, film), min_size=1, max_size=4))
    start = draw(st.integers(0, 3))
    return {
        **with_media([*parts, [1, 2]], axes),
        "max_new": draw(st.integers(0, 14)),
        "stops": tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))),
        "priority": draw(st.sampled_from([0, 0, 5, 20])),
        "namespace": draw(st.sampled_from(["", "", "other"])),
        "logprobs": draw(st.sampled_from([None, None, None, LogprobSpec(start=start)])),
    }


@st.composite
def traffic(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    axes = draw(st.sampled_from([0, 3]))
    engine = draw(engines())
    if engine["num_pages"] * engine["page_size"] < 96:
        engine["num_pages"] = 160 // engine["page_size"] + 1
    engine["media"] = MediaLimits(
        num_rows=draw(st.sampled_from([32, 48, 64, 512])), step_tokens=draw(st.sampled_from([1, 100, 4096])), axes=axes
    )
    script = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("ask"), asks(axes)),
                st.tuples(st.just("ask"), asks(axes)),
                st.tuples(st.just("abort"), st.integers(0, 30)),
                st.tuples(st.just("wait"), st.integers(1, 8)),
            ),
            min_size=2,
            max_size=14,
        )
    )
    return engine, script


@_QUICK
@given(traffic())
def test_everybody_reads_their_own_media(case: tuple[dict[str, Any], list[tuple[str, Any]]]) -> None:
    engine, script = case
    sim = Sim(**engine)
    for client in play(sim, script):
        too_large = "can be kept" in client.end.message and engine["media"].num_rows < 512
        check_answer(sim, client, failures=too_large or len(client.prompt) + 1 > sim.limits.capacity_tokens)
    assert not sim.problems


@_QUICK
@given(traffic(), st.dictionaries(st.integers(0, 30), st.sampled_from(["launch", "wait", "oom wait"]), max_size=4))
def test_items_of_failed_steps_are_not_read(
    case: tuple[dict[str, Any], list[tuple[str, Any]]], broken: dict[int, str]
) -> None:
    engine, script = case

    def failing(moment: str) -> Any:
        def fail(step: Step) -> Exception | None:
            how = broken.get(step.index, "")
            if not how.endswith(moment) or {step.index - 1, step.index - 2} <= set(broken):
                return None
            return MemoryError("out of memory") if how.startswith("oom") else RuntimeError("the device is on fire")

        return fail

    sim = Sim(**engine, fail_launch=failing("launch"), fail_wait=failing("wait"))
    for client in play(sim, script):
        check_answer(sim, client, failures=True)
