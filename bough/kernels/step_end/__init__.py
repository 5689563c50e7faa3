"""How a step ends: what was drawn becomes the rows' newest tokens, and the slots' lengths and counts follow.

in: drawn tokens, the step's arrays, what the device keeps by slot. out: the slots, advanced; where drafts were verified, how
many tokens each row yields. never: logits.

A row draws a token behind its last certain token and behind each of its drafts. The token drawn at a place is right if all
drafts before it are: draft i + 1 is, if it is what was drawn at place i. So a row yields what it drew up to the first place
whose token is not the next draft; what comes behind that place was drawn for a text that is not the row's.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bough.kernels.choices import standard
from bough.kernels.step_start import SlotState

_IMPLEMENTATIONS = standard(__name__)


class SampleInputs(Protocol):
    """The arrays of a step that say where samples belong. int64 unless said otherwise."""

    ids_T: Tensor
    positions_T: Tensor
    sample_at_L: Tensor
    """The token behind which each sample was drawn."""
    sample_slots_L: Tensor
    counter_L: Tensor
    sample_start_R1: Tensor
    """int32: the first sample of each sampling row, and behind them their number. Padded rows have no samples."""


def advance(state: SlotState, inputs: SampleInputs, drawn_L: Tensor) -> None:
    """Every sample is a row's next token: `drawn_L` (int64) become last tokens, and lengths and counts follow.

    Samples beyond `drawn_L` are padding.
    """
    _IMPLEMENTATIONS.pick("advance", drawn_L.device)(state, inputs, drawn_L)


def verify(
    state: SlotState, inputs: SampleInputs, drawn_L: Tensor, num_rows: int, width: int, blocked_L: Tensor | None = None
) -> Tensor:
    """int64 [num_rows, 1 + width]: of each sampling row how many tokens it yields, and what it drew, -1 behind that.

    `width`: no row has more samples. `blocked_L` (bool): nothing may be drawn at this place; the row yields what comes
    before it. Advances the slots by what rows yield; one that yields nothing stays as it was.
    """
    out: Tensor = _IMPLEMENTATIONS.pick("verify", drawn_L.device)(state, inputs, drawn_L, num_rows, width, blocked_L)
    return out
