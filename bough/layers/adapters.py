"""Adapters (LoRA) of a model's matrices: what tokens of some requests add to products.

A matrix that has adapters is wrapped: without a token that has one, nothing is launched but what the matrix itself launches,
fused products included. T tokens, D inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from bough.config.adapter_facts import AdapterFacts
from bough.config.model_facts import Activation
from bough.kernels.lora import LoraStack, TokenAdapters, add_lora
from bough.kernels.norm import add_rms_norm
from bough.quantization.scheme import Matrix, Part
from bough.quantization.unquantized import GATES
from bough.weights.slots import Slot, pass_over
from bough.weights.stored import Stored, copy_into

TARGETS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.up", "mlp.down")
"""Linear layers of a block that have adapters, in models with any."""


class PassAdapters:
    """The adapter of each token of a pass, and of the tokens that its last layer computes."""

    __slots__ = ("_at_L", "_narrowed", "_tokens")

    def __init__(self, of_T: Tensor, at_L: Tensor | None = None) -> None:
        """`of_T`: as in `TokenAdapters`. `at_L`: the tokens that the stream may be narrowed to."""
        self._tokens = TokenAdapters(of_T)
        self._at_L = at_L
        self._narrowed: TokenAdapters | None = None

    def of(self, count: int) -> TokenAdapters:
        """Of all tokens, or of those that the stream was narrowed to: `count` says which."""
        if count == len(self._tokens.of_T):
            return self._tokens
        assert self._at_L is not None, "a pass that is not narrowed has all of its tokens"
        assert count == len(self._at_L), f"{count} tokens, {len(self._at_L)} are left"
        if self._narrowed is None:
            self._narrowed = TokenAdapters(self._tokens.of_T.index_select(0, self._at_L))
        return self._narrowed


class Adapters:
    """The adapters of a model, and which of them the tokens of the pass under way have: matrices look here."""

    def __init__(self, facts: Sequence[AdapterFacts], *, built_in: bool = False) -> None:
        """`built_in`: they belong to the checkpoint, are there for every matrix, and make all parts of one from the same
        narrow inputs. Otherwise each part has narrow inputs of its own, and an adapter may leave matrices out."""
        self.facts = tuple(facts)
        self.built_in = built_in
        self.under_way: PassAdapters | None = None
        """None: no token of the pass has an adapter."""

    def wraps(self, name: str) -> bool:
        """Whether a layer of this name has adapters."""
        return name.startswith("layers.") and name.endswith(TARGETS)


class AdaptedMatrix(Matrix):
    """A matrix with adapters."""

    def __init__(
        self, base: Matrix, parts: Sequence[Part], adapters: Adapters, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`parts`: of the matrix."""
        super().__init__()
        self.base = base
        self.parts = tuple(parts)
        self.adapters = adapters
        ranks = [each.rank for each in adapters.facts]
        total = sum(ranks)
        self.offsets = [end - rank for end, rank in zip(accumulate(ranks), ranks, strict=True)]
        rows = [part.num_rows for part in parts]
        outputs = sum(rows)
        self.narrow = 1 if adapters.built_in else len(parts)
        """Parts that have narrow inputs of their own."""

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.lora_a = parameter(self.narrow * total, parts[0].num_cols)
        self.lora_b = parameter(outputs, total)
        ints = partial(torch.tensor, dtype=torch.int32, device=device)
        self._rest = (
            torch.tensor([each.scale for each in adapters.facts], dtype=torch.float32, device=device),
            ints(ranks),
            ints(self.offsets),
        )
        self._most_rank = max(ranks)
        bounds = {(0, outputs), (0, rows[0]), (rows[0], outputs)}
        """Outputs that are computed at once: all, queries, and what is not queries."""
        ends = [0, *accumulate(rows)]
        self._ends = {(a, b): [0, b - a] if self.narrow == 1 else ends for a, b in bounds}
        self._starts = {bound: ints(each) for bound, each in self._ends.items()}
        self._stacks: dict[tuple[int, int], LoraStack] = {}
        self.num_outputs = outputs

    def weight_slots(self) -> dict[str, Slot]:
        slots = self.base.weight_slots()
        inputs, width = self.parts[0].cols, self.parts[0].shape[1]
        optional = not self.adapters.built_in
        for adapter, first in zip(self.adapters.facts, self.offsets, strict=True):
            rank, start = adapter.rank, 0
            for number, part in enumerate(self.parts):
                a_name, b_name = (part.slot_name(f"lora_{each}.{adapter.name}.weight") for each in "ab")
                line = self.narrow * first + number * rank
                put: Callable[[Stored], None] = partial(_fill, self.lora_a[line : line + rank], slice(None), inputs)
                if number >= self.narrow:
                    put = pass_over  # the first part has filled what they share
                # A checkpoint that fuses the parts has one for all of them.
                slots[a_name] = Slot((rank, width), put, optional=optional, outputs=None)
                target = self.lora_b[start : start + part.num_rows, first : first + rank]
                fill = partial(_fill, target, part.rows, slice(None))
                slots[b_name] = Slot((part.shape[0], rank), fill, optional=optional)
                start += part.num_rows
        return slots

    def forward(self, x_TD: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return self._added(self.base.forward(x_TD, bias_O), x_TD, 0, self.num_outputs)

    def some_rows(self, x_TD: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        start, stop, _ = rows.indices(self.num_outputs)
        return self._added(self.base.some_rows(x_TD, rows, bias), x_TD, start, stop)

    def after_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, eps: float, offset: float, bias_O: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.adapters.under_way is None:
            return self.base.after_norm(x_TD, residual_TD, norm_D, eps, offset, bias_O)
        normed_TD, total_TD = add_rms_norm(x_TD, residual_TD, norm_D, eps, offset=offset)
        return self.forward(normed_TD, bias_O), total_TD

    def onto(self, x_TD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.adapters.under_way is None:
            return self.base.onto(x_TD, stream_TO)
        return self.forward(x_TD), stream_TO

    def gated(self, x_TD: Tensor, activation: Activation, bias_O: Tensor | None = None) -> Tensor:
        if self.adapters.under_way is None:
            return self.base.gated(x_TD, activation, bias_O)
        return GATES[activation](self.forward(x_TD, bias_O))

    def lookup(self, ids_T: Tensor) -> Tensor:
        return self.base.lookup(ids_T)

    def _added(self, out_TO: Tensor, x_TD: Tensor, start: int, stop: int) -> Tensor:
        """The product of outputs `start .. stop - 1`, with what adapters add."""
        if self.adapters.under_way is not None:
            tokens = self.adapters.under_way.of(len(x_TD))
            if self.narrow == 1 or stop - start == self.num_outputs:
                add_lora(out_TO, x_TD, self._stack(start, stop), tokens)
            else:  # some of the parts: in the last layer of prompts, whose queries are few
                all_TO = out_TO.new_zeros(len(x_TD), self.num_outputs)
                add_lora(all_TO, x_TD, self._stack(0, self.num_outputs), tokens)
                out_TO += all_TO[:, start:stop]
        return out_TO

    def _stack(self, start: int, stop: int) -> LoraStack:
        """The adapters, as kernels take them, of some outputs. Made once; parameters stay where they are."""
        found = self._stacks.get((start, stop))
        if found is None:
            widest = max(end - begin for begin, end in pairwise(self._ends[start, stop]))
            found = LoraStack(
                self.lora_a, self.lora_b[start:stop], *self._rest, self._starts[start, stop],
                parts=self.narrow, widest=widest, most_rank=self._most_rank,
            )  # fmt: skip
            self._stacks[start, stop] = found
        return found


def wrapped(
    base: Matrix, name: str, parts: Sequence[Part], adapters: Adapters | None, dtype: torch.dtype, device: torch.device
) -> Matrix:
    """The matrix of the layer `name`, with its adapters where it has some."""
    if adapters is None or not adapters.wraps(name):
        return base
    return AdaptedMatrix(base, parts, adapters, dtype, device)


def _fill(target: Tensor, rows: slice, columns: slice, stored: Stored) -> None:
    copy_into(target, stored, rows, columns)
