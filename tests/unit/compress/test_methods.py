"""GPTQ and AWQ: what they round to, against rounding to the nearest; and that folded scales change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention
from tiny import make_tiny
from torch import Tensor

from bough.compress.awq import fold_scales, folds_of
from bough.compress.calibrate import Calibration, Rounding
from bough.compress.gptq import rounded_in_turn
from bough.compress.grid import clipped_grid, output_error, plain_grid
from bough.compress.open_model import OpenModel
from bough.compress.texts import Judge, cut_text
from bough.config.hf import open_checkpoint
from bough.weights.load import open_tensors

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96}
TEXTS = [[(7 * i + j * j * (i + 1)) % 120 + 5 for j in range(64)] for i in range(8)]


def inputs(tokens: int = 512, width: int = 128) -> Tensor:
    """Channels that depend on one another, some far larger than others: what a layer sees."""
    generator = torch.Generator().manual_seed(3)
    few = torch.randn(tokens, 16, generator=generator) @ torch.randn(16, width, generator=generator)
    sizes = torch.logspace(-1, 1, width)[torch.randperm(width, generator=generator)]
    return (few + 0.3 * torch.randn(tokens, width, generator=generator)) * sizes


def test_gptq_halves_what_outputs_lose() -> None:
    x, weight = inputs(), torch.randn(40, 128, generator=torch.Generator().manual_seed(1))
    gram = x.T @ x
    nearest = plain_grid(weight, 4, 32, torch.float16).rounded(weight)
    clipped = clipped_grid(weight, gram, 4, 32, torch.float16)
    in_turn = rounded_in_turn(weight, gram, clipped)

    def lost(rounded: Tensor) -> float:
        return float(((rounded - weight) @ x.T).square().sum())

    assert output_error(nearest - weight, gram) == pytest.approx(lost(nearest), rel=1e-3)
    assert lost(clipped.rounded(weight)) < lost(nearest)
    assert lost(in_turn) < 0.4 * lost(nearest)
    torch.testing.assert_close(clipped.rounded(in_turn), in_turn)  # it lies on the grid


def test_gptq_of_inputs_that_tell_nothing_is_rounding_to_the_nearest() -> None:
    weight = torch.randn(8, 64)
    grid = plain_grid(weight, 4, 32, torch.float16)
    torch.testing.assert_close(rounded_in_turn(weight, torch.eye(64), grid), grid.rounded(weight))
    dead = torch.eye(64)
    dead[5, 5] = 0
    assert (rounded_in_turn(weight, dead, grid)[:, 5] == 0).all()
    lone = torch.ones(64, 64)
    assert torch.isfinite(rounded_in_turn(weight, lone, grid)).all()


def logits(opened: OpenModel) -> Tensor:
    with torch.no_grad():
        return opened.model.logits(opened.model.forward(DenseAttention(1).step([(0, TEXTS[0])], all_logits=True)))


@pytest.mark.parametrize("case", ["llama-tied-bias", "gemma2", "phi3", "qwen2_moe", "GPTNeoX", "Cohere"])
def test_folded_scales_change_no_answer(case: str, tmp_path: Path) -> None:
    """Norms with and without an offset, fused tensors, mixtures with shared experts, biases, parallel blocks."""
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 1}
    sizes |= {"shared_expert_intermediate_size": 64, "mlp_only_layers": []} if "moe" in case else {}
    sizes |= {"num_key_value_heads": 4} if case == "GPTNeoX" else {}
    make_tiny(case, tmp_path, **sizes)
    checkpoint = open_checkpoint(str(tmp_path))
    with open_tensors(checkpoint) as tensors:
        opened = OpenModel(checkpoint, tensors, CPU)
        before = logits(opened)
        weights = {name: opened.weight(name) for name in opened.tensors}
        grams = opened.scheme.grams
        grams.wanted = {"layers."}
        logits(opened)
        taken = grams.take()
        grams.wanted = set()
        folds = [fold for index in range(len(opened.model.layers)) for fold in folds_of(opened, f"layers.{index}.")]
        for fold in folds:
            fold_scales(opened, fold, taken, 3, 8)
        assert len(folds) >= len(opened.model.layers)
        changed = [name for name in opened.tensors if not torch.equal(opened.weight(name), weights[name])]
        assert any("norm" in name for name in changed)
        torch.testing.assert_close(logits(opened), before, rtol=1e-3, atol=1e-4)


def test_both_methods_beat_rounding_to_the_nearest(tmp_path: Path) -> None:
    """By the divergence of a whole model's answers. Its weights are random: real ones gain more (docs/quantization.md)."""
    make_tiny("llama", tmp_path, **SIZES, num_hidden_layers=2)
    checkpoint = open_checkpoint(str(tmp_path))
    found: dict[str, float] = {}
    for method in ("nearest", "gptq", "awq"):
        with open_tensors(checkpoint) as tensors:
            opened = OpenModel(checkpoint, tensors, CPU)
            chosen = frozenset(name for name in opened.tensors if name.endswith("_proj.weight"))
            judge = Judge(opened, TEXTS)
            assert judge.exact().divergence == 0
            if method == "nearest":
                for name in chosen:
                    weight = opened.weight(name)
                    opened.replace(name, plain_grid(weight, 3, 32, torch.float16).rounded(weight))
            else:
                made = {}
                rounding = Rounding(method, 3, 32, chosen)  # type: ignore[arg-type]
                for codes in Calibration(opened, TEXTS).rounded(rounding):
                    made |= codes
                assert made.keys() == chosen
            found[method] = judge.of(opened.model, CPU).divergence
    assert found["gptq"] < 0.8 * found["nearest"], found
    assert found["awq"] < found["nearest"], found


def test_pieces_of_a_text() -> None:
    assert cut_text(list(range(10)), 3, 4) == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert cut_text([1, 2, 3], 5, 4) == [[1, 2, 3]]
    assert cut_text([1], 5, 4) == []
    assert len(cut_text(list(range(1000)), 3, 100)) == 3
