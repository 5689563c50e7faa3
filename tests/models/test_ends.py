"""What a model leaves out at its ends: the first layer's projection, which a table holds, and queries that nobody reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from narrowing_attention import NarrowingAttention
from tiny import CASES, make_tiny
from torch import Tensor

from bough.config.hf import open_checkpoint
from bough.kernels.rows import take_rows
from bough.layers.batch import BatchMedia, Model
from bough.layers.decoder import Decoder, one_by_one
from bough.layers.stream import Stream
from bough.models.load import build_model

CPU = torch.device("cpu")
STEPS = [[(0, [5, 17, 99, 3, 64, 2]), (1, [42])], [(1, [7, 8]), (0, [120, 33, 5, 5, 77])], [(0, [11]), (1, [9])]]


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
        model.layers[0].attn.qkv.matrix.weight.zero_()  # type: ignore[union-attr, operator]
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

        def forward(self, *given: object) -> None:
            self.inner(*given)

    model.layers[0] = Wrapped()
    assert not model.look_up_first_layer()
    for wanted, actual in zip(expected, logits_of(model, DenseAttention(2)), strict=True):
        assert torch.equal(actual, wanted)


def test_given_embeddings_are_not_looked_up(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    model, plain = load(tmp_path, first_layer_table=True), load(tmp_path)
    batch = DenseAttention(1).step([(0, [5, 17, 99])])
    batch.media = BatchMedia(torch.arange(3), torch.randn(3, plain.embed.tokens.shape[1]))  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = plain.forward(replace(batch, attention=DenseAttention(1).step([(0, [5, 17, 99])]).attention))
        torch.testing.assert_close(model.forward(batch), expected)


def test_embeddings_and_the_first_projection_are_looked_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny("llama", tmp_path)
    model = load(tmp_path, first_layer_table=True)
    widths: list[list[int]] = []

    def taken(at_T: torch.Tensor, *tables: torch.Tensor) -> list[torch.Tensor]:
        widths.append([table.shape[1] for table in tables])
        return take_rows(at_T, *tables)

    for module in ("decoder", "attention"):
        monkeypatch.setattr(f"bough.layers.{module}.take_rows", taken)
    logits_of(model, DenseAttention(2))
    assert isinstance(model, Decoder)
    table_VO = model.layers[0].attn.by_token_VO  # type: ignore[union-attr]
    assert widths == [[model.like.shape[1], table_VO.shape[1]]] * len(STEPS)  # type: ignore[union-attr, operator]


def test_a_stream_that_joins_nothing_computes_the_first_projection(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    model = load(tmp_path, first_layer_table=True)
    assert isinstance(model, Decoder)
    seen: list[object] = []
    handle = model.layers[0].attn.qkv.register_forward_hook(lambda _module, given, _made: seen.append(given[0]))  # type: ignore[union-attr]
    looked_up = logits_of(model, DenseAttention(2))
    assert not seen
    attention = DenseAttention(2)
    for queries, expected in zip(STEPS, looked_up, strict=True):
        batch = attention.step(queries)
        with torch.no_grad():
            stream = Stream(model.embed(batch), batch, fuses=False)
            one_by_one(model, stream, batch)
            torch.testing.assert_close(model.logits(stream.last(model.norm)), expected, rtol=1e-4, atol=1e-4)
    handle.remove()
    assert len(seen) == len(STEPS)
