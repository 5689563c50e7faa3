"""How layers share pages: the arithmetic of windows, on the shapes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bough.config.kv_groups import (
    all_in_one,
    cut_evenly,
    held_layers,
    lifetime_of,
    plan_groups,
    stage_groups,
    why_kv_stays,
)
from bough.config.layout import Layout
from bough.config.memory_plan import GIB, PlanFacts, plan_memory
from bough.config.model_facts import Dense, Gqa, LayerFacts, ModelFacts, NormFacts
from bough.core.errors import ConfigError
from bough.core.kv import Grows, KvGroup, KvLayout, TablePlaces, Window
from bough.models.registry import facts_of

ONE = Layout()
GEMMA_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rms_norm_eps": 1e-6,
}


def model(*mixers: Gqa) -> ModelFacts:
    layers = tuple(LayerFacts(mixers=(mixer,), ffn=Dense(intermediate=8)) for mixer in mixers)
    norm = NormFacts(eps=1e-6)
    return ModelFacts(architecture="Any", hidden=8, vocab=8, max_context=100_000, norm=norm, layers=layers, config={})


def layer(window: int | None = None, kv_heads: int = 8, width: int = 64, chunk: int | None = None) -> Gqa:
    return Gqa(num_heads=16, num_kv_heads=kv_heads, head_dim=width, scale=1.0, window=window, chunk=chunk)


def test_gemma_3_27b_at_32k() -> None:
    facts = facts_of(GEMMA_27B)
    plan = plan_groups(facts, ONE, context=131_072, page_size=64)
    assert [(group.lifetime, list(map(len, group.layers))) for group in plan.groups] == [
        (Grows(), [10]),
        (Window(1024), [9, 9, 8, 9, 9, 8]),
    ]
    assert sorted(each for group in plan.groups for line in group.layers for each in line) == list(range(62))
    kept = KvLayout(plan.groups, 64).pages_for(32_768) * plan.values_per_token * 64
    whole = 32_768 * all_in_one(facts, ONE).values_per_token
    assert whole / kept == pytest.approx(5.17, abs=0.01)
    short = KvLayout(plan.groups, 64).pages_for(1024) * plan.values_per_token * 64
    assert short / (1024 * all_in_one(facts, ONE).values_per_token) < 1.13, "padding to equal pages costs little"


def test_a_plan_with_windows_serves_more_requests() -> None:
    facts = facts_of(GEMMA_27B)

    def planned(plan: Any) -> Any:
        layout = KvLayout(plan.groups, 64)
        return plan_memory(
            PlanFacts(
                model="m", device="cuda", total_bytes=140 * GIB, free_bytes=140 * GIB, weight_bytes=55 * GIB,
                kv_bytes_per_token=2 * plan.values_per_token * layout.column_pages, groups=plan.groups,
                activation_bytes=2 * GIB, step_tokens=8192, page_size=64, model_context=131_072, context_length=32_768,
            )
        )  # fmt: skip

    freed = planned(plan_groups(facts, ONE, context=32_768, page_size=64))
    whole = planned(all_in_one(facts, ONE))
    assert freed.max_concurrency / whole.max_concurrency == pytest.approx(5.17, abs=0.02)
    assert freed.kv_bytes <= whole.kv_bytes + 7 * 64 * 2 * 40960
    assert freed.num_pages * 64 * 2 * 40960 < freed.kv_bytes
    assert "10 layers keep all tokens, 52 layers keep the last 1,024 tokens" in freed.table()


def test_windows_as_long_as_the_context_free_nothing() -> None:
    facts = facts_of(GEMMA_27B)
    assert len(plan_groups(facts, ONE, context=1024, page_size=16).groups) == 1
    assert len(plan_groups(facts, ONE, context=1025, page_size=16).groups) == 2


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 4])
def test_every_rank_has_the_same_lines_and_all_its_layers(pp: int, tp: int) -> None:
    facts, layout = facts_of(GEMMA_27B), Layout(pp=pp, tp=tp)
    plan = plan_groups(facts, layout, context=131_072, page_size=16)
    seen = []
    for stage in range(pp):
        held = held_layers(facts, layout, stage)
        groups = stage_groups(plan.groups, held)
        assert [group.num_lines for group in groups] == [group.num_lines for group in plan.groups]
        layers = sorted(each for group in groups for line in group.layers for each in line)
        assert layers == list(range(len(held)))
        for group in groups:
            kinds = {lifetime_of(facts.kv_mixers[held.start + each], 131_072) for line in group.layers for each in line}
            assert kinds <= {group.lifetime}
        longest = max(len(line) for group in groups for line in group.layers)
        assert longest * 2 * 16 * 128 // tp <= plan.values_per_token
        seen += [held.start + each for each in layers]
    assert seen == list(range(62))


def test_layers_that_keep_more_of_a_token_have_smaller_pages() -> None:
    """As MiMo-V2 and Gemma 4 have it: twice as many heads where only the last tokens are seen."""
    facts = model(*[layer(), layer(window=128, kv_heads=16), layer(window=128, kv_heads=16)] * 4)
    plan = plan_groups(facts, ONE, context=4096, page_size=16)
    assert [(group.num_lines, group.parts) for group in plan.groups] == [(1, 1), (2, 2)]
    assert plan.values_per_token == 4 * 2 * 8 * 64
    # With as many ranks as to share heads, both keep one head and equal amounts.
    split = plan_groups(facts, Layout(tp=16), context=4096, page_size=16)
    assert [(group.num_lines, group.parts) for group in split.groups] == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    "mixers",
    [
        [layer(), layer(window=128, width=96)],
        [layer(), layer(window=128, kv_heads=16), layer(window=128)],
        [layer(), layer(window=128, kv_heads=8, width=64 * 32)],
    ],
)
def test_what_does_not_fit_keeps_everything_and_says_why(mixers: list[Gqa]) -> None:
    plan = plan_groups(model(*mixers), ONE, context=4096, page_size=16)
    assert [group.lifetime for group in plan.groups] == [Grows()]
    assert "pages of equal size" in plan.because


def test_chunks_and_windows_alone() -> None:
    chunks = plan_groups(model(layer(chunk=100), layer()), ONE, context=4096, page_size=16)
    assert [group.lifetime for group in chunks.groups] == [Grows(), Window(100, chunked=True)]
    alone = plan_groups(model(layer(window=100), layer(window=100)), ONE, context=4096, page_size=16)
    assert [(group.lifetime, group.layers) for group in alone.groups] == [(Window(100), ((0, 1),))]


def test_why_kv_can_not_be_moved() -> None:
    facts = facts_of(GEMMA_27B)
    assert "last tokens" in why_kv_stays(facts, plan_groups(facts, ONE, context=4096, page_size=16).groups)
    assert why_kv_stays(facts, all_in_one(facts, ONE).groups) == ""


# -- the layout itself ----------------------------------------------------------------------------

LAYOUTS = [
    KvLayout((KvGroup(Grows()), KvGroup(Window(9), ((), ()))), 4),
    KvLayout((KvGroup(Window(9)),), 4),
    KvLayout((KvGroup(Grows(), parts=2), KvGroup(Window(2)), KvGroup(Window(12, chunked=True))), 4),
    KvLayout((KvGroup(Grows()),), 1),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_a_request_by_counting(layout: KvLayout) -> None:
    """The most that a request of so many tokens needs at any moment: what its next query sees, and all that grows."""
    size, most = layout.page_size, 0
    for length in range(1, 60):
        pages = layout.growing_pages * (-(-length // size))
        for window in layout.windows:
            first = window.lifetime.first_needed(length - 1) // size
            pages += window.num_pages * ((length - 1) // size - first + 1)
        most = max(most, pages)
        assert most <= layout.pages_for(length)
    assert most == layout.pages_for(59), "no page is reserved that no request needs"
    for pages in range(60):
        fits = layout.tokens_in(pages, 50)
        assert fits == max(n for n in range(51) if n in (0, 50) or n % size == 0 if layout.pages_for(n) <= pages)


def test_groups_that_grow_come_first() -> None:
    with pytest.raises(ValueError, match="come before"):
        KvLayout((KvGroup(Window(9)), KvGroup(Grows())), 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_places_in_the_page_table_are_all_different(layout: KvLayout) -> None:
    places = TablePlaces(layout, 3, 5)
    every = [place for slot in range(4) for place in places.of(slot, 0, 5).tolist()]
    assert sorted(every) == list(range(places.size))
    one = places.of_rows(np.array([2, 0]), np.array([4, 1], np.int32)).reshape(-1, 2)
    assert one[:, 0].tolist() == places.of(2, 4, 5).tolist()
    assert one[:, 1].tolist() == places.of(0, 1, 2).tolist()


@pytest.mark.parametrize(("count", "lines"), [(7, 3), (0, 2), (2, 4), (12, 1)])
def test_lines_are_cut_evenly(count: int, lines: int) -> None:
    cut = cut_evenly(range(count), lines)
    assert [each for line in cut for each in line] == list(range(count))
    assert len(cut) == lines
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_a_context_that_only_windows_make_possible() -> None:
    """128 layers' worth of tokens would not fit; with windows the context does, and the error says what does not."""
    groups = (KvGroup(Grows(), ((0,),)), KvGroup(Window(64), ((1,), (2,), (3,))))
    facts = PlanFacts(
        model="m", device="cuda", total_bytes=4 * GIB, free_bytes=4 * GIB, weight_bytes=2 * GIB,
        kv_bytes_per_token=4 * 65536, groups=groups, activation_bytes=2**20, step_tokens=512, page_size=16,
        model_context=65536, context_length=16384,
    )  # fmt: skip
    plan = plan_memory(facts)
    assert plan.kv_tokens < 16384 <= plan.kv.tokens_in(plan.num_pages, 65536)
    assert plan_memory(replace(facts, context_length=None)).context_length > 16384
    with pytest.raises(ConfigError, match="a context of 65,536 tokens was asked for, 20,176 fit"):
        plan_memory(replace(facts, context_length=65536))
