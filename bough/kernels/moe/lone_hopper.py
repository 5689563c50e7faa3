"""The experts' feed-forward of very few tokens on Hopper, in one launch: `lone_hopper.cu`, this is its door. With a router,
the launch has all that a layer does between the product after attention and the end.

Weights stream through the multiprocessors once, at memory bandwidth, and don't pause between the experts' two products. All
blocks of a launch meet on the device, so they must run at once: launches of this kernel from several streams must not
overlap in time. Those of one stream, and of graphs replayed on it, never do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.cuda_source import CudaKernel, StreamNumbers, cached_cubin, current_stream, runs_on
from bough.kernels.launching import num_sms
from bough.kernels.moe import Routing
from bough.kernels.norm import inlined as norm
from bough.kernels.norm.inlined import NormedStruct, are_rows

SOURCE = Path(__file__).with_suffix(".cu")
MOST_PAIRS = 32
"""(Token, expert) pairs of a launch: a lane of a warp looks at each."""
MOST_SLOTS = 32
MOST_LOGITS = 512
"""Of all tokens of a launch that has the router: blocks tell each other a word each."""
LEAST_SLOTS = 6
"""A ring of fewer, long ones does not cover the time in which the blocks meet."""
SHARED_BYTES = 208 << 10
"""For ring, vectors and sums; leaves room in a multiprocessor for small kernels before and after."""
_UNIT_BYTES = 8 << 10
"""Of weight rows that a warp multiplies at a time: long enough to be asked for in time, short since the last ones are waited
for."""
_WARPS = 12
_MOST_ROWS = 8
_EXPERTS_A_PAIR = 4
"""Several tokens are served if there are this many times more experts than pairs, because an expert of two tokens is read
twice here."""


class _Inputs(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate_up", "down", "weights", "ids")),
        ("normed", NormedStruct),
        ("router", ctypes.c_void_p),
        ("renormalise", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("hidden", "out")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("tokens", "per_token", "experts", "slots", "vector_bytes", "stream")),
    )


@dataclass(frozen=True, slots=True)
class LoneTiling:
    """How the work is cut for experts of `inner` hidden units in a model of `width`."""

    width: int
    inner: int
    unit_bytes: int = _UNIT_BYTES
    warps: int = _WARPS
    routed: int = 0
    """Experts of the router, where the launch has it."""

    @property
    def gated_rows(self) -> int:
        """Gate rows of a unit, and as many up rows."""
        fitting = [n for n in (2, 4, _MOST_ROWS) if 4 * self.width * n <= self.unit_bytes and self.inner % n == 0]
        return max(fitting, default=1)

    @property
    def slot_bytes(self) -> int:
        return -(-max(4 * self.width * self.gated_rows, 2 * self.inner) // 128) * 128

    @property
    def down_rows(self) -> int:
        """Rows of the down matrix in a unit, at most; a warp takes four or two at a time."""
        rows = self.slot_bytes // (2 * self.inner)
        return rows // 4 * 4 if rows >= 4 else min(rows, 2)

    def defines(self) -> Mapping[str, int]:
        return {
            "D": self.width,
            "F": self.inner,
            "GATED_ROWS": self.gated_rows,
            "DOWN_ROWS": self.down_rows,
            "SLOT_BYTES": self.slot_bytes,
            "WARPS": self.warps,
            "STREAMS": StreamNumbers.MOST,
            "EXPERTS": self.routed,
        }

    def vector_bytes(self, tokens: int, pairs: int) -> int:
        """For the tokens, and after them the hidden units of all pairs."""
        return 2 * max(tokens * self.width, pairs * self.inner)

    def num_slots(self, tokens: int, pairs: int, blocks: int) -> int:
        """Slots of the ring, for which there is room beside the vectors and what each pair adds to a block's rows."""
        sums = 4 * pairs * -(-self.width // blocks)
        return min(MOST_SLOTS, (SHARED_BYTES - self.vector_bytes(tokens, pairs) - sums) // self.slot_bytes)


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    blocks: int
    """One a multiprocessor."""
    streams: StreamNumbers = field(default_factory=partial(StreamNumbers, "experts are launched"))


@rehearsed
@cache
def _loaded(device: torch.device, cut: LoneTiling) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", cut.defines())
    kernel = CudaKernel(cubin, "lone_experts", device, threads=32 * (cut.warps + 1), shared_bytes=SHARED_BYTES)
    return _Loaded(kernel, num_sms(device))


@rehearsed
@cache
def _is_ready(device: torch.device, cut: LoneTiling) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    return runs_on(device, partial(_loaded, device, cut), "experts of few tokens take three launches")


def suits(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, ids_Tk: Tensor, activation: str) -> bool:
    """Whether the kernel serves these experts, and faster than the portable kernels do."""
    return _serves(x_TD, gate_up_E2FD, down_EDF, ids_Tk.shape[1], activation, routed=0)


def suits_routed(
    x_TD: Tensor, residual_TD: Tensor, routing: Routing, gate_up_E2FD: Tensor, down_EDF: Tensor, activation: str
) -> bool:
    """Whether one launch serves these experts and what comes before them."""
    tokens, num_experts = residual_TD.shape[0], down_EDF.shape[0]
    if not 1 <= tokens * num_experts <= MOST_LOGITS or routing.per_token > num_experts:
        return False
    router = routing.router_ED
    if not norm.suits(x_TD, residual_TD, routing.norm_D) or not router.is_contiguous() or not are_rows(router):
        return False
    same = router.shape[0] == num_experts
    return same and _serves(x_TD, gate_up_E2FD, down_EDF, routing.per_token, activation, routed=num_experts)


def _serves(
    x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, per_token: int, activation: str, *, routed: int
) -> bool:
    tokens = x_TD.shape[0]
    pairs = tokens * per_token
    num_experts, width, inner = down_EDF.shape
    if activation != "silu" or not 1 <= pairs <= MOST_PAIRS or width % 8 or inner % 8:
        return False
    if tokens > 1 and pairs * _EXPERTS_A_PAIR > num_experts:
        return False
    stacks = (gate_up_E2FD, down_EDF)
    if any(each.dtype != torch.bfloat16 or each.data_ptr() % 16 or not each.is_contiguous() for each in stacks):
        return False
    if not are_rows(x_TD):
        return False
    device, cut = x_TD.device, LoneTiling(width, inner, routed=routed)
    if not _is_ready(device, cut):
        return False
    blocks = num_sms(device)
    slots = cut.num_slots(tokens, pairs, blocks)
    return slots >= LEAST_SLOTS and slots * blocks >= routed  # the ring holds a block's rows of the router


def experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    out_TD: Tensor,
    cut: LoneTiling | None = None,
) -> None:
    """Fills the contiguous `out_TD` with the sum over each token's experts. Needs `suits`. Raises CudaSourceError."""
    _, width, inner = down_EDF.shape
    weights, ids = weights_Tk.to(torch.float32).contiguous(), ids_Tk.to(torch.int32).contiguous()
    how = {"per_token": ids.shape[1], **_pointers(weights=weights, ids=ids)}
    _launch(how, x_TD, gate_up_E2FD, down_EDF, out_TD, LoneTiling(width, inner) if cut is None else cut)


def routed_experts(
    x_TD: Tensor,
    residual_TD: Tensor,
    routing: Routing,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    out_TD: Tensor,
    total_TD: Tensor,
    cut: LoneTiling | None = None,
) -> None:
    """Fills the contiguous `out_TD` and `total_TD` with what `moe.routed_experts` returns; they must not overlap anything
    else given. Needs `suits_routed`. Raises CudaSourceError."""
    num_experts, width, inner = down_EDF.shape
    normed = norm.normed(x_TD, residual_TD, routing.norm_D, routing.eps, routing.offset, total_TD)
    how = {
        "per_token": routing.per_token, "renormalise": routing.renormalise, "normed": normed,
        **_pointers(router=routing.router_ED),
    }  # fmt: skip
    chosen = LoneTiling(width, inner, routed=num_experts) if cut is None else cut
    _launch(how, x_TD, gate_up_E2FD, down_EDF, out_TD, chosen)


def _launch(
    how: Mapping[str, Any], x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, out_TD: Tensor, cut: LoneTiling
) -> None:
    """`how` experts are chosen: those of the inputs that say it."""
    device, tokens = x_TD.device, x_TD.shape[0]
    loaded = _loaded(device, cut)
    pairs = tokens * how["per_token"]
    hidden = torch.empty((pairs, cut.inner), dtype=x_TD.dtype, device=device)
    stream = current_stream(device)
    inputs = _Inputs(
        **how, **_pointers(x=x_TD, gate_up=gate_up_E2FD, down=down_EDF, hidden=hidden, out=out_TD),
        x_stride=x_TD.stride(0), tokens=tokens, experts=down_EDF.shape[0],
        slots=cut.num_slots(tokens, pairs, loaded.blocks), vector_bytes=cut.vector_bytes(tokens, pairs),
        stream=loaded.streams.of(stream),
    )  # fmt: skip
    loaded.kernel.launch(loaded.blocks, (inputs,), stream)


def _pointers(**tensors: Tensor) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in tensors.items()}
