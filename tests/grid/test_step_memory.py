"""What steps take at most, counted tensor by tensor, against what the memory plan keeps for them.

On a CPU, with the kernels that work anywhere; `tests/gpu/test_memory.py` asks the device itself.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from largest_steps import GREEDY, largest_steps, made, made_to_pool, step_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bough.config.memory_plan import MemoryPlan
from bough.core.step import Step
from bough.runner.model_runner import ModelRunner
from bough.runner.pooling import PoolingRunner
from tests.covers import cover

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8000,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "wide layers": {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 500},
    "large vocabulary": {"vocab_size": 32_000},
}
ENCODER: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500, "max_position_embeddings": 512,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
STEPS: dict[str, dict[str, Any]] = {
    "few rows, long chunks": {"max_running_requests": 8, "chunked_prefill_size": 1024},
    "many rows": {"max_running_requests": 128, "chunked_prefill_size": 256},
}


class Counting(TorchDispatchMode):
    """Adds up the bytes of every tensor that is made, until it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, call: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._live.add(key)
            self._now += size
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._live.discard(key)
        self._now -= size


def test_counting_counts() -> None:
    with Counting() as counting:
        first = torch.zeros(1000)
        second = first + 1
        del first
        third = second.view(10, 100) * 2
        del second, third
        torch.zeros(10)
    assert counting.peak == 8000


@pytest.mark.parametrize(
    ("shape", "steps", "custom"), cover(list(SHAPES), list(STEPS), {"torch": False, "compiled": True})
)
def test_no_step_takes_more_than_was_kept(tmp_path: Path, shape: str, steps: str, custom: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | SHAPES[shape]))
    runner, plan = made(
        tmp_path, "cpu", dtype="float32", max_total_tokens=16_384, cpu_threads=1, custom_kernels=custom, **STEPS[steps]
    )
    _check(runner, largest_steps(runner.limits), plan)


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 64}], ids=["as it comes", "small steps"])
def test_no_step_of_whole_texts_takes_more_than_was_kept(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Texts are shorter than steps, or no step is shorter than a text."""
    (tmp_path / "config.json").write_text(json.dumps(ENCODER))
    runner, plan = made_to_pool(tmp_path, "cpu", dtype="float32", cpu_threads=1, **settings)
    limits = runner.limits
    long, short = limits.context_length, limits.max_step_tokens // limits.num_slots
    steps = {
        "long texts": step_of(limits, [(long, 0)] * (limits.max_step_tokens // long), GREEDY),
        "short texts": step_of(limits, [(short, 0)] * limits.num_slots, GREEDY),
    }
    _check(runner, steps, plan)


def _check(runner: ModelRunner | PoolingRunner, steps: dict[str, Step], plan: MemoryPlan) -> None:
    found = {}
    for name, step in steps.items():
        gc.collect()
        with Counting() as counting:
            launched = runner.launch(step)
            launched.wait()
        found[name] = counting.peak
        del launched
    assert min(found.values()) > 0
    over = {name: f"{size:,}" for name, size in found.items() if size > plan.activation_bytes}
    assert not over, f"{plan.activation_bytes:,} were kept"
