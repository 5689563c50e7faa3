"""Trees of drafts that are verified in a step with a long prompt: each node still sees its own branch alone."""

from __future__ import annotations

from pathlib import Path

import draft_files
import proposing
import pytest
import torch
from in_process import InProcess, Setup
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.sampling import SamplingParams
from bough.kernels.attention.inputs import AttentionInputs
from bough.layers.batch import AttentionBackend
from bough.models.load import build_model
from bough.speculative.proposers.tree import TreeShape

SAVE = {"EAGLE3": draft_files.eagle3, "MEDUSA": draft_files.medusa}
LONG = [(11 * i + 5) % 120 + 3 for i in range(180)]


@pytest.mark.parametrize("method", ["EAGLE3", "MEDUSA"])
def test_the_last_layer_is_not_narrowed(tmp_path: Path, method: str) -> None:
    """Its narrowed rows have one query each, which sees all KV up to its position."""
    make_tiny("llama", tmp_path)
    SAVE[method](tmp_path / method)
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    proposer = proposing.head(method, tmp_path, tmp_path / method, model, TreeShape(3, 4))  # type: ignore[arg-type]
    engine = InProcess(model, 131, Setup(drafts="device", most_drafts=8), proposer=proposer)
    seen: list[tuple[bool, bool]] = []
    attention = engine.runner.forward._attention

    def watched(inputs: AttentionInputs) -> AttentionBackend:
        if inputs.max_query > 100:
            seen.append((inputs.tree is not None, inputs.tail is not None))
        return attention(inputs)

    engine.runner.forward._attention = watched
    sampling = SamplingParams(temperature=0.0, max_new_tokens=18, ignore_eos=True)
    first = engine.submit([100, 90, 80, 70], sampling)
    later: list[int] = []
    engine.finish([first], {6: lambda: later.append(engine.submit(LONG, sampling))})
    engine.finish(later)
    assert (True, False) in seen  # nodes beside the prompt
    assert (True, True) not in seen
