"""The compiled sampler against the reference, which sorts everything and makes all the noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bough.kernels.cpu_build import library
from bough.kernels.sampling import cpu, reference

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")

FILTERS = {
    "nothing": (0, 1.0, 0.0),
    "top k": (40, 1.0, 0.0),
    "top 1": (1, 1.0, 0.0),
    "top p": (0, 0.9, 0.0),
    "small top p": (0, 0.01, 0.0),
    "min p": (-1, 1.0, 0.05),
    "all": (50, 0.8, 0.02),
}


def parameters(rows: int, temperature: float, filters: tuple[int, float, float], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    top_k, top_p, min_p = filters
    return [
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        torch.randint(0, 2**40, (rows,), generator=generator),
    ]


@pytest.mark.parametrize("vocab", [1000, 4099])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_draws_are_the_references(
    vocab: int, temperature: float, filters: tuple[int, float, float], spread: float
) -> None:
    logits = spread * torch.randn(24, vocab, generator=torch.Generator().manual_seed(1))
    given = parameters(24, temperature, filters, 2)
    expected, actual = reference.sample(logits, *given), cpu.sample(logits, *given)
    assert actual.dtype == torch.int64
    # a tie at float32's last place may fall the other way
    assert int((expected != actual).sum()) <= 1


def test_ties_stand_or_fall_together() -> None:
    logits = torch.zeros(400, 12)
    logits[:, 3:6] = 2.0
    logits[:, 6:8] = 1.0
    for top_k, allowed in ((1, {3, 4, 5}), (3, {3, 4, 5}), (4, {3, 4, 5, 6, 7})):
        given = parameters(400, 1.0, (top_k, 1.0, 0.0), 5)
        drawn = cpu.sample(logits, *given)
        assert set(drawn.tolist()) == allowed
        assert torch.equal(drawn, reference.sample(logits, *given))


def test_mixed_rows_and_dtypes() -> None:
    logits = 3 * torch.randn(6, 500)
    given = parameters(6, 1.0, (0, 1.0, 0.0), 3)
    given[0] = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 1e-3])
    given[1] = torch.tensor([0, 5, 0, 3, 1, 0])
    given[2] = torch.tensor([1.0, 1.0, 0.5, 0.5, 1.0, 1.0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = logits.to(dtype)
        assert torch.equal(cpu.sample(rounded, *given), reference.sample(rounded, *given))
        assert torch.equal(cpu.argmax(rounded), rounded.float().argmax(-1))


def test_argmax_is_the_first_largest() -> None:
    for vocab in (1, 15, 16, 17, 1000):
        logits = torch.randint(0, 4, (50, vocab)).float()
        expected = torch.tensor([row.index(max(row)) for row in logits.tolist()])
        assert torch.equal(cpu.argmax(logits), expected)
    logits[7, 30] = float("nan")
    assert cpu.argmax(logits)[7] == 30
    wide = torch.randn(4, 100)[:, 10:60]
    assert torch.equal(cpu.argmax(wide), wide.argmax(-1))


def test_frequencies_are_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5] + [-2.0] * 20)
    rows = 20_000
    given = parameters(rows, 1.0, (0, 1.0, 0.0), 11)
    drawn = cpu.sample(logits.expand(rows, -1).contiguous(), *given)
    observed = torch.bincount(drawn, minlength=25) / rows
    assert float((observed - logits.softmax(-1)).abs().max()) < 0.015
