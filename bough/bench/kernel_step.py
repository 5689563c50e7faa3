# mypy: disable-error-code="no-untyped-call"
"""One decode step of Llama-3.1-8B from kernels alone, in a CUDA graph: what the kernels and the gaps between them cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.bench.kernel_inputs import LLAMA_8B, decode_inputs, layer_of
from bough.kernels import launching
from bough.kernels.activation import silu_mul
from bough.kernels.attention.triton_backend import TritonAttention
from bough.kernels.linear import linear, linear_silu_mul
from bough.kernels.linear.skinny import reserve
from bough.kernels.norm import add_rms_norm, rms_norm
from bough.kernels.sampling import argmax

_LAYERS, _WIDTH, _INNER, _VOCAB = 32, 4096, 14336, 128256
_BANDWIDTH = 4.2e12


class _Weights:
    """Random weights of the whole model; 15 GB."""

    def __init__(self, device: torch.device) -> None:
        def weight(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)

        self.embedding = weight(_VOCAB, _WIDTH)
        self.norm = weight(_WIDTH) + 1.0
        self.layers = [
            (weight(6144, _WIDTH), weight(_WIDTH, 4096), weight(2 * _INNER, _WIDTH), weight(_WIDTH, _INNER))
            for _ in range(_LAYERS)
        ]
        self.head = weight(_VOCAB, _WIDTH)


@cache
def _weights(device: torch.device) -> _Weights:
    return _Weights(device)


def decode_step(batch: int, device: torch.device, *, skinny: bool, pdl: bool) -> tuple[float, float]:
    """(microseconds a step, the floor: weights and KV read once). `skinny`: our products, else the library's."""
    weights = _weights(device)
    reserve(device)
    setup = decode_inputs(batch, 192, 320, 64, LLAMA_8B, device, copies=_LAYERS if batch <= 64 else 8)
    positions = (setup.inputs.kv_len_R - 1).long()
    setup.inputs.loc_T = (
        setup.inputs.page_table.gather(1, (positions // 64).unsqueeze(1)).squeeze(1).long() * 64 + positions % 64
    )
    cos_sin = torch.randn(8192, 128, device=device)
    ids = torch.randint(0, _VOCAB, (batch,), device=device)
    backend = TritonAttention(device)

    def step() -> Tensor:
        backend.prepare(setup.inputs)
        residual = F.embedding(ids, weights.embedding)
        x = rms_norm(residual, weights.norm, 1e-5)
        for index, (qkv, out, gate_up, down) in enumerate(weights.layers):
            project = linear if skinny else F.linear
            q, k, v = project(x, qkv).view(batch, 48, 128).split([32, 8, 8], 1)
            spec = layer_of(32, 8, 128, index % len(setup.inputs.k_caches))
            x = project(backend.forward_rope(spec, q, k, v, positions, cos_sin), out)
            x, residual = add_rms_norm(x, residual, weights.norm, 1e-5)
            hidden = linear_silu_mul(x, gate_up) if skinny else silu_mul(F.linear(x, gate_up))
            x, residual = add_rms_norm(project(hidden, down), residual, weights.norm, 1e-5)
        return argmax(project(x, weights.head))

    with nullcontext() if pdl else _without_pdl():
        took = _time_graph(step)
    num_bytes = sum(w.numel() * 2 for layer in weights.layers for w in layer) + weights.head.numel() * 2
    return took, (num_bytes + _LAYERS * setup.kv_bytes) / _BANDWIDTH * 1e6


@contextmanager
def _without_pdl() -> Iterator[None]:
    """Kernels look up the option at each launch, so that a capture under this has ordinary launches only."""
    before = launching.has_pdl
    launching.has_pdl = lambda device: False  # type: ignore[assignment]
    try:
        yield
    finally:
        launching.has_pdl = before


def _time_graph(step: object, replays: int = 20) -> float:
    assert callable(step)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    took = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        took.append(float(begin.elapsed_time(end)) * 1e3 / replays)
    return statistics.median(took)
