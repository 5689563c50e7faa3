"""Architectures without a file of ours: transformers' module with our attention answers as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import SOME_EXPERTS, STATES, WINDOWS, check_answers
from tiny import make_tiny
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP

from bough.config.hf import open_checkpoint
from bough.core.errors import UnsupportedModel
from bough.models.hosted import HostedModel
from bough.models.load import build_model
from bough.models.registry import ARCHITECTURES, facts_of

HOSTED: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("HyperCLOVAX", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "experts": ("Mellum", {**SOME_EXPERTS, "head_dim": 16}),
    "windows": ("GraniteSWA", WINDOWS),
    "not ours": ("BitNet", {}),
}


@pytest.mark.parametrize("case", HOSTED)
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    prefix, extra = HOSTED[case]
    reference = make_tiny(prefix, tmp_path, **extra)
    asked = "transformers" if f"{prefix}ForCausalLM" in ARCHITECTURES else "auto"
    model = build_model(
        open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"), model_impl=asked
    )
    assert isinstance(model, HostedModel)
    check_answers(reference, model)


def test_one_of_ours_can_be_asked_to(tmp_path: Path) -> None:
    reference = make_tiny("gemma2", tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), model_impl="transformers")
    assert isinstance(model, HostedModel)
    check_answers(reference, model)


def test_what_is_not_attention_is_refused() -> None:
    config = {"architectures": ["ZambaForCausalLM"], "model_type": "zamba", "num_hidden_layers": 4}
    with pytest.raises(UnsupportedModel, match="Zamba"):
        facts_of(config)
    with pytest.raises(UnsupportedModel, match="similar names LlamaForCausalLM"):
        facts_of({"architectures": ["LamaForCausalLM"]})
    with pytest.raises(UnsupportedModel, match="BitNet"):
        facts_of({"architectures": ["BitNetForCausalLM"], "model_type": "bitnet"}, "bough")


@pytest.mark.parametrize(("case", "kind"), [("lfm2", "conv"), ("falcon_h1", "hybrid"), ("Zaya", "hybrid")])
def test_layers_that_keep_a_state_are_refused(case: str, kind: str, tmp_path: Path) -> None:
    prefix, extra = STATES.get(case, (case, {}))
    make_tiny(prefix, tmp_path, **extra)
    with pytest.raises(UnsupportedModel, match=f"layers of the kind {kind}"):
        facts_of(open_checkpoint(str(tmp_path)).config, "transformers")


def test_modules_that_look_past_attention_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A config need not say that a layer convolves; what tokens see of one another does."""
    make_tiny("gemma2", tmp_path)
    monkeypatch.setattr(Gemma2MLP, "forward", lambda _, x: 1e-3 * x.cumsum(1))
    with pytest.raises(UnsupportedModel, match="keep something of earlier tokens"):
        build_model(
            open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"), model_impl="transformers"
        )
