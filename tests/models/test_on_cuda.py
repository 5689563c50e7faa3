"""The same models on a CUDA device: kernels differ, logits don't; dummy weights of an 8B model appear in place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from tiny import CASES, make_tiny

from bough.config.hf import open_checkpoint
from bough.models.load import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11, 5, 5, 77], [42], [100, 90, 80, 70, 60, 50, 40]]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


@pytest.mark.parametrize("case", CASES)
def test_cuda_follows_transformers(case: str, tmp_path: Path) -> None:
    """In bf16, no further from the exact logits than transformers' own bf16 is."""
    reference = make_tiny(case, tmp_path)
    device = torch.device("cuda")
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.bfloat16, device=device, context_length=256)
    with torch.no_grad():
        batch = DenseAttention(len(PROMPTS)).step(list(enumerate(PROMPTS)), all_logits=True, device="cuda")
        actual = model.logits(model.forward(batch)).float().cpu()
        exact = torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
        rounded = reference.to(device=device, dtype=torch.bfloat16)
        theirs = torch.cat([rounded(torch.tensor([p], device=device)).logits[0] for p in PROMPTS]).float().cpu()
    assert (actual - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean() + 0.01


def test_dummy_8b(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    before = torch.cuda.memory_allocated()
    model = build_model(checkpoint, dtype=torch.bfloat16, device=torch.device("cuda"))
    taken = torch.cuda.memory_allocated() - before
    assert taken <= sum(tensor.nbytes for tensor in checkpoint.tensors.values()) * 1.02
    with torch.no_grad():
        batch = DenseAttention(2).step([(0, [1, 2, 3]), (1, [4])], device="cuda")
        logits = model.logits(model.forward(batch))
    assert logits.shape == (2, 128256)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0
