"""What a model leaves out at its ends: the first layer's projection, which a table holds, and queries that nobody reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from tiny import CASES, make_tiny
from torch import Tensor

from bough.config.hf import open_checkpoint
from bough.kernels.rotary import apply_rope, qk_norm_rope
from bough.layers.batch import AttentionSpec, Batch, Model
from bough.layers.decoder import Decoder
from bough.models.load import build_model

CPU = torch.device("cpu")
STEPS = [[(0, [5, 17, 99, 3, 64, 2]), (1, [42])], [(1, [7, 8]), (0, [120, 33, 5, 5, 77])], [(0, [11]), (1, [9])]]


class NarrowingAttention(DenseAttention):
    """Takes and gives nothing of the last layer but the tokens whose logits are wanted."""

    def __init__(self, num_rows: int, num_layers: int) -> None:
        super().__init__(num_rows)
        self.num_layers = num_layers
        self.wanted: Tensor | None = None
        self.narrowed = 0

    def step(self, queries: list[tuple[int, list[int]]], *, all_logits: bool = False, device: str = "cpu") -> Batch:
        batch = super().step(queries, all_logits=all_logits, device=device)
        self.wanted = batch.logits_at
        return batch

    def queries_at(self, spec: AttentionSpec) -> Tensor | None:
        return self.wanted if spec.layer == self.num_layers - 1 else None

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        at_L = self.queries_at(spec)
        if at_L is None:
            return super().forward(spec, q_TNH, k_TKH, v_TKH)
        assert len(q_TNH) == len(at_L)
        self.narrowed += 1
        whole_TNH = q_TNH.new_full((len(k_TKH), *q_TNH.shape[1:]), 1e3)
        whole_TNH[at_L] = q_TNH
        return super().forward(spec, whole_TNH, k_TKH, v_TKH)[at_L]

    def forward_rope(
        self,
        spec: AttentionSpec,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        offset: float,
    ) -> Tensor:
        def turned(x: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
            if norm is None:
                return apply_rope(x, x, positions, cos_sin_PR)[0]
            return qk_norm_rope(x, x, norm, norm, eps, positions, cos_sin_PR, offset=offset)[0]

        at_L = self.queries_at(spec)
        q_TNH = turned(q_TNH, q_norm, positions_T if at_L is None else positions_T[at_L])
        return self.forward(spec, q_TNH, turned(k_TKH, k_norm, positions_T), v_TKH)


def load(folder: Path, **options: object) -> Model:
    return build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, **options)  # type: ignore[arg-type]


@torch.no_grad()
def logits_of(model: Model, attention: DenseAttention) -> list[Tensor]:
    return [model.logits(model.forward(attention.step(queries))) for queries in STEPS]


@pytest.mark.parametrize("case", CASES)
def test_queries_that_nobody_reads_change_nothing(case: str, tmp_path: Path) -> None:
    make_tiny(case, tmp_path)
    model = load(tmp_path)
    assert isinstance(model, Decoder)
    narrowing = NarrowingAttention(2, len(model.layers))
    for expected, actual in zip(logits_of(model, DenseAttention(2)), logits_of(model, narrowing), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert narrowing.narrowed == len(STEPS)


@pytest.mark.parametrize("case", CASES)
def test_a_first_layer_that_is_looked_up_is_the_one_computed(case: str, tmp_path: Path) -> None:
    make_tiny(case, tmp_path)
    expected = logits_of(load(tmp_path), DenseAttention(2))
    model = load(tmp_path, first_layer_table=True)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        model.layers[0].qkv.matrix.weight.zero_()  # type: ignore[union-attr, operator]
    for wanted, actual in zip(expected, logits_of(model, DenseAttention(2)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_a_block_of_another_kind_is_computed(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    expected = logits_of(load(tmp_path), DenseAttention(2))
    model = load(tmp_path)
    assert isinstance(model, Decoder)
    plain = model.layers[0]

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self, *given: object) -> object:
            return self.inner(*given)

    model.layers[0] = Wrapped()
    assert not model.look_up_first_layer()
    for wanted, actual in zip(expected, logits_of(model, DenseAttention(2)), strict=True):
        assert torch.equal(actual, wanted)


def test_given_embeddings_are_not_looked_up(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    model, plain = load(tmp_path, first_layer_table=True), load(tmp_path)
    batch = DenseAttention(1).step([(0, [5, 17, 99])])
    batch.embeds_TD = torch.randn(3, plain.embed.shape[1])  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = plain.forward(replace(batch, attention=DenseAttention(1).step([(0, [5, 17, 99])]).attention))
        torch.testing.assert_close(model.forward(batch), expected)


def test_who_watches_the_first_projection_sees_it_made(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    model = load(tmp_path, first_layer_table=True)
    seen: list[Tensor] = []
    handle = model.layers[0].qkv.register_forward_hook(lambda _module, given, _made: seen.append(given[0]))  # type: ignore[attr-defined]
    watched = logits_of(model, DenseAttention(2))
    handle.remove()
    assert [len(each) for each in seen] == [sum(len(ids) for _, ids in queries) for queries in STEPS]
    for one, other in zip(watched, logits_of(model, DenseAttention(2)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert len(seen) == len(STEPS)
