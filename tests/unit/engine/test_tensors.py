"""What is computed where layers are watched."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bough.config.server_args import build_config
from bough.core.step import Step
from bough.distributed.mesh import SINGLE
from bough.engine.build import load_model, make_runner, open_device
from bough.engine.decide import decide
from bough.engine.tensors import PREFIX, DumpingRunner
from bough.platform import detect
from bough.runner.model_runner import ModelRunner

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_not_watched_compute_as_much(ranks: int, tmp_path: Path) -> None:
    """Nobody tells them of it: where there are several, the last layer is whole in every step."""
    runner = made(tmp_path, ranks)
    narrowed: list[bool] = []

    def launch(step: Step) -> Any:
        narrowed.append(runner.forward.narrows)

    row = SimpleNamespace(job=SimpleNamespace(id=1, ask=SimpleNamespace(rid=f"{PREFIX}1")))
    queues: Any = SimpleNamespace(prefilling={0: row}, running={}, where={1: row})
    inner: Any = SimpleNamespace(launch=launch)
    dumping = DumpingRunner(inner, runner, queues, tmp_path / "dumps", several_ranks=ranks > 1)
    for slot in (1, 0, 1):
        dumping.launch(step_in(slot))
    assert narrowed == ([True, False, True] if ranks == 1 else [False] * 3)


def made(folder: Path, ranks: int) -> ModelRunner:
    """A rank's runner as the engine builds it."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    config = build_config(
        model=str(folder), load_format="dummy", device="cpu", custom_kernels=False, max_total_tokens=256,
        skip_tokenizer_init=True, tp_size=ranks, tensor_dump_dir=str(folder / "dumps"),
    )  # fmt: skip
    checkpoint, facts, _, resolved, _ = decide(config, detect("cpu"))
    device = open_device(resolved.config, 0)
    model = load_model(checkpoint, resolved.config, resolved.plan, device, SINGLE)
    runner = make_runner(model, resolved.config, resolved.plan, device, facts)
    assert isinstance(runner, ModelRunner)
    return runner


def step_in(slot: int) -> Step:
    return Step(
        index=0,
        num_decodes=0,
        slots=np.array([slot], np.int32),
        num_query=np.array([4], np.int32),
        context=np.zeros(1, np.int32),
        samples=np.ones(1, np.bool_),
        tokens=np.arange(4, dtype=np.int32),
        table_at=np.empty(0, np.int64),
        table_pages=np.empty(0, np.int32),
    )
