"""Hopper's attention over fresh rows against float32, on ragged batches between tokens that belong to nobody."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bough.kernels.attention.fresh_hopper import Tiling, attend, cut

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is Hopper's"
)
NAN = float("nan")
BEFORE, AFTER = 3, 5
BATCHES = [[1], [128], [2048], [127, 128, 129], [300, 5, 1777], [64, 65, 63, 513, 1, 2, 1000]]


def expected(q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[int, int]], scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.full(q.shape, NAN, device=q.device), torch.full(q.shape[:2], NAN, device=q.device)
    group = q.shape[1] // k.shape[1]
    for first, length in rows:
        at = slice(first, first + length)
        q_NQH = q[at].float().transpose(0, 1)
        k_NQH, v_NQH = (x[at].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q_NQH @ k_NQH.transpose(1, 2) * scale).masked_fill(later, float("-inf"))
        lse[at] = (torch.logsumexp(scores, 2) / np.log(2)).T
        out[at] = (scores.softmax(2) @ v_NQH).transpose(0, 1)
    return out, lse


def check(
    lengths: list[int], tiling: Tiling, dtype: torch.dtype = torch.bfloat16, heads: int = 8, kv: int = 2, dim: int = 128
) -> None:
    starts = np.cumsum([BEFORE, *lengths])
    rows = [(int(start), length) for start, length in zip(starts, lengths, strict=False)]
    total = int(starts[-1]) + AFTER
    spread = 1.0 + 5.0 * float(torch.rand(()))
    qkv = (torch.randn(total, (heads + 2 * kv) * dim, device="cuda") * spread**0.5).to(dtype)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in qkv.split([heads * dim, kv * dim, kv * dim], 1))
    for x in (k, v):
        x[:BEFORE], x[-AFTER:] = NAN, NAN
    out, lse = torch.full(q.shape, NAN, device="cuda", dtype=dtype), torch.full(q.shape[:2], NAN, device="cuda")
    attend(q, k, v, cut(rows, q.device, tiling), dim**-0.5, out, lse_TN=lse)
    want, want_lse = expected(q, k, v, rows, dim**-0.5)
    mine = slice(BEFORE, total - AFTER)
    assert out[:BEFORE].isnan().all()
    assert out[-AFTER:].isnan().all()
    assert (out[mine].float() - want[mine]).norm() / want[mine].norm() < 6e-3
    assert (out[mine].float() - want[mine]).abs().max() < 0.03 * want[mine].abs().max()
    assert (lse[mine] - want_lse[mine]).abs().max() < 2e-2


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_ragged_batches(lengths: list[int], pair: bool) -> None:
    check(lengths, Tiling(pair=pair))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(32, 8, 128), (4, 4, 64), (6, 1, 128), (14, 2, 64)])
def test_heads_and_types(dtype: torch.dtype, heads: int, kv: int, dim: int) -> None:
    check([300, 5, 777], Tiling(), dtype, heads, kv, dim)


def test_random_batches_one_after_the_other_on_one_counter() -> None:
    numbers = np.random.default_rng()
    for _ in range(8):
        check([int(n) for n in numbers.integers(1, 900, numbers.integers(1, 12))], Tiling())
