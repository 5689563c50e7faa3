"""Mamba's and Mamba 2's recurrences and their convolution, in chunks and by single tokens, against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bough.kernels import causal_conv, selective_scan, ssd

LENGTHS = [1, 2, 7, 8, 9, 63, 64, 65, 200]


def inputs_of_heads(length: int, heads: int = 6, width: int = 5, groups: int = 2, states: int = 8) -> list[Tensor]:
    """Inputs, steps, rates, B, C, D of a row, and a state."""
    torch.manual_seed(length)
    return [
        torch.randn(length, heads, width),
        torch.rand(length, heads),
        -3 * torch.rand(heads),
        torch.randn(length, groups, states),
        torch.randn(length, groups, states),
        torch.randn(heads),
        torch.randn(heads, width, states),
    ]


def by_heads(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, a, b, c, d, state = (each.double() for each in (x, dt, a, b, c, d, state))
    share, read = x.shape[1] // b.shape[1], []
    for at in range(len(x)):
        key, query = (each[at].repeat_interleave(share, 0) for each in (b, c))
        state = (dt[at] * a).exp()[:, None, None] * state
        state = state + torch.einsum("hp,hn->hpn", dt[at][:, None] * x[at], key)
        read.append(torch.einsum("hpn,hn->hp", state, query) + d[:, None] * x[at])
    return torch.stack(read).float(), state.float()


def inputs_of_channels(length: int, channels: int = 11, states: int = 4) -> list[Tensor]:
    torch.manual_seed(length)
    return [
        torch.randn(length, channels),
        torch.rand(length, channels),
        -3 * torch.rand(channels, states),
        torch.randn(length, states),
        torch.randn(length, states),
        torch.randn(channels),
        torch.randn(channels, states),
    ]


def by_channels(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    x, dt, a, b, c, d, state = (each.double() for each in (x, dt, a, b, c, d, state))
    read = []
    for at in range(len(x)):
        state = (dt[at][:, None] * a).exp() * state + (dt[at] * x[at])[:, None] * b[at]
        read.append(state @ c[at] + d * x[at])
    return torch.stack(read).float(), state.float()


KINDS = {"heads": (ssd, inputs_of_heads, by_heads), "channels": (selective_scan, inputs_of_channels, by_channels)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_in_chunks(kind: str, length: int) -> None:
    kernels, made, definition = KINDS[kind]
    *inputs, state = made(length)
    expected, after = definition(*inputs, state)
    assert (kernels.scan_row(*inputs, state) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (state - after).abs().max() < 1e-5 * after.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_token(kind: str) -> None:
    kernels, made, definition = KINDS[kind]
    x, dt, a, b, c, d, _ = made(4)
    states = torch.randn(9, *made(1)[-1].shape)
    before, at = states.clone(), torch.tensor([7, 0, 3, 8])
    read = kernels.step_rows(x, dt, a, b, c, d, states, at)
    for row, place in enumerate(at.tolist()):
        one = slice(row, row + 1)
        expected, after = definition(x[one], dt[one], a, b[one], c[one], d, before[place])
        assert (read[row] - expected[0]).abs().max() < 1e-5
        assert (states[place] - after).abs().max() < 1e-5
    others = [place for place in range(9) if place not in at.tolist()]
    assert torch.equal(states[others], before[others])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_sees_what_came_before(length: int, has_bias: bool) -> None:
    torch.manual_seed(length)
    seen, weight = torch.randn(length + 3, 5), torch.randn(5, 4)
    bias = torch.randn(5) if has_bias else None
    expected = torch.stack([(seen[at : at + 4].T * weight).sum(1) for at in range(length)])
    expected = torch.nn.functional.silu(expected if bias is None else expected + bias)
    state = seen[:3].T.contiguous()
    assert (causal_conv.conv_row(seen[3:], weight, bias, state) - expected).abs().max() < 1e-5
    assert torch.equal(state, seen[-3:].T)
    states = torch.zeros(4, 5, 3)
    states[2] = seen[:3].T
    for at in range(length):
        one = causal_conv.conv_ones(seen[3 + at : 4 + at], weight, bias, states, torch.tensor([2]))
        assert (one - expected[at]).abs().max() < 1e-5
    assert torch.equal(states[2], seen[-3:].T)
