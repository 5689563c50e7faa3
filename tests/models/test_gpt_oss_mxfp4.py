"""gpt-oss as it is published: experts in MXFP4, read as transformers dequantises them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from families import EXPERTS, check_answers
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bough.config.hf import open_checkpoint
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.quantization.coded_experts import CodedExperts
from bough.quantization.readable import rules_for
from bough.quantization.sizes import weight_sizes


def test_answers_as_transformers_does_with_what_it_dequantises(tmp_path: Path) -> None:
    prefix, extra = EXPERTS["gpt_oss"]
    reference = make_tiny(prefix, tmp_path, **{**extra, "hidden_size": 64, "intermediate_size": 96})
    generator = torch.Generator().manual_seed(5)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer, block in enumerate(reference.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            dense = getattr(block.mlp.experts, name)
            experts, inputs, outputs = dense.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 125, blocks.shape[:3], dtype=torch.uint8, generator=generator)
            with torch.no_grad():
                dense.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[stem]
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128, quantization="none"
    )
    check_answers(reference, model)
    packed = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    stacks = [module for module in packed.modules() if isinstance(module, CodedExperts)]  # type: ignore[attr-defined]
    assert len(stacks) == len(reference.model.layers)
    experts = [stack.packed for stack in stacks if stack.packed is not None]
    assert len(experts) == len(stacks), "they are kept packed"
    prompt = [5, 17, 99, 3, 64, 2, 120, 33, 7]
    logits = [
        each.logits(each.forward(DenseAttention(1).step([(0, prompt)], all_logits=True))) for each in (packed, model)
    ]
    assert torch.nn.functional.cosine_similarity(*logits, dim=-1).min() > 0.995, "activations are rounded to 8 bits"
    rules, facts = rules_for(checkpoint, "auto"), facts_of(checkpoint.config)
    assert rules is not None
    sizes = weight_sizes(checkpoint, facts, rules)
    assert sizes.dense_params + sizes.packed_params == facts.num_parameters()
    weights = sum(tensor.nbytes for stack in experts for tensor in stack.data if tensor.dtype != torch.float32)
    assert sizes.packed_bytes == pytest.approx(weights, rel=0.12)
