"""What the runner launches for a whole step, from its first kernel to the copy of its tokens: a committed list, so that
whatever is added to a step without drafts is seen. `python tests/models/test_step_calls.py` writes the list anew.

Against the list before lengths became the device's own (commit 1add522): `advance` stands where a scatter of the last tokens
stood, and nothing was added.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_calls import Recorder, recording, tiny_model
from torch import Tensor

from bough.core.sampling import SamplingParams
from bough.core.step import FROM_DEVICE, RunnerLimits, SlotSetup, Step
from bough.kernels.attention import AttentionInputs
from bough.kernels.attention.torch_backend import TorchAttention
from bough.layers.batch import AttentionSpec, attention_specs
from bough.memory.mha import KVPool, KVShape
from bough.platform import Device
from bough.runner.model_runner import ModelRunner

LIST = Path(__file__).with_name("step_calls.json")
LIMITS = RunnerLimits(
    num_slots=4, num_pages=64, page_size=4, pages_per_slot=16, context_length=64, max_step_tokens=64, vocab_size=64
)
STEPS: dict[str, dict[str, Any]] = {
    "one row decodes": {"decodes": [1]},
    "rows decode": {"decodes": [1, 1, 1]},
    "a prompt": {"prompts": [5]},
    "rows decode beside a prompt": {"decodes": [1, 1], "prompts": [5]},
    "rows verify drafts": {"decodes": [3, 1, 4]},
    "rows verify drafts beside a prompt": {"decodes": [3, 2], "prompts": [5]},
}


class Attention:
    """Plain attention as one entry a layer; what it prepares for a step is none of the step's."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, inputs: AttentionInputs) -> Attention:
        self.inner = self.recorder.wrapped("attention.prepare", TorchAttention)(inputs)
        return self

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        out: Tensor = self.recorder.wrapped("attention.forward", self.inner.forward)(spec, q_TNH, k_TKH, v_TKH)
        return out


def step_of(decodes: list[int], prompts: list[int]) -> Step:
    """`decodes`: query tokens of each decode row."""
    rows = len(decodes) + len(prompts)
    slots = np.arange(rows, dtype=np.int32)
    drafts = np.array(decodes, np.int32) - 1
    tokens = [[FROM_DEVICE, *range(3, 2 + count)] for count in decodes] + [list(range(count)) for count in prompts]
    table = np.arange(1, 1 + 16 * rows, dtype=np.int32)
    return Step(
        index=0,
        num_decodes=len(decodes),
        slots=slots,
        num_query=np.array([*decodes, *prompts], np.int32),
        context=np.array([9] * len(decodes) + [0] * len(prompts), np.int32),
        samples=np.ones(rows, np.bool_),
        tokens=np.array([token for row in tokens for token in row], np.int32),
        drafts=drafts if drafts.any() else drafts[:0],
        table_at=np.arange(16 * rows, dtype=np.int64),
        table_pages=table[: 16 * rows] % 63 + 1,
        setups=[SlotSetup(slot=slot, sampling=SamplingParams(temperature=0.7), rng_seed=slot) for slot in range(rows)],
    )


def calls_of(folder: Path, *, decodes: list[int] = [], prompts: list[int] = []) -> list[str]:  # noqa: B006
    model = tiny_model("LlamaForCausalLM", folder)
    assert isinstance(model, torch.nn.Module)
    shapes = [KVShape(s.num_kv_heads, s.head_dim, s.head_dim) for s in attention_specs(model)]
    pool = KVPool(shapes, LIMITS.num_pages, LIMITS.page_size, torch.float32, torch.device("cpu"))
    with recording({}) as recorder, torch.inference_mode():
        runner = ModelRunner(model, pool, LIMITS, Attention(recorder), Device("cpu"))  # type: ignore[arg-type]
        runner.launch(step_of(decodes, prompts)).wait()
        recorder.calls.clear()
        with recorder:
            launched = runner.launch(step_of(decodes, prompts))
        launched.wait()
    return recorder.calls


def calls_by_step(folder: Path) -> dict[str, list[str]]:
    return {name: calls_of(folder, **rows) for name, rows in STEPS.items()}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_launches_what_it_did(name: str, tmp_path: Path) -> None:
    assert calls_of(tmp_path, **STEPS[name]) == json.loads(LIST.read_text())[name]


def test_drafts_add_no_launch_to_a_step() -> None:
    """Verifying stands where advancing does."""
    known = json.loads(LIST.read_text())
    plain, verifying = known["rows decode"], known["rows verify drafts"]
    assert [("verify" if call == "advance" else call) for call in plain] == verifying


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        LIST.write_text(json.dumps(calls_by_step(Path(folder)), indent=1) + "\n")
    sys.exit(0)
