"""A whole stack of packed blocks in one call of the CPU kernels: the same answers as block by block in torch."""

from __future__ import annotations

import pytest
import torch
from in_process import InProcess, Setup

from bough.config.hf import open_checkpoint
from bough.core.sampling import SamplingParams
from bough.kernels.cpu_build import library
from bough.layers.cpu_stack import StackedBlocks
from bough.models.load import build_model

PROMPTS = [
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    [504, 3575, 282, 4649, 314],
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 8240, 47, 2, 198],
]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)


@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
def test_fused_blocks_answer_as_the_dequantised_model_does() -> None:
    checkpoint = open_checkpoint("")

    def answers(quantization: str, attention: str) -> tuple[list[list[int]], bool]:
        model = build_model(
            checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization=quantization, context_length=256
        )
        engine = InProcess(model, checkpoint.vocab, Setup(attention=attention, chunk_tokens=7))
        return engine.generate(PROMPTS, GREEDY), isinstance(model.run_blocks, StackedBlocks)  # type: ignore[attr-defined]

    fused, was_fused = answers("gguf-exact", "cpu")
    plain, was_plain = answers("none", "torch")
    assert was_fused
    assert not was_plain
    assert fused == plain
