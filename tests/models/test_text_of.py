"""Models that also see answer texts as transformers does, from files with both generations of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import WINDOWS, check_answers
from safetensors.torch import load_file, save_file
from tiny import SIZES, shake

from bough.config.hf import open_checkpoint, with_text_config
from bough.layers.batch import Model
from bough.models.load import build_model
from bough.models.registry import facts_of

VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", "gemma3_text", {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "mistral3": ("Mistral3", "mistral", {"head_dim": 16, "sliding_window": None}),
}


@pytest.mark.parametrize("names", ["now", "before"])
@pytest.mark.parametrize("case", TEXTS)
def test_answers_as_transformers_does(case: str, names: str, tmp_path: Path) -> None:
    prefix, kind, extra = TEXTS[case]
    vision = {**VISION, "model_type": "pixtral", "head_dim": 8} if case == "mistral3" else VISION
    config = getattr(transformers, f"{prefix}Config")(
        text_config={"model_type": kind, **SIZES, **extra}, vision_config=vision, attn_implementation="eager",
        **({"mm_tokens_per_image": 4} if case == "gemma3" else {}),
    )  # fmt: skip
    reference = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    shake(reference)
    reference.save_pretrained(tmp_path)
    rename(tmp_path / "model.safetensors", names)
    assert "vocab_size" not in json.loads((tmp_path / "config.json").read_text())
    check_answers(reference, load(tmp_path))


def rename(file: Path, names: str) -> None:
    """Writes the tensors by the names of one generation."""
    old, new = "language_model.model.", "model.language_model."
    if names == "before":
        old, new = new, old
    made = {}
    for name, tensor in load_file(file).items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
        made[name] = tensor
    save_file(made, file)


def load(folder: Path) -> Model:
    return build_model(
        open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"), context_length=128
    )


def test_what_published_files_leave_out_is_known() -> None:
    """google/gemma-3-4b-it, as it is published."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    facts = facts_of(with_text_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}))
    assert (facts.vocab, facts.max_context, facts.num_layers) == (262_208, 131_072, 34)
    assert (facts.mixers[0].num_heads, facts.mixers[0].num_kv_heads, facts.mixers[0].head_dim) == (8, 4, 256)
