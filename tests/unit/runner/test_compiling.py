"""Every step that is rehearsed for its kernels runs, and leaves the runner as it was. There are no kernels on a CPU."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bough.config.hf import open_checkpoint
from bough.core.step import RunnerLimits, SpanCosts
from bough.kernels import ahead
from bough.kernels.attention import AttentionInputs, reference
from bough.layers.batch import attention_specs
from bough.layers.decoder import Decoder, one_by_one
from bough.memory.mha import KVPool, KVShape
from bough.models.load import build_model
from bough.platform import Device
from bough.runner import compiling
from bough.runner.graphs import Extents, Graphs
from bough.runner.model_runner import ModelRunner

PAGE = 16


class ReferenceAttention:
    def __init__(self, inputs: AttentionInputs) -> None:
        self.forward = partial(self._forward, inputs)

    @staticmethod
    def _forward(inputs: AttentionInputs, spec: Any, q: Any, k: Any, v: Any) -> Any:
        return reference.forward(spec, inputs, q, k, v)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    cpu = Device("cpu")
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=cpu.torch_device)
    limits = RunnerLimits(
        num_slots=70, num_pages=64, page_size=PAGE, pages_per_slot=256, context_length=4096, max_step_tokens=4096,
        vocab_size=97, spans=SpanCosts(),
    )  # fmt: skip
    shapes = [KVShape(s.num_kv_heads, s.head_dim, s.head_dim) for s in attention_specs(model)]
    pool = KVPool(shapes, limits.num_pages, PAGE, torch.float32, cpu.torch_device)
    made = ModelRunner(model, pool, limits, ReferenceAttention, cpu)
    made.graphs = Graphs(made.forward, max_tokens=64, context_length=4096, spare_slot=70)
    return made


def test_all_steps_run(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ahead, "_compilers", SimpleNamespace(asked=0, is_pending=lambda first: True))
    launched: list[int] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda step: (launched.append(step.num_tokens), launch(step))[1])
    graphs = runner.graphs
    with caplog.at_level(logging.INFO):
        compiling.compile_ahead(runner, [Extents(8, 8, 8), Extents(64, 1, 1, max_query=64)], 64)
    assert [record.getMessage() for record in caplog.records if "not rehearsed" in record.getMessage()] == []
    assert runner.graphs is graphs is not None
    assert graphs._captured == {}
    assert len(launched) >= 10
    assert not ahead.is_rehearsing()


def test_time_is_limited(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pending = True
    monkeypatch.setattr(ahead, "_compilers", SimpleNamespace(asked=0, is_pending=lambda first: pending))
    monkeypatch.setattr(compiling, "LATER_S", 0.0)
    ran: list[str] = []

    def first_ends() -> None:
        nonlocal pending
        ran.append("first")
        pending = False

    steps = [("first", first_ends), ("the second", lambda: ran.append("second"))]
    monkeypatch.setattr(compiling, "_later", lambda *_: [compiling._Rehearsed(*step) for step in steps])
    monkeypatch.setattr(compiling, "_rare", lambda *_: [])
    monkeypatch.setattr(compiling, "rehearsals", lambda _: [])
    with caplog.at_level(logging.INFO):
        compiling.compile_ahead(runner, [], 64)
    assert ran == ["first"]
    assert "steps from that of the second on were not rehearsed" in caplog.text


def test_layers_that_are_alike_run_once(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_compilers", SimpleNamespace(asked=0, is_pending=lambda first: False))
    model = runner.forward.model
    assert isinstance(model, Decoder)
    ran: list[int] = []
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    monkeypatch.setattr(compiling, "rehearsals", lambda _: [])
    monkeypatch.setattr(compiling, "_later", lambda *_: [])
    compiling.compile_ahead(runner, [Extents(8, 8, 8)], 64)
    assert ran == [0, 1, 5]
    assert model.run_blocks is one_by_one


def test_a_step_that_needs_all_layers_has_them(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_compilers", SimpleNamespace(asked=0, is_pending=lambda first: False))
    model = runner.forward.model
    assert isinstance(model, Decoder)
    ran: list[int] = []

    def note(number: int) -> None:
        if number and number - 1 not in ran:
            raise RuntimeError("the layer before is missing")
        ran.append(number)

    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: note(number))
    monkeypatch.setattr(compiling, "rehearsals", lambda _: [])
    monkeypatch.setattr(compiling, "_later", lambda *_: [])
    compiling.compile_ahead(runner, [Extents(8, 8, 8)], 64)
    assert ran == [0, 1, 0, 1, 2, 3, 4, 5]
    assert model.run_blocks is one_by_one
