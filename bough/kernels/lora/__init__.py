"""Low-rank adapters (LoRA): what some tokens of a step add to a product, each by the adapter of its request.

in: a product [T, O] and its inputs [T, D], a stack of adapters, and the slot of each token. out: the product, with
scale * B (A x) added for tokens that have an adapter. never: sorting tokens, or anything read back from the device.

T tokens, D inputs, O outputs, S slots, P parts, L ranks of all slots and parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)

NO_ADAPTER = 0
"""As a token's adapter: it has none. Adapter n is slot n - 1 of every stack."""


@dataclass(frozen=True, slots=True)
class LoraStack:
    """The adapters of one matrix. Slots lie one behind the other, each as wide as its rank or wider."""

    a_LD: Tensor
    """[L, D]: what makes the inputs narrow. Slot s has lines from `parts * offsets_S[s]` on: `ranks_S[s]` for each part."""
    b_OL: Tensor
    """[O, L / parts]: what makes them wide again. Slot s has columns from `offsets_S[s]` on."""
    scales_S: Tensor
    """float32"""
    ranks_S: Tensor
    """int32; 0: the slot is empty."""
    offsets_S: Tensor
    """int32"""
    starts_P1: Tensor
    """int32 [P + 1]: where the outputs of each part begin, and O. Parts are made of narrow inputs of their own."""
    parts: int
    """P"""
    widest: int
    """Outputs of the part that has most of them."""
    most_rank: int
    """No slot has a larger one."""


class TokenAdapters:
    """The adapter of each token of a pass."""

    __slots__ = ("_groups", "of_T")

    def __init__(self, of_T: Tensor) -> None:
        """`of_T`: int32, `NO_ADAPTER` or the number of an adapter."""
        self.of_T = of_T
        self._groups: list[tuple[int, Tensor | None]] | None = None

    @property
    def groups(self) -> list[tuple[int, Tensor | None]]:
        """Slots that tokens have, and which tokens (int64; None: all). Read once; only where nothing is captured."""
        if self._groups is None:
            found: list[int] = sorted(set(self.of_T.tolist()))
            self._groups = [
                (each - 1, None if len(found) == 1 else (self.of_T == each).nonzero()[:, 0])
                for each in found
                if each != NO_ADAPTER
            ]
        return self._groups


def add_lora(out_TO: Tensor, x_TD: Tensor, stack: LoraStack, tokens: TokenAdapters) -> None:
    """Adds scale * B (A x) to the lines of `out_TO` whose token has an adapter, in place. Lines of both have elements side
    by side; `out_TO` may be some columns of a wider product."""
    _IMPLEMENTATIONS.pick("add_lora", out_TO.device)(out_TO, x_TD, stack, tokens)
