"""Sums over ranks that are made together with the norm after them: the logits of sums made by themselves, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import DenseAttention
from families import DENSE, EARLIER, EXPERTS
from test_tensor_parallel import CPU, PROMPTS, logits_of_ranks
from tiny import make_tiny
from torch import Tensor

from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.distributed.collectives import Collectives
from bough.distributed.mesh import Mesh
from bough.distributed.threads import run_ranks
from bough.kernels.norm import add_rms_norm
from bough.models.load import build_model


class Joined:
    """Collectives of threads, which norm as `PeerCollectives` do."""

    def __init__(self, base: Collectives) -> None:
        self.base = base
        self.normed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.base.all_reduce(x)

    def takes_norm(self, x_TD: Tensor) -> bool:
        return len(x_TD) < 1000

    def add_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        self.normed += 1
        return add_rms_norm(self.base.all_reduce(x_TD), residual_TD, weight_D, eps, offset=offset)


# Norms before each half; of layers; after each half, too; halves that read the same stream; experts.
@pytest.mark.parametrize(
    ("case", "fewest"), [("llama", 3), ("gpt_neox", 0), ("gemma3", 0), ("cohere-qk-norm", 0), ("qwen3_moe", 1)]
)
@torch.no_grad()
def test_the_logits_are_the_same(case: str, fewest: int, tmp_path: Path) -> None:
    prefix, extra = {**DENSE, **EARLIER, **EXPERTS}.get(case, (case, {}))
    make_tiny(prefix, tmp_path, **extra)
    normed: list[int] = []

    def main(mesh: Mesh) -> Any:
        talk = Joined(mesh.tp.talk)
        axis = replace(mesh.tp, talk=talk)
        mesh = replace(mesh, tp=axis, heads=axis, replica=axis, units=axis, world=axis)
        model = build_model(
            open_checkpoint(str(tmp_path)), dtype=torch.float32, device=CPU, mesh=mesh, context_length=256
        )
        batch = DenseAttention(len(PROMPTS)).step(list(enumerate(PROMPTS)), all_logits=True)
        logits = model.logits(model.forward(batch)).numpy()
        normed.append(talk.normed)
        return logits

    joined = run_ranks(Layout(tp=2), main)
    for mine, expected in zip(joined, logits_of_ranks(tmp_path, Layout(tp=2)), strict=True):
        assert np.array_equal(mine, expected)
    assert min(normed) >= fewest
