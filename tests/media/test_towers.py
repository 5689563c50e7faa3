"""Towers and the language models behind them, against transformers: features and logits to 1e-4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dense_attention import DenseAttention
from prompts import make_prompt, noise, reference_inputs
from seeing import CPU, NAMES, load
from tiny_vision import END, IMAGE, START, make_seeing

from bough.config.hf import open_checkpoint
from bough.config.shares import rank_parameters
from bough.layers.batch import BatchMedia
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.qwen_tower import taps, windows
from bough.models.registry import facts_of

MARK = [START, IMAGE, END]
SIZES = [(24, 40), (16, 16), (8, 56), (90, 70)]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_with_images_has_transformers_features_positions_and_logits(name: str) -> None:
    seen = load(name)
    ids = [5, 6, *MARK, 9, *MARK, *MARK, 7, *MARK, 8]
    prompt = make_prompt(seen.processor, ids, [noise(*size) for size in SIZES])
    inputs = reference_inputs(prompt, seen.tower)
    pixels = [torch.from_numpy(prompt.features[item.features.path]) for item in prompt.items]
    with torch.no_grad():
        features = seen.tower([TowerInput(each, item.grid) for each, item in zip(pixels, prompt.items, strict=True)])
        visual = seen.reference.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        deep = getattr(visual, "deepstack_features", None) or []
        expected = torch.cat([visual.pooler_output, *deep], -1)
        assert (features - expected).abs().max() <= 1e-4
        assert expected.std() > 0.1

        axes, delta = seen.reference.model.get_rope_index(
            torch.tensor([prompt.ids]), mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
        )  # fmt: skip
        ours = np.frombuffer(prompt.positions, np.int32).reshape(3, -1)
        assert ours.tolist() == axes[:, 0].tolist()
        assert int(ours.max()) + 1 - len(prompt.ids) == int(delta)

        batch = DenseAttention(1).step([(0, prompt.ids)], all_logits=True)
        at = torch.tensor([place for place, token in enumerate(prompt.ids) if token == IMAGE])
        batch.media, batch.axes_AT = BatchMedia(at, features), axes[:, 0]
        logits = seen.model.logits(seen.model.forward(batch))
        reference = seen.reference(input_ids=torch.tensor([prompt.ids]), **inputs).logits[0]
    assert (logits - reference).abs().max() <= 1e-4
    assert reference.std() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_counted(name: str) -> None:
    seen = load(name)
    held = sum(parameter.numel() for parameter in seen.model.parameters())
    assert facts_of(seen.checkpoint.config).num_parameters() == held, "memory is planned by this"


@pytest.mark.parametrize("name", NAMES)
def test_the_language_model_alone(name: str, tmp_path: Path) -> None:
    """It has no tower, passes the tower's tensors over, and answers text as before."""
    reference = make_seeing(name, tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), language_model_only=True)
    facts = facts_of(checkpoint.config)
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=64)
    assert isinstance(model, Decoder)
    assert model.tower is None
    assert facts.tower is None
    assert facts.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
        actual = model.logits(model.forward(DenseAttention(1).step([(0, [5, 6, 7])], all_logits=True)))
    assert (actual - expected).abs().max() <= 1e-4


def test_every_rank_holds_the_whole_tower() -> None:
    from bough.config.concerns import ParallelConfig
    from bough.config.layout import Layout

    facts = facts_of(load("qwen3_vl").checkpoint.config)
    assert facts.tower is not None
    one = rank_parameters(facts, Layout.of(ParallelConfig(tp_size=2)), 1)
    whole = facts.num_parameters()
    assert facts.tower.num_parameters < one < whole
    assert one - facts.tower.num_parameters > (whole - facts.tower.num_parameters) // 3


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 7), (9, 3)])
def test_windows_hold_every_position_once_and_only_neighbours(shape: tuple[int, int]) -> None:
    h, w = shape
    order, sizes = windows(h, w, 4)
    assert sorted(order.tolist()) == list(range(h * w))
    assert sum(sizes) == h * w
    assert sizes == sorted(sizes, reverse=True), "equal windows are computed together"
    start = 0
    for size in sizes:
        places = [(int(each) // w, int(each) % w) for each in order[start : start + size]]
        assert len({(row // 4, column // 4) for row, column in places}) == 1
        start += size


def test_taps_sum_to_one_and_reach_both_ends() -> None:
    for size in (1, 2, 5, 9):
        (low, a), (high, b) = taps(size, 5, torch.device("cpu"))
        assert torch.allclose(a + b, torch.ones(size))
        assert int(low[0]) == 0
        assert size == 1 or int(low[-1]) == 4 or (int(high[-1]) == 4 and b[-1] > 0.99)
