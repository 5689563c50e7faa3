"""The door of the Hopper kernel for few tokens' products, without a device: when it begins with a norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bough.kernels.linear import ring, skinny as skinny_module, triton as linear
from bough.kernels.linear.skinny import SkinnyTiling

USUAL = SkinnyTiling(64, 128, 4, 8, 1, tma=True, ring=True)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `launch_ring` was given, as it comes; every product is of the usual configuration."""
    launches: list[dict[str, Any]] = []

    def launch(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Tensor, **how: Any) -> None:
        launches.append({"x": x, "weight": weight, "bias": bias, **how})

    monkeypatch.setattr(ring, "launch_ring", launch)
    monkeypatch.setattr(ring, "is_ready", lambda _: True)
    monkeypatch.setattr(skinny_module, "_takes_tma", lambda x, rows, config: config.tma and x.stride(1) == 1)
    monkeypatch.setattr(linear, "_config", lambda *_: USUAL)
    return launches


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was left to a norm and a product of their own."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(linear, "reference", SimpleNamespace(linear_after_norm=lambda *given, **_: calls.append(given)))
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, ring.MOST_NORMED])
def test_few_tokens_are_normed_by_their_product(
    tokens: int, bias: bool, launched: list[dict[str, Any]], apart: list[tuple[Any, ...]]
) -> None:
    x, residual, norm = matrix(tokens, 2048), matrix(tokens, 2112)[:, :2048], torch.ones(2048, dtype=torch.bfloat16)
    weight, added = matrix(5120, 2048), torch.zeros(5120, dtype=torch.bfloat16) if bias else None
    out, total = linear.linear_after_norm(x, residual, norm, 0.25, weight, added, offset=1.0)
    assert (out.shape, total.shape) == ((tokens, 5120), (tokens, 2048))
    (launch,) = launched
    assert (launch["x"] is x, launch["weight"] is weight, launch["bias"] is added) == (True, True, True)
    assert launch["block"] == (8, 64, 128)
    normed = launch["normed"]
    assert (normed.x, normed.residual, normed.norm) == (x.data_ptr(), residual.data_ptr(), norm.data_ptr())
    assert (normed.total, normed.eps, normed.offset) == (total.data_ptr(), 0.25, 1.0)
    assert (normed.x_stride, normed.residual_stride) == (2048, 2112)
    assert not apart


@pytest.mark.parametrize("why", ["tokens", "parts", "norm", "stream", "row", "depth", "half", "bias"])
def test_others_are_normed_by_a_launch_of_their_own(
    why: str, launched: list[dict[str, Any]], apart: list[tuple[Any, ...]]
) -> None:
    tokens = ring.MOST_NORMED + 1 if why == "tokens" else 2
    depth = 8192 if why == "depth" else 2048
    dtype = torch.float16 if why == "half" else torch.bfloat16
    x, residual, norm = matrix(tokens, depth, dtype), matrix(tokens, depth, dtype), torch.ones(depth, dtype=dtype)
    bias = torch.zeros(512) if why == "bias" else None
    if why == "parts":
        x = torch.stack([x, x])
    if why == "norm":
        norm = norm.float()
    if why == "stream":
        residual = residual.float()
    if why == "row":
        x = matrix(tokens, depth + 4)[:, :depth]
    linear.linear_after_norm(x, residual, norm, 1e-6, matrix(512, depth, dtype), bias)
    assert [given[0] is x for given in apart] == [True]
    assert not launched


def test_a_plain_product_is_not_normed(launched: list[dict[str, Any]]) -> None:
    linear.linear(matrix(2, 2048), matrix(5120, 2048))
    assert [launch["normed"] for launch in launched] == [None]


def test_room_for_the_tokens_takes_the_place_of_their_tiles() -> None:
    block = (8, 64, 128)
    tiles, stages = 8 * 128 * 2, 8 * 64 * 128 * 2
    assert ring.shared_bytes(block, 8, silu_mul=False, normed=0) == stages + 8 * tiles + 1024
    assert ring.shared_bytes(block, 8, silu_mul=False, normed=2048) == stages + 8 * 2048 * 2 + 1024
    assert ring.shared_bytes(block, 8, silu_mul=False, normed=4096) < ring.MOST_SHARED_BYTES
