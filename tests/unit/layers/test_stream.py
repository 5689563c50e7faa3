"""The residual stream: whatever is joined, sums and norms are those of the plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import QKVLinear, RowLinear
from bough.layers.norm import LayerNorm, RMSNorm
from bough.layers.place import place_weights
from bough.layers.stream import Stream
from bough.quantization.unquantized import Unquantized

ALONE = Build(scheme=Unquantized(), dtype=torch.float32, device=torch.device("cpu"), context_length=32)
WIDTH = 6


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def stream_of(x: Tensor, *, logits_at: Tensor | None = None, fuses: bool = True) -> Stream:
    ids = torch.arange(len(x))
    batch = Batch(ids_T=ids, positions_T=ids, attention=None, logits_at=logits_at)  # type: ignore[arg-type]
    return Stream(x.clone(), batch, fuses=fuses)


def filled(*layers: torch.nn.Module) -> None:
    for layer in layers:
        place_weights(layer)
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))


def onto_by(made: str, weight: Tensor) -> Any:
    """`Matrix.onto` as devices do it: one addend, two, or the sum in the stream's memory."""

    def onto(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor | None]:
        product = x @ weight.T
        if made == "sum":
            return stream.add_(product), None
        return (torch.stack((product / 4, product * 0.75)) if made == "parts" else product), stream

    return onto


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("made", ["addend", "parts", "sum"])
def test_a_product_is_added(made: str, bias: bool, fuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, norm = RowLinear(8, WIDTH, ALONE, bias=bias), RMSNorm(WIDTH, 1e-5, ALONE)
    filled(layer, norm)
    weight = layer.matrix.weight
    x, before = torch.randn(3, 8), torch.randn(3, WIDTH)
    monkeypatch.setattr(layer.matrix, "onto", onto_by(made, weight))
    stream = stream_of(before, fuses=fuses)
    stream.add(layer(x))
    assert (stream.residual_TD is None) == (made == "sum" and not bias and fuses), "a bias is added with the product"
    expected = before + x @ weight.T + (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(stream.norm(norm).value(), F.rms_norm(expected, (WIDTH,), norm.weight, 1e-5))
    torch.testing.assert_close(stream.tap(), expected)


@pytest.mark.parametrize("given", ["addend", "parts", "sum", "apart"])
def test_queries_keys_and_values_of_a_norm(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, norm = QKVLinear(WIDTH, 4, 2, 4, ALONE, bias=True), RMSNorm(WIDTH, 1e-5, ALONE, offset=1.0)
    filled(layer, norm)
    x, residual = torch.randn(2 if given == "parts" else 1, 3, WIDTH), torch.randn(3, WIDTH)
    total = x.sum(0) + residual
    at_once, real = [], layer.matrix.after_norm

    def watch(*rest: Any) -> tuple[Tensor, Tensor]:
        at_once.append(rest)
        return real(*rest)

    monkeypatch.setattr(layer.matrix, "after_norm", watch)
    stream = stream_of(total, fuses=given != "apart")
    if given != "sum":
        stream.x_TD, stream.residual_TD = (x if given == "parts" else x[0]), residual
    heads = layer(stream.norm(norm))
    assert len(at_once) == (given in ("addend", "parts")), "there is a sum to make, and nothing else reads the norm"
    torch.testing.assert_close(heads, layer(F.rms_norm(total, (WIDTH,), 1 + norm.weight, 1e-5)))
    torch.testing.assert_close(stream.tap(), total)


@pytest.mark.parametrize("made", ["addend", "parts", "sum"])
@pytest.mark.parametrize("norm", [RMSNorm(WIDTH, 1e-5, ALONE), LayerNorm(WIDTH, 1e-5, ALONE)])
def test_a_norm_that_is_read_twice_is_that_of_the_stream_before_additions(
    norm: RMSNorm | LayerNorm, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parallel blocks: both halves read the same norm, the second after the first has been added, perhaps in place."""
    qkv, out = QKVLinear(WIDTH, 2, 1, 4, ALONE), RowLinear(8, WIDTH, ALONE)
    filled(qkv, out, norm)
    monkeypatch.setattr(out.matrix, "onto", onto_by(made, out.matrix.weight))
    before, added = torch.randn(2, 3, WIDTH)
    stream = stream_of(before)
    stream.add(added)
    normed = norm(before + added)
    x = stream.norm(norm)
    q, _, _ = qkv(x)
    stream.add(out(q.flatten(1)))
    q_plain, _, _ = qkv(normed)
    torch.testing.assert_close(q, q_plain)
    torch.testing.assert_close(x.value(), normed)
    stream.add(x.value() * 2, scale=0.5)
    torch.testing.assert_close(stream.tap(), before + added + out(q_plain.flatten(1)).value() + normed)


def test_a_tap_is_a_copy() -> None:
    stream = stream_of(torch.ones(2, WIDTH))
    tapped = stream.tap()
    stream.x_TD.zero_()
    assert (tapped == 1).all()


def test_the_stream_can_be_replaced() -> None:
    norm = LayerNorm(WIDTH, 1e-5, ALONE)
    filled(norm)
    before, added = torch.randn(2, 3, WIDTH)
    stream = stream_of(before)
    stream.add(added)
    stream.replace(stream.norm(norm))
    torch.testing.assert_close(stream.tap(), norm(before + added))


def test_a_narrowed_stream_takes_what_is_of_all_tokens_too() -> None:
    norm = RMSNorm(WIDTH, 1e-6, ALONE)
    filled(norm)
    at = torch.tensor([3, 1])
    before, one, other = torch.randn(3, 4, WIDTH)
    stream = stream_of(before, logits_at=at)
    x = stream.norm(norm)
    x.value()
    stream.narrow(at)
    stream.add(one[at])
    stream.add(other)
    torch.testing.assert_close(x.value(), norm(before)[at])
    torch.testing.assert_close(stream.tap(), (before + one + other)[at])
    torch.testing.assert_close(stream.last(norm), norm((before + one + other)[at]))


def test_the_last_norm_is_of_the_tokens_that_are_read() -> None:
    norm = RMSNorm(WIDTH, 1e-6, ALONE)
    filled(norm)
    before, added = torch.randn(2, 4, WIDTH)
    stream = stream_of(before, logits_at=torch.tensor([3, 1]))
    stream.add(added)
    torch.testing.assert_close(stream.last(norm), norm((before + added)[[3, 1]]))
