"""Rows of matrices begin at multiples of 16 bytes on a GPU, and without gaps elsewhere."""

import pytest
import torch
from torch import Tensor

from bough.kernels.pitch import empty_rows


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
        return torch.zeros(rows, cols, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    made = empty_rows(7, cols, dtype, torch.device("cuda"))
    assert made.shape == (7, cols)
    assert made.stride() == (pitch, 1)
