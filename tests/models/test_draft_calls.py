"""What one more draft of a head launches beside its places, its plan and its draw: with one request each launch counts."""

from __future__ import annotations

from pathlib import Path

import draft_files
import proposing
import pytest
import torch
from kernel_calls import RecordedAttention, recording
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.layers.draft_heads import Eagle3Head
from bough.models.load import build_model
from bough.speculative.proposers.heads import HeadProposer

BLOCK = [
    "side_by_side", "linear", "attention.forward_rope", "linear_onto", "add_rms_norm", "linear_silu_mul", "linear_onto",
    "add_rms_norm", "linear",
]  # fmt: skip
"""Both inputs, QKV, attention, its output, a norm, the feed-forward block, the last norm with the addition, the head."""


@pytest.mark.parametrize("normed_first", [False, True])
def test_a_draft_of_an_eagle3_head(normed_first: bool, tmp_path: Path) -> None:
    """Where the stream is the normed state, that is copied."""
    make_tiny("llama", tmp_path / "target")
    model = build_model(open_checkpoint(str(tmp_path / "target")), dtype=torch.float32, device=torch.device("cpu"))
    draft_files.eagle3(tmp_path / "head", **({"norm_before_residual": True} if normed_first else {}))
    proposer = proposing.head("EAGLE3", tmp_path / "target", tmp_path / "head", model).proposer
    assert isinstance(proposer, HeadProposer)
    (head,) = proposer.heads
    assert isinstance(head, Eagle3Head)
    states_TD = torch.randn(3, head.norm.weight.shape[0])
    with recording({}) as recorder, torch.no_grad():
        attention = RecordedAttention(3, 99, narrows=False, recorder=recorder)
        batch = attention.step([(row, [5 + row]) for row in range(3)])
        batch.logits_at = None
        with recorder:
            made = head.run(batch.ids_T, states_TD, batch)
            head.logits(made.ready)
    assert recorder.calls == ([*BLOCK[:1], "torch.clone", *BLOCK[1:]] if normed_first else BLOCK)
