"""Linear layers over a mesh. T tokens, D width, N heads, K key-value heads, H width of a head, F inner width."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from bough.config.model_facts import Activation
from bough.distributed.mesh import Axis
from bough.distributed.peers import SumsWithNorm
from bough.layers.build import Build
from bough.layers.norm import RMSNorm
from bough.layers.stream import Input, Normed, Product, Unsummed, value_of
from bough.quantization.scheme import Matrix, Part
from bough.quantization.unquantized import GATES
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into

ALL = slice(None)


class _Weighted(nn.Module):
    """A matrix of several parts, each cut to this rank's share, and a bias of the same rows."""

    def __init__(self, parts: tuple[Part, ...], build: Build, *, bias: bool) -> None:
        super().__init__()
        self.parts = parts
        self.build = build
        self.matrix: Matrix
        num_rows = sum(part.num_rows for part in parts)
        self.bias = None
        if bias:
            empty = torch.empty(num_rows, dtype=build.dtype, device=build.device)
            self.bias = nn.Parameter(empty, requires_grad=False)

    def place(self, name: str) -> None:
        self.matrix = self.build.matrix(name, self.parts)

    def slots(self) -> dict[str, Slot]:
        slots = self.matrix.weight_slots()
        if self.bias is not None:
            start = 0
            for part in self.parts:
                target = self.bias[start : start + part.num_rows]
                slots[part.slot_name("bias")] = Slot(part.shape[:1], partial(_fill_rows, target, part.rows))
                start += part.num_rows
        return slots

    def _after(self, norm: RMSNorm, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(product of the norm of x + residual, x + residual)."""
        return self.matrix.after_norm(x_TD, residual_TD, norm.weight, norm.eps, norm.offset, self.bias)


class ReplicatedLinear(_Weighted):
    """Every rank holds all of it."""

    def __init__(self, in_dim: int, out_dim: int, build: Build, *, bias: bool = False) -> None:
        super().__init__((Part("", (out_dim, in_dim), ALL, ALL),), build, bias=bias)

    def forward(self, x: Input) -> Tensor:
        return self.matrix.forward(value_of(x), self.bias)


class JoinedLinear(_Weighted):
    """Several products of the same inputs in one, all of which every rank holds, if not told otherwise."""

    def __init__(
        self,
        in_dim: int,
        widths: dict[str, int],
        build: Build,
        *,
        bias: bool = False,
        mine: dict[str, slice] | None = None,
    ) -> None:
        """`widths`: by name, the outputs of each; `mine`: those of them that this rank has, if not all."""
        held = {name: slice(0, width) for name, width in widths.items()} | (mine or {})
        self.widths = [each.stop - each.start for each in held.values()]
        super().__init__(
            tuple(Part(name, (width, in_dim), held[name], ALL) for name, width in widths.items()), build, bias=bias
        )
        self._lent: set[str] = set()

    def lend(self, part: str) -> None:
        """From now on the slots of a part are listed by another layer, as `slots_of`."""
        self._lent.add(part)

    def slots(self) -> dict[str, Slot]:
        return {name: slot for name, slot in super().slots().items() if name.partition(".")[0] not in self._lent}

    def slots_of(self, part: str) -> dict[str, Slot]:
        """Those of a part, by their names in a layer that has no other."""
        every = super().slots()
        return {name.removeprefix(f"{part}."): slot for name, slot in every.items() if name.startswith(f"{part}.")}

    def forward(self, x: Input) -> tuple[Tensor, ...]:
        """Views of one tensor."""
        if isinstance(x, Normed) and x.can_fuse and isinstance(x.norm, RMSNorm):
            made_TO = x.fuse(partial(self._after, x.norm))
        else:
            made_TO = self.matrix.forward(value_of(x), self.bias)
        return made_TO.split_with_sizes(self.widths, -1)


class ColumnLinear(_Weighted):
    """Each rank computes its share of the outputs from all inputs."""

    def __init__(self, in_dim: int, out_dim: int, build: Build, *, bias: bool = False) -> None:
        part = Part("", (out_dim, in_dim), build.mesh.tp.slice(out_dim, "outputs"), ALL)
        super().__init__((part,), build, bias=bias)

    def forward(self, x: Input) -> Tensor:
        return self.matrix.forward(value_of(x), self.bias)


class GroupedLinear(_Weighted):
    """Several products of the same inputs, of each of which a rank has its share. A checkpoint may store their rows in
    groups, a part of each product in every group."""

    def __init__(
        self,
        in_dim: int,
        widths: dict[str, tuple[int, slice]],
        groups: int,
        build: Build,
        *,
        bias: bool = False,
    ) -> None:
        """`widths`: by name, how many outputs the product has on all ranks, and which of them are this rank's."""
        parts = tuple(Part(name, (width, in_dim), mine, ALL) for name, (width, mine) in widths.items())
        super().__init__(parts, build, bias=bias)
        self.widths = [mine.stop - mine.start for _, mine in widths.values()]
        self.groups = groups

    def slots(self) -> dict[str, Slot]:
        return {name: replace(slot, head_rows=slot.shape[0] // self.groups) for name, slot in super().slots().items()}

    def forward(self, x: Input) -> list[Tensor]:
        return list(torch.split(self.whole(x), self.widths, -1))

    def whole(self, x: Input) -> Tensor:
        """The products side by side, [T, O]."""
        return self.matrix.forward(value_of(x), self.bias)


class HeadsLinear(_Weighted):
    """Each rank computes its heads' outputs from all inputs."""

    def __init__(
        self,
        in_dim: int,
        num_heads: int,
        head_dim: int,
        mine: slice,
        build: Build,
        *,
        part: str = "",
        bias: bool = False,
    ) -> None:
        """`part`: the name of its weights, where they are one of several parts in other layers."""
        rows = slice(mine.start * head_dim, mine.stop * head_dim)
        super().__init__((Part(part, (num_heads * head_dim, in_dim), rows, ALL),), build, bias=bias)
        self.head_dim = head_dim

    def slots(self) -> dict[str, Slot]:
        return {name: replace(slot, head_rows=self.head_dim) for name, slot in super().slots().items()}

    def forward(self, x: Input) -> Tensor:
        return self.matrix.forward(value_of(x), self.bias)


class RowLinear(_Weighted):
    """Each rank takes its share of the inputs; the results are summed over the ranks."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        build: Build,
        *,
        bias: bool = False,
        reduce: bool = True,
        axis: Axis | None = None,
        inputs: slice | None = None,
    ) -> None:
        """Without `reduce` a rank's own sum is returned, for a caller that adds more before it reduces. `axis`: the ranks
        that split it (default: those of `tp`), `inputs`: this rank's share."""
        split_by = build.mesh.tp if axis is None else axis
        part = Part("", (out_dim, in_dim), ALL, split_by.slice(in_dim, "inputs") if inputs is None else inputs)
        super().__init__((part,), build, bias=bias)
        self.axis = split_by
        self.reduce = reduce
        self.talk = split_by.talk if reduce and isinstance(split_by.talk, SumsWithNorm) else None
        """By which the sum over ranks may be made with the norm after it."""

    def forward(self, x_TF: Tensor) -> Product:
        """The product, which `Stream.add` may join with its addition."""
        return Product(self, x_TF)

    def product(self, x_TF: Tensor) -> Tensor:
        """[T, D]"""
        out_TD = self._part(x_TF)
        return self.axis.talk.all_reduce(out_TD) if self.reduce else out_TD

    def _part(self, x_TF: Tensor) -> Tensor:
        return self.matrix.forward(x_TF, self.bias if self.axis.rank == 0 else None)  # the sum holds it once

    def onto(self, x_TF: Tensor, stream_TD: Tensor) -> tuple[Tensor | Unsummed, Tensor | None]:
        """As `kernels.linear.linear_onto`: (what is added to the stream, perhaps in parts, and the stream), or (their sum,
        None). The stream may be overwritten."""
        if self.axis.size == 1 and self.bias is None:
            return self.matrix.onto(x_TF, stream_TD)
        if self.talk is not None:
            part_TD = self._part(x_TF)
            if part_TD.shape == stream_TD.shape and self.talk.takes_norm(part_TD):
                return Unsummed(part_TD, self.talk), stream_TD
            return self.talk.all_reduce(part_TD), stream_TD
        return self.product(x_TF), stream_TD


class QKVLinear(_Weighted):
    """Queries, keys and values of this rank's heads in one product.

    Where there are more ranks than key-value heads, neighbours hold the same one and split its queries.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        build: Build,
        *,
        v_dim: int | None = None,
        bias: bool = False,
        k_bias: bool = True,
        values_are_keys: bool = False,
    ) -> None:
        """`v_dim`: V, the width of a head's value, if it is not that of its key. `k_bias`: whether checkpoints have a
        bias of keys where there is one; otherwise it is zero. `values_are_keys`: there are no weights of values, which are
        the keys themselves, in the same memory."""
        heads, kv_heads, _ = build.mesh.heads.head_share(num_heads, num_kv_heads)
        v_dim = head_dim if v_dim is None else v_dim

        def part(name: str, count: int, mine: slice, width: int) -> Part:
            return Part(name, (count * width, hidden), slice(mine.start * width, mine.stop * width), ALL)

        parts = [part("q", num_heads, heads, head_dim), part("k", num_kv_heads, kv_heads, head_dim)]
        if not values_are_keys:
            parts.append(part("v", num_kv_heads, kv_heads, v_dim))
        super().__init__(tuple(parts), build, bias=bias)
        self.values_are_keys = values_are_keys
        self.k_bias = k_bias
        if self.bias is not None and not k_bias:
            self.bias.data.zero_()
        self.head_dim = head_dim
        self.v_dim = v_dim
        self.num_heads: int = heads.stop - heads.start
        self.num_kv_heads: int = kv_heads.stop - kv_heads.start
        self.width = self.num_heads * head_dim + self.num_kv_heads * (head_dim + (0 if values_are_keys else v_dim))
        """O: values of a token's product."""

    def slots(self) -> dict[str, Slot]:
        return {
            name: replace(slot, head_rows=self.v_dim if name.startswith("v.") else self.head_dim)
            for name, slot in super().slots().items()
            if self.k_bias or name != "k.bias"
        }

    def forward(self, x: Input, queries_at_L: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N, H], [T, K, H], [T, K, V]. With `queries_at_L` the queries are those of the tokens it names, [L, N, H]."""
        if queries_at_L is not None:
            x_TD = value_of(x)
            split = self.num_heads * self.head_dim
            q_LO = self._some_rows(x_TD.index_select(0, queries_at_L), slice(0, split))
            k_TKH, v_TKV = self._keys_and_values(self._some_rows(x_TD, slice(split, None)))
            return self._by_head(q_LO), k_TKH, v_TKV
        if isinstance(x, Normed) and x.can_fuse and isinstance(x.norm, RMSNorm):
            return self.heads(x.fuse(partial(self._after, x.norm)))
        return self.heads(self.product(value_of(x)))

    def product(self, x_TD: Tensor) -> Tensor:
        """[T, O]: queries, keys and values of each token, one after the other."""
        return self.matrix.forward(x_TD, self.bias)

    def queries(self, x: Input) -> Tensor:
        """[T, N, H]: of these inputs the queries alone."""
        return self._by_head(self._some_rows(value_of(x), slice(0, self.num_heads * self.head_dim)))

    def keys_and_values(self, x_MD: Tensor) -> tuple[Tensor, Tensor]:
        """[M, K, H], [M, K, V]: of these inputs all but the queries."""
        return self._keys_and_values(self._some_rows(x_MD, slice(self.num_heads * self.head_dim, None)))

    def heads(self, product_TO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N, H], [T, K, H], [T, K, V]: views of a product."""
        if self.values_are_keys:
            q_TNH, k_TKH = self._by_head(product_TO).split_with_sizes((self.num_heads, self.num_kv_heads), 1)
            return q_TNH, k_TKH, k_TKH
        if self.v_dim != self.head_dim:
            split = self.num_heads * self.head_dim
            return self._by_head(product_TO[:, :split]), *self._keys_and_values(product_TO[:, split:])
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_TNH, k_TKH, v_TKH = self._by_head(product_TO).split_with_sizes(counts, 1)
        return q_TNH, k_TKH, v_TKH

    def _by_head(self, product_TO: Tensor) -> Tensor:
        return product_TO.view(product_TO.shape[0], -1, self.head_dim)

    def _keys_and_values(self, product_TO: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K, H], [T, K, V]: views of a product without queries."""
        split = self.num_kv_heads * self.head_dim
        if self.values_are_keys:
            return self._by_head(product_TO), self._by_head(product_TO)
        v_TKV = product_TO[:, split:].view(product_TO.shape[0], -1, self.v_dim)
        return self._by_head(product_TO[:, :split]), v_TKV

    def _some_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        return self.matrix.some_rows(x_TD, rows, None if self.bias is None else self.bias[rows])


class GateUpLinear(_Weighted):
    """The gated half of a feed-forward block, activation included."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        build: Build,
        *,
        activation: Activation,
        bias: bool = False,
        gate_scale: float | None = None,
    ) -> None:
        """`gate_scale`: multiplies gates before their activation."""
        rows = build.mesh.tp.slice(intermediate, "inner units")
        shape = (intermediate, hidden)
        super().__init__((Part("gate", shape, rows, ALL), Part("up", shape, rows, ALL)), build, bias=bias)
        self.activation: Activation = activation
        self.gate_scale = gate_scale

    def forward(self, x: Input) -> Tensor:
        """activation(gate) * up -> [T, F]"""
        if self.gate_scale is None:
            return self.matrix.gated(value_of(x), self.activation, self.bias)
        both_T2F = self.matrix.forward(value_of(x), self.bias)
        both_T2F[:, : self.parts[0].num_rows] *= self.gate_scale
        return GATES[self.activation](both_T2F)

    def product(self, x_TD: Tensor) -> Tensor:
        """[T, 2F]: gate, then up."""
        return self.matrix.forward(x_TD, self.bias)


def _fill_rows(target: Tensor, rows: slice, stored: Stored) -> None:
    copy_into(target, stored, rows)
