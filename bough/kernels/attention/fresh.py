"""Rows without context: their K and V are the step's own, contiguous, and attention needs no pages.

On Hopper one launch of `fresh_hopper` takes all such rows; elsewhere cuDNN takes one at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bough.kernels.attention import fresh_hopper
from bough.kernels.attention.inputs import Spec
from bough.kernels.choices import facts_of
from bough.kernels.cuda_source import can_map

FRESH_FROM = 64
"""The shortest row that is taken here; shorter ones share one launch of the paged kernel, which fills its tiles better."""
MASKED_FROM = 256
"""The fewest tokens of a step whose fresh rows are taken here where layers have windows or sinks; the paged kernel takes
those of smaller steps. On an H200, a layer of gpt-oss-20b takes 27 us here with 1,000 tokens (there 153), and the whole
step 17.5 ms instead of 20.9; with 300 tokens it is 16.5 ms, all of it the host's."""
LISTED_FROM = 256
"""The fewest tokens of a captured step whose fresh rows are taken here: a graph launches this kernel whether there are such
rows or not, and in smaller steps the paged kernel takes them no longer than a launch does."""
CUDNN_FROM = 512
"""The same where every row is a call of its own."""


def suits(spec: Spec, q_TNH: Tensor, v_TKV: Tensor, *, hopper: bool = True) -> bool:
    """Whether rows of this layer can be attended to here, on this device. The kernel for Hopper alone knows windows and
    sinks, and takes them in large steps."""
    facts = facts_of(q_TNH.device.type, q_TNH.device.index)
    possible = (
        facts.device_type == "cuda"
        and facts.capability >= (9, 0)
        and torch.version.hip is None
        and q_TNH.dtype in (torch.bfloat16, torch.float16)
        and q_TNH.shape[2] == v_TKV.shape[2]
        and q_TNH.shape[2] in (64, 128)
        and spec.causal
        and spec.softcap is None
        and spec.chunk is None
        and spec.slopes is None
        and not spec.latent
    )
    if not possible or (spec.window is None and spec.sinks is None):
        return possible
    enough = hopper and q_TNH.shape[0] >= MASKED_FROM
    return enough and fresh_hopper.is_ready(q_TNH, v_TKV, window=spec.window, sinks=spec.sinks)


def shortest(spec: Spec, q_TNH: Tensor, v_TKV: Tensor, *, hopper: bool = True) -> int:
    """The fewest tokens of a row that is faster here than in the paged kernel, where the layer `suits`.

    Without `hopper`, here and below, the vendor's kernel is taken on Hopper too.
    """
    is_ready = hopper and fresh_hopper.is_ready(q_TNH, v_TKV, window=spec.window, sinks=spec.sinks)
    return FRESH_FROM if is_ready else CUDNN_FROM


def lists(spec: Spec, q_TNH: Tensor, v_TKV: Tensor, *, hopper: bool = True) -> bool:
    """Whether rows that the device alone knows of are attended to here."""
    enough = hopper and q_TNH.shape[0] >= LISTED_FROM and suits(spec, q_TNH, v_TKV)
    return enough and fresh_hopper.is_ready(q_TNH, v_TKV, window=spec.window, sinks=spec.sinks)


class Unrotated(NamedTuple):
    """Queries as the projection left them, which attention rotates itself. Those of a row are at positions 0, 1, ..."""

    q_TNH: Tensor
    cos_sin_PR: Tensor


def rotates(spec: Spec, q_TNH: Tensor, v_TKV: Tensor, cos_sin_PR: Tensor, *, hopper: bool = True) -> bool:
    """Whether queries may be `Unrotated` here, where the layer `suits`. Keys are dense, and otherwise like the values."""
    can = hopper and fresh_hopper.suits(q_TNH, v_TKV, v_TKV, window=spec.window, sinks=spec.sinks)
    return can and fresh_hopper.can_rotate(cos_sin_PR, q_TNH.shape[2])


def padded_length(length: int) -> int:
    """Lengths are rounded up, so that cuDNN builds its plans for a few of them: causal attention ignores what follows."""
    step = 256 if length <= 4096 else 512
    return -(-length // step) * step


def attend_fresh(
    q_TNH: Tensor | Unrotated,
    k_TKH: Tensor,
    v_TKV: Tensor,
    rows: list[tuple[int, int]],
    scale: float,
    out_TNV: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    hopper: bool = True,
) -> None:
    """Fills `out_TNV` for the rows (first token, tokens). `window` and `sinks`: of a layer that `suits`."""
    if window is not None or sinks is not None:
        k_TKH, v_TKV = (each if can_map(each) else each.contiguous() for each in (k_TKH, v_TKV))
    if isinstance(q_TNH, Unrotated):
        q, table = q_TNH
        fresh_hopper.attend(q, k_TKH, v_TKV, tuple(rows), scale, out_TNV, table, window=window, sinks=sinks)
        return
    if window is not None or sinks is not None:
        q_TNH = q_TNH if can_map(q_TNH) else q_TNH.contiguous()
        fresh_hopper.attend(q_TNH, k_TKH, v_TKV, tuple(rows), scale, out_TNV, window=window, sinks=sinks)
        return
    if hopper and fresh_hopper.suits(q_TNH, k_TKH, v_TKV):
        fresh_hopper.attend(q_TNH, k_TKH, v_TKV, tuple(rows), scale, out_TNV)
        return
    for first, length in rows:
        padded = padded_length(length)
        q, k, v = (_rows(x, first, length, padded) for x in (q_TNH, k_TKH, v_TKV))
        out_TNV[first : first + length] = _sdpa(q, k, v, scale)[:length]


def attend_listed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKV: Tensor,
    listed: fresh_hopper.Listed,
    spec: Spec,
    out_TNV: Tensor,
) -> None:
    """As `attend_fresh`, for rows that the device has listed, in a layer of which `lists` is true."""
    q, k, v = (each if can_map(each) else each.contiguous() for each in (q_TNH, k_TKH, v_TKV))
    fresh_hopper.attend(q, k, v, listed, spec.scale, out_TNV, window=spec.window, sinks=spec.sinks)


def attend_whole(
    q_TNH: Tensor | Unrotated,
    k_TKH: Tensor,
    v_TKV: Tensor,
    length: int,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    hopper: bool = True,
) -> Tensor:
    """[T, N, V] where all tokens belong to fresh rows of one `length`."""
    q = q_TNH.q_TNH if isinstance(q_TNH, Unrotated) else q_TNH
    is_plain = window is None and sinks is None
    if q is not q_TNH or not is_plain or (hopper and fresh_hopper.suits(q, k_TKH, v_TKV)):
        out_TNV = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows = [(first, length) for first in range(0, q.shape[0], length)]
        attend_fresh(q_TNH, k_TKH, v_TKV, rows, scale, out_TNV, window=window, sinks=sinks, hopper=hopper)
        return out_TNV
    return _sdpa(q, k_TKH, v_TKV, scale, rows=q.shape[0] // length)


def _rows(x: Tensor, first: int, length: int, padded: int) -> Tensor:
    if first + padded <= x.shape[0]:
        return x[first : first + padded]
    return F.pad(x[first : first + length], (0, 0, 0, 0, 0, padded - length))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: int = 1) -> Tensor:
    def batched(x: Tensor) -> Tensor:
        length = x.shape[0] // rows
        strides = (length * x.stride(0), x.stride(1), x.stride(0), x.stride(2))
        return x.as_strided((rows, x.shape[1], length, x.shape[2]), strides)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            batched(q), batched(k), batched(v), is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).flatten(0, 1)
