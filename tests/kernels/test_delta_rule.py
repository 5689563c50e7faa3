"""The gated delta rule in chunks, and by single tokens, against its definition token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bough.kernels.delta_rule import scan_row, step_rows


def made(length: int, rates: int = 1, heads: int = 3, keys: int = 8, values: int = 5) -> list[Tensor]:
    """Queries, keys, values, decays (`rates` by head) and rates of a row, and a state. One key head serves all heads."""
    torch.manual_seed(length)
    q, k = torch.randn(2, length, 1, keys)
    return [
        q,
        k,
        torch.randn(length, heads, values),
        -3 * torch.rand(length, heads, rates),
        torch.rand(length, heads),
        torch.randn(heads, keys, values),
    ]


def by_definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state, read = state.double(), []
    q, k = (torch.nn.functional.normalize(each.double(), dim=-1).expand(-1, len(state), -1) for each in (q, k))
    q = q / q.shape[-1] ** 0.5
    for at in range(len(q)):
        state = state * g[at].double().exp()[:, :, None]
        kept = torch.einsum("hkv,hk->hv", state, k[at])
        state = state + torch.einsum("hk,hv->hkv", k[at], b[at].double()[:, None] * (v[at].double() - kept))
        read.append(torch.einsum("hkv,hk->hv", state, q[at]))
    return torch.stack(read).float(), state.float()


@pytest.mark.parametrize("rates", [1, 8])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 63, 64, 65, 200])
def test_a_row_in_chunks(length: int, rates: int) -> None:
    *inputs, state = made(length, rates)
    expected, after = by_definition(*inputs, state)
    assert (scan_row(*inputs, state) - expected).abs().max() < 1e-5
    assert (state - after).abs().max() < 1e-5


@pytest.mark.parametrize("rates", [1, 8])
def test_rows_of_one_token(rates: int) -> None:
    rows = [made(1, rates) for _ in range(4)]
    states = torch.randn(9, *rows[0][-1].shape)
    before, at = states.clone(), torch.tensor([7, 0, 3, 8])
    q, k, v, g, b = (torch.cat([row[each] for row in rows]) for each in range(5))
    read = step_rows(q, k, v, g, b, states, at)
    for row, place in enumerate(at.tolist()):
        expected, after = by_definition(*rows[row][:5], before[place])
        assert (read[row] - expected[0]).abs().max() < 1e-5
        assert (states[place] - after).abs().max() < 1e-5
    others = [place for place in range(9) if place not in at.tolist()]
    assert torch.equal(states[others], before[others])
