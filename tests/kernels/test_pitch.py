"""Rows of matrices begin at multiples of 16 bytes on a GPU, and without gaps elsewhere."""

import pytest
import torch
from torch import Tensor

from bough.kernels.pitch import empty_rows, whole_rows


@pytest.mark.parametrize(
    ("cols", "dtype", "pitch"),
    [(3420, torch.bfloat16, 3424), (3424, torch.bfloat16, 3424), (5, torch.float32, 8), (1, torch.float16, 8)],
)
def test_rows_begin_where_a_gpu_can_fetch_them(
    cols: int, dtype: torch.dtype, pitch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = empty_rows(7, cols, dtype, torch.device("cpu"))
    assert here.shape == (7, cols)
    assert here.is_contiguous()

    def empty(rows: int, cols: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == "cuda"
        return torch.full((rows, cols), float("nan"), dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    made = empty_rows(7, cols, dtype, torch.device("cuda"))
    assert made.shape == (7, cols)
    assert made.stride() == (pitch, 1)
    gap = made.as_strided((7, pitch - cols), (pitch, 1), cols)
    assert torch.equal(gap, torch.zeros_like(gap))


def _padded(rows: int, cols: int, pitch: int) -> Tensor:
    wide = torch.zeros(rows, pitch, dtype=torch.float64)
    wide[:, :cols] = torch.randn(rows, cols, dtype=torch.float64)
    return wide[:, :cols]


def test_a_product_takes_the_zeros_behind_rows_along_where_both_factors_have_them() -> None:
    x, weight = _padded(5, 13, 14), _padded(4, 13, 14).to(torch.float64)
    whole_x, whole_weight = whole_rows(x, weight)
    assert whole_x.shape == (5, 14)
    assert whole_weight.shape == (4, 14)
    torch.testing.assert_close(whole_x @ whole_weight.t(), x @ weight.t())
    for other_x, other_weight in (
        (x.contiguous(), weight),
        (x, weight.contiguous()),
        (_padded(5, 13, 26), _padded(4, 13, 26)),
    ):
        same_x, same_weight = whole_rows(other_x, other_weight)
        assert same_x is other_x
        assert same_weight is other_weight
