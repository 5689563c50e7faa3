"""Quantised models cut over ranks (as threads): the scores of the whole model, which are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import ALL_FORMATS, quantise_checkpoint, rounds_activations
from thread_engine import ThreadEngine
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.errors import BoughError
from bough.distributed.mesh import Mesh
from bough.models.load import build_model

PROMPT = [5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11, 5, 5, 77]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
QUICK = {"awq", "fp8-block", "modelopt-nvfp4", "gptq8-desc_act"}
"""The others only with `--long`: they share layouts with these, and every format's cuts are in test_golden.py."""
CUT_ANYWHERE = {
    "int8", "fp8-channel", "fp8-static", "fbgemm_fp8", "w8a8_int8", "bnb-int8", "modelopt-fp8",
    "gptq-desc_act", "gptq8-desc_act", "bnb-nf4",
}  # fmt: skip
FORMS = [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in ALL_FORMATS]


def scores(folder: Path, **settings: Any) -> list[float]:
    with ThreadEngine(folder, **settings) as engine:
        return engine.scores(PROMPT)


def reference_scores(reference: Any, weights: dict[str, torch.Tensor]) -> list[float]:
    reference.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logits, [*PROMPT[1:], logits[-1].argmax()], strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_shards_give_the_scores_of_the_whole(form: str, tmp_path: Path) -> None:
    """By the CPU's kernels where they round no activations, else by the reference: the outliers of a rank's own inputs,
    which are not rounded, are others than those of all."""
    reference = make_tiny("llama", tmp_path, **SIZES)
    meant = quantise_checkpoint(tmp_path, form)
    kernels = not rounds_activations(form)
    whole = scores(tmp_path, custom_kernels=kernels)
    assert scores(tmp_path, custom_kernels=kernels, tp_size=2) == pytest.approx(whole, abs=2e-4)
    assert whole == pytest.approx(reference_scores(reference, meant), abs=1e-3)


@pytest.mark.parametrize("form", ["fp8-block", pytest.param("int4-zeros", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}], ids=["cut", "spread"])
def test_experts_on_ranks_give_the_scores_of_the_whole(form: str, layout: dict[str, int], tmp_path: Path) -> None:
    make_tiny("qwen3_moe", tmp_path, hidden_size=64, intermediate_size=64, moe_intermediate_size=64)
    quantise_checkpoint(tmp_path, form)
    assert scores(tmp_path, **layout) == pytest.approx(scores(tmp_path), abs=2e-4)


@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_cannot_be_cut_are_refused_at_the_start(form: str, tmp_path: Path) -> None:
    """Eight ranks would get 24 of 192 inputs each. Formats with one scale for a row can be cut there, and those
    whose columns are looked up one by one: they give the scores of the whole."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    make_tiny("llama", tmp_path, **{**SIZES, **heads})
    quantise_checkpoint(tmp_path, form)
    if form in CUT_ANYWHERE:
        assert scores(tmp_path, tp_size=8) == pytest.approx(scores(tmp_path), abs=2e-4)
        return
    with pytest.raises(BoughError) as refused:
        build_model(
            open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"), mesh=Mesh.tensor(1, 8)
        )
    assert "--tp-size" in refused.value.fix
