"""The experts' feed-forward of very few tokens on Hopper, in one launch: `lone_hopper.cu`, this is its door.

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

import torch
from torch import Tensor

from bough.kernels.cuda_source import CudaKernel, StreamNumbers, cached_cubin, current_stream, runs_on
from bough.kernels.launching import num_sms

SOURCE = Path(__file__).with_suffix(".cu")
MOST_PAIRS = 32
"""(Token, expert) pairs of a launch: a lane of a warp looks at each."""
MOST_SLOTS = 32
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
"""Several tokens are served where there are so many more experts than pairs: an expert of two tokens is read twice here."""


class _Inputs(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "gate_up", "down", "weights", "ids", "hidden", "out")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("tokens", "per_token", "experts", "slots", "vector_bytes", "stream")),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut for experts of `inner` hidden units in a model of `width`."""

    width: int
    inner: int
    unit_bytes: int = _UNIT_BYTES
    warps: int = _WARPS

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


@cache
def _loaded(device: torch.device, cut: Cut) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", cut.defines())
    kernel = CudaKernel(cubin, "lone_experts", device, threads=32 * (cut.warps + 1), shared_bytes=SHARED_BYTES)
    return _Loaded(kernel, num_sms(device))


@cache
def _is_ready(device: torch.device, cut: Cut) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    return runs_on(device, partial(_loaded, device, cut), "experts of few tokens take three launches")


def suits(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, ids_Tk: Tensor, activation: str) -> bool:
    """Whether the kernel serves these experts, and faster than the portable kernels do."""
    tokens, pairs = ids_Tk.shape[0], ids_Tk.numel()
    num_experts, width, inner = down_EDF.shape
    if activation != "silu" or not 1 <= pairs <= MOST_PAIRS or width % 8 or inner % 8:
        return False
    if tokens > 1 and pairs * _EXPERTS_A_PAIR > num_experts:
        return False
    given = (x_TD, gate_up_E2FD, down_EDF)
    if any(each.dtype != torch.bfloat16 or each.data_ptr() % 16 for each in given):
        return False
    rows = x_TD.stride(1) == 1 and (tokens == 1 or x_TD.stride(0) % 8 == 0)
    if not (rows and gate_up_E2FD.is_contiguous() and down_EDF.is_contiguous()):
        return False
    device, cut = x_TD.device, Cut(width, inner)
    return _is_ready(device, cut) and cut.num_slots(tokens, pairs, num_sms(device)) >= LEAST_SLOTS


def experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_Tk: Tensor,
    ids_Tk: Tensor,
    out_TD: Tensor,
    cut: Cut | None = None,
) -> None:
    """Fills the contiguous `out_TD` with the sum over each token's experts. Needs `suits`. Raises CudaSourceError."""
    device, (tokens, per_token) = x_TD.device, ids_Tk.shape
    num_experts, width, inner = down_EDF.shape
    chosen = Cut(width, inner) if cut is None else cut
    loaded = _loaded(device, chosen)
    pairs = tokens * per_token
    hidden = torch.empty((pairs, inner), dtype=x_TD.dtype, device=device)
    weights = weights_Tk.to(torch.float32).contiguous()
    ids = ids_Tk.to(torch.int32).contiguous()
    stream = current_stream(device)
    given = {
        "x": x_TD, "gate_up": gate_up_E2FD, "down": down_EDF, "weights": weights, "ids": ids, "hidden": hidden,
        "out": out_TD,
    }  # fmt: skip
    inputs = _Inputs(
        **{name: each.data_ptr() for name, each in given.items()}, x_stride=x_TD.stride(0), tokens=tokens,
        per_token=per_token, experts=num_experts, slots=chosen.num_slots(tokens, pairs, loaded.blocks),
        vector_bytes=chosen.vector_bytes(tokens, pairs), stream=loaded.streams.of(stream),
    )  # fmt: skip
    loaded.kernel.launch(loaded.blocks, (inputs,), stream)
