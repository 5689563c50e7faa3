"""Media that cross attention reads, in random traffic: whatever is cached, evicted, retracted, aborted or fails, every row
reads its own media, pages of equal media are shared, and every page is accounted for."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bough.core.kv import Fixed, Grows, KvGroup, KvLayout, Window
from bough.core.media import Features, MediaItem
from bough.core.step import MediaLimits, Step
from tests.sim.harness import VOCAB, Sim, check_answer
from tests.sim.test_traffic import EXAMPLES, engines, play, prompts

SIZES = (5, 9, 17, 30)
"""Positions of items 0, 1, 2 ..., by turns."""
MOST = 64
PLACE = VOCAB - 1
"""The token at which an item stands."""
ALL, MEDIA = KvGroup(Grows()), KvGroup(Fixed(MOST))
LAYOUTS = {
    "one line each": (ALL, MEDIA),
    "several lines": (KvGroup(Grows(), ((), ())), KvGroup(Fixed(MOST), ((), (), ()))),
    "windows, too": (ALL, KvGroup(Window(6)), MEDIA),
    "smaller pages": (ALL, KvGroup(Fixed(MOST), parts=4)),
}
_QUICK = settings(max_examples=max(10, EXAMPLES // 2), deadline=None, suppress_health_check=list(HealthCheck))


def item(number: int, start: int = 0, length: int = 0) -> MediaItem:
    count = SIZES[number % len(SIZES)]
    key = sha256(str(number).encode()).digest()
    features = Features(path=str(number), digest=key, dtype="uint8", shape=(count,))
    return MediaItem(
        key=key,
        kind="audio",
        start=start,
        length=length,
        token=0,
        count=count,
        cost=4 * count,
        grid=(1,),
        features=features,
    )


@st.composite
def asks(draw: st.DrawFn, *, placed: bool) -> dict[str, Any]:
    """`placed`: media stand in prompts, side by side or apart: a token sees the last run of them. Tokens say where, so that
    equal prefixes see equal media. Otherwise all tokens see all media."""
    numbers = draw(st.lists(st.integers(0, 5), max_size=3))
    prompt = [token % PLACE for token in draw(prompts(longest=20))] + [1]
    media = tuple(map(item, numbers))
    if placed:
        chosen = draw(st.lists(st.integers(0, len(prompt) - 1), min_size=3, max_size=3))
        places = sorted(set(chosen))[: len(numbers)]
        media = tuple(item(number, place, 1) for number, place in zip(numbers, places, strict=False))
        for place in places:
            prompt[place] = PLACE
    return {
        "prompt": prompt,
        "media": media,
        "max_new": draw(st.integers(0, 14)),
        "stops": tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))),
        "priority": draw(st.sampled_from([0, 0, 5, 20])),
        "namespace": draw(st.sampled_from(["", "", "other"])),
    }


@st.composite
def traffic(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    engine = {**draw(engines(states=False)), "groups": LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]}
    engine["page_size"] = size = draw(st.sampled_from([4, 16]))
    layout = KvLayout(engine["groups"], size)
    tokens = draw(st.sampled_from([48, 96, 400]))
    engine["num_pages"] = tokens // size * layout.column_pages + layout.pages_of_media(MOST) + 1
    placed = draw(st.booleans())
    rows, at_once = draw(st.sampled_from([96, 512])), draw(st.sampled_from([1, 100, 4096]))
    engine["media"] = MediaLimits(num_rows=rows, step_tokens=at_once, fixed=MOST)
    script = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("ask"), asks(placed=placed)),
                st.tuples(st.just("ask"), asks(placed=placed)),
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
def test_every_row_reads_its_own_media(case: tuple[dict[str, Any], list[tuple[str, Any]]]) -> None:
    engine, script = case
    sim = Sim(**engine)
    for client in play(sim, script):
        too_long = len(client.prompt) + 1 > sim.limits.capacity_tokens
        too_many = sum(-(-each.count // 16) * 16 for each in client.ask.media) > MOST
        check_answer(sim, client, failures=too_long or too_many)
    assert not sim.problems


@_QUICK
@given(traffic(), st.dictionaries(st.integers(0, 30), st.sampled_from(["launch", "wait", "oom wait"]), max_size=4))
def test_media_of_failed_steps_are_not_read(
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


@pytest.mark.parametrize("radix", [True, False])
def test_equal_media_are_written_once_and_share_pages(radix: bool) -> None:
    sim = Sim(
        groups=LAYOUTS["several lines"], num_pages=400, page_size=4, context_length=64, num_slots=8, radix=radix,
        media=MediaLimits(num_rows=512, step_tokens=4096, fixed=MOST),
    )  # fmt: skip
    asked = {"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9], "max_new": 8}
    together = [sim.ask(**asked, media=(item(3),)) for _ in range(3)]
    other = sim.ask(**asked, media=(item(7),))
    for _ in range(3):
        sim.turn()
    layout = sim.limits.layout
    assert sim.cache.fixed.num_cached == 2 * layout.pages_of_media(30)
    sim.run()
    for client in (*together, other):
        check_answer(sim, client)
    assert len({tuple(client.tokens) for client in together}) == 1
    assert other.tokens != together[0].tokens
    again = sim.ask(**asked, media=(item(3),))
    sim.run()
    check_answer(sim, again)
    assert sim.queues.media is not None
    assert again.end.cached_tokens == (8 if radix else 0)
    assert sim.queues.media.counters.tower_tokens == 2 * 4 * 30  # the store has the embeddings in either case
    assert not sim.problems
