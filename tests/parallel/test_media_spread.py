"""`--mm-enable-dp-encoder`: ranks compute whole images each, and all have the embeddings of all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from prompts import make_prompt, noise, reference_answer
from seeing import load
from test_gemma3n import media_of, placed
from thread_engine import ThreadEngine
from tiny_gemma3n import golden, load_gemma3n
from tiny_vision import END, IMAGE, START

from bough.core.errors import ConfigError
from bough.runner.encoder import spread_items

MARK = [START, IMAGE, END]


@pytest.mark.parametrize(
    ("name", "sizes", "spread"),
    [
        ("qwen2_5_vl", {"tp_size": 2}, True),
        ("qwen2_5_vl", {"tp_size": 2}, False),
        ("qwen3_vl", {"tp_size": 2, "attn_cp_size": 2}, True),
        pytest.param("qwen2_vl", {"tp_size": 4, "attn_dp_size": 2}, True, marks=pytest.mark.long),
    ],
)
def test_answers_are_transformers_and_each_rank_computes_its_part(
    name: str, sizes: dict[str, int], spread: bool
) -> None:
    seen = load(name)
    several = [noise(24, 40), noise(56, 64), noise(16, 16), noise(48, 24)]
    prompts = [
        make_prompt(seen.processor, [5, *MARK, 9, *MARK, *MARK, 7, *MARK, 8], several),
        make_prompt(seen.processor, [5, *MARK, 9], [noise(24, 40, seed=1)]),
    ]
    with ThreadEngine(seen.checkpoint.path, **sizes, mm_enable_dp_encoder=spread) as engine:
        for prompt in prompts:
            engine.features |= prompt.features
            request = engine.submit(prompt.ids, 8, media=prompt.items, positions=prompt.positions)
            assert engine.answer(request) == reference_answer(seen.reference, prompt, seen.tower, 8)
        encoders = [runner.encoder for runner in engine.runners.values() if runner.encoder is not None]
    same = [each for each in encoders if each.num_computed]
    if not spread:
        assert [each.num_computed for each in same] == [5] * len(encoders), "every rank computes everything"
        return
    assert len(same) == sizes["tp_size"] // sizes.get("attn_dp_size", 1), "one replica was asked, all its ranks worked"
    assert sum(each.num_computed for each in same) == 4 + len(same), "four are shared out, a lone one is not"
    assert all(1 < each.num_computed < 5 for each in same)
    for other in same[1:]:
        assert torch.equal(other.store_RW, same[0].store_RW), "all ranks have all embeddings"
    assert same[0].store_RW.any()


def test_images_and_sounds_of_gemma3n_are_spread() -> None:
    """The tokens behind them have vectors of the tower's, which no rank finds in its part of the table."""
    with ThreadEngine(load_gemma3n().checkpoint.path, tp_size=2, mm_enable_dp_encoder=True) as engine:
        for case in ("interleaved", "text"):
            engine.features |= {each.features.path: array for each, array in media_of(case)}
            request = engine.submit(placed(case).ids.tolist(), 8, media=placed(case).items)
            assert engine.answer(request) == golden()["answers"][case][:8]
        encoders = [runner.encoder for runner in engine.runners.values() if runner.encoder is not None]
    assert [each.num_computed for each in encoders] == [2, 2]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 8))
def test_items_are_spread_evenly(sizes: list[int], ranks: int) -> None:
    shares = spread_items(sizes, ranks)
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)
    assert shares == spread_items(list(sizes), ranks), "every rank comes to the same"


def test_features_of_images_reach_the_first_stage_alone() -> None:
    """A tower gives features for two layers: they have to be in one stage."""
    path = load("qwen3_vl").checkpoint.path
    with pytest.raises(ConfigError, match="first of 2 stages has 1 layers") as caught:
        ThreadEngine(path, pp_size=2, pp_layer_partition="1,3")
    assert "begins with 2 or more" in caught.value.fix
