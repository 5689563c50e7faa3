"""The residual stream: what blocks read through norms and add to. T tokens, D width, L tokens that are read at the end.

Two of its values are lazy, so that kernels can join what a block writes as separate steps. `Stream.norm` returns a `Normed`,
which a product may compute itself; a sublayer returns its last product as a `Product`, which the stream may add in the
kernel that multiplies. Which of them are joined is decided by layers and kernels, from shapes and device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar
from weakref import ref

from torch import Tensor

from bough.distributed.peers import SumsWithNorm
from bough.kernels.rows import take_rows
from bough.layers.batch import Batch

R = TypeVar("R")


class Norm(Protocol):
    """What `RMSNorm` and `LayerNorm` have in common."""

    fuses: bool
    """Whether kernels can join it with a product: an RMS norm."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), where x may be [P, T, D] of several addends."""
        ...

    def add_summed(self, x: Unsummed, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The same, where x is still to be summed over ranks."""
        ...


class Multiplies(Protocol):
    """A linear layer that ends a sublayer."""

    def product(self, x_TF: Tensor) -> Tensor:
        """[T, D]"""
        ...

    def onto(self, x_TF: Tensor, stream_TD: Tensor) -> tuple[Tensor | Unsummed, Tensor | None]:
        """As `kernels.linear.linear_onto`; what is added may be left to be summed over ranks. The stream may be
        overwritten."""
        ...


class Unsummed:
    """A rank's part of what is added to the stream, not summed over the ranks yet: the sum may be made with its norm."""

    __slots__ = ("part_TD", "talk")

    def __init__(self, part_TD: Tensor, talk: SumsWithNorm) -> None:
        self.part_TD = part_TD
        self.talk = talk

    def value(self) -> Tensor:
        """[T, D], summed now."""
        return self.talk.all_reduce(self.part_TD)


class Product:
    """The last product of a sublayer, not computed yet."""

    __slots__ = ("linear", "x_TF")

    def __init__(self, linear: Multiplies, x_TF: Tensor) -> None:
        self.linear = linear
        self.x_TF = x_TF

    def value(self) -> Tensor:
        """[T, D], computed now."""
        return self.linear.product(self.x_TF)


class Normed:
    """A norm of the stream as it is when `Stream.norm` is called, computed when it is first needed."""

    __slots__ = ("__weakref__", "_value_TD", "norm", "stream")

    def __init__(self, stream: Stream, norm: Norm | None) -> None:
        """Without a norm it is the stream itself."""
        self.stream = stream
        self.norm = norm
        self._value_TD: Tensor | None = None

    @property
    def can_fuse(self) -> bool:
        """Whether `fuse` may be called: there is a sum to be made and normed, and nothing has needed it yet."""
        stream, norm = self.stream, self.norm
        fresh = self._value_TD is None and stream.residual_TD is not None and stream.fuses and stream.unsummed is None
        return fresh and norm is not None and norm.fuses

    @property
    def num_tokens(self) -> int:
        return self.stream.x_TD.shape[-2]

    @property
    def loc_T(self) -> Tensor | None:
        """As `Batch.loc_T`."""
        return self.stream.loc_T

    def fuse(self, product: Callable[[Tensor, Tensor], tuple[R, Tensor]]) -> R:
        """What `product` makes of the norm, together with the norm: it is called with what `Norm.add` takes, and returns
        its result and the sum."""
        stream = self.stream
        assert stream.residual_TD is not None, "can_fuse says so"
        made, stream.x_TD = product(stream.x_TD, stream.residual_TD)
        stream.residual_TD = None
        return made

    def now(self) -> Normed:
        """Itself, computed now: for what several sublayers read."""
        self.value()
        return self

    def value(self) -> Tensor:
        """[T, D], or [L, D] once the stream has been narrowed."""
        if self._value_TD is None:
            self._value_TD = self.stream.read(self.norm)
        self._value_TD = self.stream.fit(self._value_TD)
        return self._value_TD


Input = Tensor | Normed
"""What a sublayer takes."""


class Stream:
    """One forward pass's stream, from the embedding to the last norm."""

    __slots__ = ("_at_L", "_batch", "_layer_inputs_TLP", "_pending", "fuses", "residual_TD", "unsummed", "x_TD")

    def __init__(
        self, x_TD: Tensor, batch: Batch, *, fuses: bool = True, layer_inputs_TLP: Tensor | None = None
    ) -> None:
        """The stream begins as `x_TD`, which may be overwritten. Without `fuses` every norm and every product is computed
        by itself, so that each can be seen. `layer_inputs_TLP`: what each layer gets of its own, in models that have it."""
        self.x_TD = x_TD
        """What was added last (perhaps [P, T, D] of several addends), if there is a `residual_TD`; else all of it."""
        self.residual_TD: Tensor | None = None
        """The stream without what was added last."""
        self.unsummed: Unsummed | None = None
        """What `x_TD` is a part of, while it is not summed over ranks."""
        self.fuses = fuses
        self._batch = batch
        self._at_L: Tensor | None = None
        self._pending: list[ref[Normed]] = []
        self._layer_inputs_TLP = layer_inputs_TLP

    @property
    def loc_T(self) -> Tensor | None:
        """As `Batch.loc_T`, of the tokens that the stream has."""
        return self._batch.loc_T if self._at_L is None else None

    @property
    def is_padding_T1(self) -> Tensor | None:
        """bool [T, 1]: the tokens whose `loc_T` is negative; None without it. Made once in a forward pass."""
        batch, loc_T = self._batch, self.loc_T
        if loc_T is not None and batch.is_padding_T1 is None:
            batch.is_padding_T1 = (loc_T < 0)[:, None]
        return None if loc_T is None else batch.is_padding_T1

    def norm(self, norm: Norm) -> Normed:
        """The normed stream, as it is now."""
        return self._lazy(norm)

    def plain(self) -> Normed:
        """The stream itself, as it is now, for blocks that norm elsewhere."""
        return self._lazy(None)

    def add(self, x: Tensor | Product | Normed, scale: float | None = None) -> None:
        """Adds `x`, times `scale`."""
        self._settle()
        total_TD = self.fit(self._total())
        if isinstance(x, Product) and self.fuses and scale is None:
            added, self.residual_TD = x.linear.onto(x.x_TF, total_TD)
            if isinstance(added, Unsummed):
                self.unsummed, added = added, added.part_TD
            self.x_TD = added
            return
        x_TD = self.fit(value_of(x))
        self.x_TD, self.residual_TD = x_TD if scale is None else x_TD * scale, total_TD

    def add_at(self, at_M: Tensor, x_MD: Tensor) -> None:
        """Adds to some tokens. Not once the stream has been narrowed."""
        self._settle()
        self._total().index_add_(0, at_M, x_MD)

    def replace(self, x: Tensor | Product | Normed) -> None:
        """The stream becomes `x`."""
        self._settle()
        self.x_TD, self.residual_TD, self.unsummed = self.fit(value_of(x)), None, None

    def scale(self, by: float | Tensor) -> None:
        """Multiplies the stream."""
        self._settle()
        self.x_TD = self.fit(self._total()) * by

    def layer_input(self, layer: int) -> Tensor:
        """[T, P]: what a layer gets of its own, of the tokens that the stream has."""
        assert self._layer_inputs_TLP is not None, "the model has them"
        return self.fit(self._layer_inputs_TLP[:, layer])

    def tap(self) -> Tensor:
        """A copy of the stream as it is now, [T, D] or [L, D]."""
        self._settle()
        return self.fit(self._total()).clone()

    def narrow(self, at_L: Tensor) -> None:
        """From the next addition on, the stream has only the tokens `at_L`, which are all that is read at the end. What is
        added may be of all tokens or of those."""
        self._at_L = at_L

    def last(self, norm: Norm | None) -> Tensor:
        """The norm at a model's end (None: the stream itself), of the tokens that `Batch.logits_at` names."""
        at_L = self._batch.logits_at
        if at_L is not None and self._at_L is None:
            self._sum()
            if self.residual_TD is None or self.x_TD.dim() > 2:
                self.x_TD = self.x_TD.index_select(-2, at_L)
                if self.residual_TD is not None:
                    self.residual_TD = self.residual_TD.index_select(0, at_L)
            else:
                self.x_TD, self.residual_TD = take_rows(at_L, self.x_TD, self.residual_TD)
        return self.read(norm)

    def read(self, norm: Norm | None) -> Tensor:
        """The stream, or its norm. Makes the sum that is still to be made."""
        if norm is None:
            return self._total()
        if self.residual_TD is None:
            return norm(self.x_TD)
        unsummed, self.unsummed = self.unsummed, None
        if unsummed is not None:
            normed_TD, self.x_TD = norm.add_summed(unsummed, self.residual_TD)
            self.residual_TD = None
            return normed_TD
        normed_TD, self.x_TD = norm.add(self.x_TD, self.residual_TD)
        self.residual_TD = None
        return normed_TD

    def fit(self, x_TD: Tensor) -> Tensor:
        """The rows of `x_TD` that the stream has, if `x_TD` was made before it was narrowed."""
        at_L = self._at_L
        return x_TD if at_L is None or x_TD.shape[0] == at_L.shape[0] else x_TD.index_select(0, at_L)

    def _lazy(self, norm: Norm | None) -> Normed:
        made = Normed(self, norm)
        self._pending.append(ref(made))
        return made

    def _settle(self) -> None:
        """Computes norms that are still referenced: the stream is about to change, perhaps in place."""
        for each in self._pending:
            held = each()
            if held is not None:
                held.value()
        self._pending.clear()

    def _sum(self) -> None:
        """Sums what was added last over the ranks, if that is still to be done."""
        if self.unsummed is not None:
            self.x_TD, self.unsummed = self.unsummed.value(), None

    def _total(self) -> Tensor:
        self._sum()
        if self.residual_TD is not None:
            x_TD = self.x_TD
            self.x_TD = self.residual_TD + (x_TD if x_TD.dim() == self.residual_TD.dim() else x_TD.sum(0))
            self.residual_TD = None
        return self.x_TD


def value_of(x: Tensor | Product | Normed) -> Tensor:
    """[T, D], computed now if it was not."""
    return x if isinstance(x, Tensor) else x.value()
