"""Gradients are off inside, whoever calls."""

from __future__ import annotations

import torch

from bough.runner.inference import without_gradients


@without_gradients
def doubled(x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
    assert torch.is_inference_mode_enabled()
    return x * times


def test_the_mode_is_entered_where_it_is_off_and_left_as_it_was():
    weight = torch.ones(1, requires_grad=True)
    assert not doubled(weight).requires_grad
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        assert doubled(weight, times=3).item() == 3
        assert torch.is_inference_mode_enabled()
