"""DeepSeek V3 as it is published: FP8 in blocks, also of the matrices that make keys and values from latents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from families import LATENTS, PROMPTS, check_answers
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.models.load import build_model

BLOCK = 16


@pytest.fixture(params=["deepseek_v3", "deepseek_v32-chosen"])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> torch.nn.Module:
    """A checkpoint in FP8, and a model with the weights that it stands for."""
    prefix, extra = LATENTS[request.param]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "v_head_dim": 16,
    }
    model = make_tiny(prefix, tmp_path, **{**extra, **sizes})
    file = tmp_path / "model.safetensors"
    tensors, plain = {}, {}
    for name, weight in load_file(file).items():
        plainly = ("mlp.gate.weight", "indexer.weights_proj.weight")
        if weight.dim() != 2 or "embed" in name or "head" in name or name.endswith(plainly):
            tensors[name] = plain[name] = weight
            continue
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        padded = torch.zeros(rows * BLOCK, columns * BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)).clamp(min=1e-6) / 448
        spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        plain[name] = tensors[name].float() * spread
    model.save_pretrained(tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return type(model).from_pretrained(tmp_path / "plain", attn_implementation="eager", dtype=torch.float32).eval()


def test_dequantised_it_answers_as_transformers_does(reference: torch.nn.Module, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization="none", context_length=128
    )
    check_answers(reference, model)


def test_packed_it_stays_close(reference: torch.nn.Module, tmp_path: Path) -> None:
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPTS[0]])).logits[0]
        actual = model.logits(model.forward(DenseAttention(1).step([(0, PROMPTS[0])], all_logits=True)))
    assert (actual - expected).abs().mean() < 0.1 * expected.std()
