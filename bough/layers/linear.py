"""Linear layers over a mesh. T tokens, D width, N heads, K key-value heads, H width of a head, F inner width."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bough.core.errors import ConfigError
from bough.distributed.collectives import all_reduce
from bough.layers.build import Build
from bough.layers.norm import RMSNorm
from bough.quantization.scheme import Activation, Part
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into

ALL = slice(None)


class _Weighted(nn.Module):
    """A matrix of several parts, each cut to this rank's share, and a bias of the same rows."""

    def __init__(self, parts: tuple[Part, ...], build: Build, *, bias: bool) -> None:
        super().__init__()
        self.parts = parts
        self.matrix = build.scheme.matrix(parts, dtype=build.dtype, device=build.device)
        num_rows = sum(part.num_rows for part in parts)
        self.bias = None
        if bias:
            empty = torch.empty(num_rows, dtype=build.dtype, device=build.device)
            self.bias = nn.Parameter(empty, requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        slots = self.matrix.weight_slots()
        if self.bias is not None:
            start = 0
            for part in self.parts:
                target = self.bias[start : start + part.num_rows]
                slots[part.slot_name("bias")] = Slot(part.shape[:1], partial(_fill_rows, target, part.rows))
                start += part.num_rows
        return slots


class ReplicatedLinear(_Weighted):
    """Every rank holds all of it."""

    def __init__(self, in_dim: int, out_dim: int, build: Build, *, bias: bool = False) -> None:
        super().__init__((Part("", (out_dim, in_dim), ALL, ALL),), build, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.matrix.forward(x_TD, self.bias)


class ColumnLinear(_Weighted):
    """Each rank computes its share of the outputs from all inputs."""

    def __init__(self, in_dim: int, out_dim: int, build: Build, *, bias: bool = False) -> None:
        part = Part("", (out_dim, in_dim), build.mesh.slice(out_dim, "outputs"), ALL)
        super().__init__((part,), build, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.matrix.forward(x_TD, self.bias)


class RowLinear(_Weighted):
    """Each rank takes its share of the inputs; the results are summed over the mesh."""

    def __init__(self, in_dim: int, out_dim: int, build: Build, *, bias: bool = False, reduce: bool = True) -> None:
        """Without `reduce` a rank's own sum is returned, for a caller that adds more before it reduces."""
        part = Part("", (out_dim, in_dim), ALL, build.mesh.slice(in_dim, "inputs"))
        super().__init__((part,), build, bias=bias)
        self.mesh = build.mesh
        self.reduce = reduce

    def forward(self, x_TF: Tensor) -> Tensor:
        out_TD = self.matrix.forward(x_TF, self.bias if self.mesh.rank == 0 else None)  # the sum holds it once
        return all_reduce(out_TD, self.mesh) if self.reduce else out_TD

    def onto(self, x_TF: Tensor, stream_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """For `RMSNorm.add`: (what is added to the stream, perhaps in parts, and the stream), or (their sum, None).

        The stream may be overwritten.
        """
        if self.mesh.size == 1 and self.bias is None and not self._forward_hooks:  # who watches sees what is added
            return self.matrix.onto(x_TF, stream_TD)
        return self(x_TF), stream_TD


class QKVLinear(_Weighted):
    """Queries, keys and values of this rank's heads in one product.

    Where the mesh has more ranks than there are key-value heads, neighbours hold the same one.
    """

    def __init__(
        self, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, build: Build, *, bias: bool = False
    ) -> None:
        heads = build.mesh.slice(num_heads, "attention heads")
        kv_heads = _kv_slice(num_kv_heads, build)
        q_rows = slice(heads.start * head_dim, heads.stop * head_dim)
        kv_rows = slice(kv_heads.start * head_dim, kv_heads.stop * head_dim)
        kv_shape = (num_kv_heads * head_dim, hidden)
        super().__init__(
            (
                Part("q", (num_heads * head_dim, hidden), q_rows, ALL),
                Part("k", kv_shape, kv_rows, ALL),
                Part("v", kv_shape, kv_rows, ALL),
            ),
            build,
            bias=bias,
        )
        self.head_dim = head_dim
        self.num_heads: int = heads.stop - heads.start
        self.num_kv_heads: int = kv_heads.stop - kv_heads.start
        self.width = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        """O: values of a token's product."""

    def forward(self, x_TD: Tensor, queries_at_L: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N, H], [T, K, H], [T, K, H]. With `queries_at_L` the queries are those of the tokens it names, [L, N, H]."""
        if queries_at_L is None:
            return self.heads(self.product(x_TD))
        split = self.num_heads * self.head_dim
        q_LO = self._some_rows(x_TD.index_select(0, queries_at_L), slice(0, split))
        k_TKH, v_TKH = self._by_head(self._some_rows(x_TD, slice(split, None))).chunk(2, 1)
        return self._by_head(q_LO), k_TKH, v_TKH

    def after(
        self, norm: RMSNorm, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """(`forward` of the norm of x + residual, x + residual), which are as `norm.add` takes them."""
        if residual_TD is None or self._forward_hooks:  # who watches sees what is multiplied
            x_TD, residual_TD = norm.add(x_TD, residual_TD)
            return self(x_TD), residual_TD
        product_TO, residual_TD = self.matrix.after_norm(
            x_TD, residual_TD, norm.weight, norm.eps, norm.offset, self.bias
        )
        return self.heads(product_TO), residual_TD

    def product(self, x_TD: Tensor) -> Tensor:
        """[T, O]: queries, keys and values of each token, one after the other."""
        return self.matrix.forward(x_TD, self.bias)

    def heads(self, product_TO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, N, H], [T, K, H], [T, K, H]: views of a product."""
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_TNH, k_TKH, v_TKH = self._by_head(product_TO).split_with_sizes(counts, 1)
        return q_TNH, k_TKH, v_TKH

    def _by_head(self, product_TO: Tensor) -> Tensor:
        return product_TO.view(product_TO.shape[0], -1, self.head_dim)

    def _some_rows(self, x_TD: Tensor, rows: slice) -> Tensor:
        return self.matrix.some_rows(x_TD, rows, None if self.bias is None else self.bias[rows])


def kv_heads_per_rank(num_kv_heads: int, build: Build) -> int:
    """How many key-value heads this rank holds."""
    heads = _kv_slice(num_kv_heads, build)
    return int(heads.stop) - int(heads.start)


class GateUpLinear(_Weighted):
    """The gated half of a feed-forward block, activation included."""

    def __init__(
        self, hidden: int, intermediate: int, build: Build, *, activation: Activation, bias: bool = False
    ) -> None:
        rows = build.mesh.slice(intermediate, "inner units")
        shape = (intermediate, hidden)
        super().__init__((Part("gate", shape, rows, ALL), Part("up", shape, rows, ALL)), build, bias=bias)
        self.activation: Activation = activation

    def forward(self, x_TD: Tensor) -> Tensor:
        """activation(gate) * up -> [T, F]"""
        return self.matrix.gated(x_TD, self.activation, self.bias)


def _kv_slice(num_kv_heads: int, build: Build) -> slice:
    mesh = build.mesh
    if num_kv_heads >= mesh.size:
        return mesh.slice(num_kv_heads, "key-value heads")
    if mesh.size % num_kv_heads:
        raise ConfigError(
            what=f"{num_kv_heads} key-value heads can't be shared by {mesh.size} ranks",
            why=f"{mesh.size} is no multiple of {num_kv_heads}",
            fix="choose another --tp-size",
        )
    head = mesh.rank * num_kv_heads // mesh.size
    return slice(head, head + 1)


def _fill_rows(target: Tensor, rows: slice, stored: Stored) -> None:
    copy_into(target, stored, rows)
