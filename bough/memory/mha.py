"""KV tensors of ordinary attention: a page holds `page_size` tokens of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.kv import KvGroup
from bough.kernels.attention.inputs import AttentionSpec, IndexKeys
from bough.kernels.attention.spread_keys import hadamard
from bough.kernels.kv_codes import Ranges, code_width, decode, encode
from bough.kernels.pages import copy_pages
from bough.kernels.pages.reference import copy_pages as gather_pages
from bough.memory.transfer import upload

_TURNED_AT_ONCE = 4096
"""Tokens whose keys exist in float32 at the same time."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    latent: bool = False
    """Values are the first `v_dim` numbers of keys, and take no room of their own; keys are rotated behind them."""
    dtype: torch.dtype | None = None
    """None: the pool's."""
    index: IndexKeys | None = None
    """The key that tokens are chosen by; None: there is none."""

    @classmethod
    def of(cls, spec: AttentionSpec, dtype: torch.dtype | None = None) -> KVShape:
        """What a layer of attention keeps."""
        return cls(spec.num_kv_heads, spec.head_dim, spec.v_width, spec.latent, dtype, spec.index)

    @property
    def kept(self) -> int:
        """Numbers of a token."""
        chosen_by = 0 if self.index is None else self.index.dim
        return self.num_kv_heads * (self.k_dim if self.latent else self.k_dim + self.v_dim) + chosen_by


def _lines(groups: Sequence[KvGroup], num_layers: int) -> tuple[int, ...] | None:
    """By layer: its line; None: there is one line."""
    lines = [layers for group in groups for layers in group.layers]
    if len(lines) < 2:
        return None
    line_of = {layer: line for line, layers in enumerate(lines) for layer in layers}
    return tuple(line_of[layer] for layer in range(num_layers))


def are_chained(source_M: npt.NDArray[np.int32], target_M: npt.NDArray[np.int32]) -> bool:
    """Whether one copy reads a page that another writes: it was evicted for one row and is copied from for the next."""
    return not set(source_M.tolist()).isdisjoint(target_M.tolist())


@dataclass(frozen=True, slots=True)
class Turn:
    """By how much the pairs of keys turn."""

    angles_MR: Tensor
    """float32 [M, R / 2]: by token and pair."""
    interleaved: bool = False


class KVPool:
    """Keys and values of all layers, [pages, page size, kv heads, head width] each. Page 0 takes what padding writes.

    A page belongs to one line of `groups` at a time: the layers of different lines lie in the same memory, the first of each
    line in one place, and so on.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        k_scales: Sequence[float] = (),
        v_scales: Sequence[float] = (),
        groups: Sequence[KvGroup] = (),
        code_bits: int = 0,
    ) -> None:
        """`page_size`: tokens of a column. `k_scales`, `v_scales`: by layer, what keys and values are divided by before they
        are kept; empty: 1. `groups`: empty: one line. `code_bits`: of the codes that keys and values are kept as (see
        `kernels.kv_codes`); 0: they are kept in `dtype`."""
        if code_bits and any(shape.latent for shape in shapes):
            raise ValueError("latents are not kept in codes")
        self.code_bits = code_bits
        self.k_scales = list(k_scales)
        self.v_scales = list(v_scales)
        """Kernels and captured graphs hold them as constants: they must not change once a page has been written."""
        self.spreads = (
            {width: hadamard(width, device) for width in {shape.k_dim for shape in shapes}} if code_bits == 4 else {}
        )
        """By the width of keys: what they are multiplied by before they are kept (see `kernels.attention.spread_keys`)."""
        self.num_pages = num_pages
        self.dtype = torch.uint8 if code_bits else dtype
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.index: list[Tensor | None] = []
        """By layer: keys that tokens are chosen by, [pages, page size, 1, width]; None: it keeps none."""
        self.ranges: list[Ranges] = []
        """By layer, where keys and values are codes."""
        self.stores: list[Tensor] = []
        """The memory of keys, values and ranges, each once, by page."""
        self.page_sizes = tuple(page_size // group.parts for group in groups for _ in group.layers) or (page_size,)
        """By line: tokens of a page."""
        self.line_of = _lines(groups, len(shapes))
        """By layer; None: there is one line."""
        self._shapes = tuple(shapes)
        made: dict[tuple[int, int], list[Tensor]] = {}
        """By line and place in it, so that what aliases can be found."""
        for layer, shape in enumerate(shapes):
            line = 0 if self.line_of is None else self.line_of[layer]
            place = 0
            while (line, place) in made:
                place += 1
            below = next((made[other, place] for other in range(len(self.page_sizes)) if (other, place) in made), None)
            page = (num_pages, self.page_sizes[line], shape.num_kv_heads)
            widths = [shape.k_dim] if shape.latent else [shape.k_dim, shape.v_dim]
            planes: list[tuple[tuple[int, ...], torch.dtype]]
            if code_bits:
                planes = [((*page, code_width(width, code_bits)), torch.uint8) for width in widths]
                planes += [(page, torch.int32)] * 2
            else:
                planes = [((*page, width), shape.dtype or dtype) for width in widths]
            if shape.index is not None:
                planes.append(((*page[:2], 1, shape.index.dim), shape.dtype or dtype))
            kept = made[line, place] = [
                self._store(size, kind, device, None if below is None else below[plane])
                for plane, (size, kind) in enumerate(planes)
            ]
            self.keys.append(kept[0])
            self.values.append(kept[0][..., : shape.v_dim] if shape.latent else kept[1])
            self.index.append(None if shape.index is None else kept[-1])
            if code_bits:
                self.ranges.append(Ranges(kept[2], kept[3]))

    @property
    def page_size(self) -> int:
        """Tokens of a page of the first line."""
        return self.page_sizes[0]

    def _store(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, alias: Tensor | None) -> Tensor:
        """Memory of this shape, or that of `alias` seen in it."""
        if alias is None:
            made = _zeros(shape, dtype, device)
            self.stores.append(made)
            return made
        if math.prod(shape) != alias.numel() or dtype != alias.dtype:
            raise ValueError(f"pages of {tuple(alias.shape[1:])} and of {shape[1:]} don't have equal bytes")
        return alias.view(shape)

    def caches(self, layers: slice) -> list[Tensor]:
        """Everything that these layers keep, [pages, page size, ...] each."""
        values = [
            values for values, shape in zip(self.values[layers], self._shapes[layers], strict=True) if not shape.latent
        ]
        index = [each for each in self.index[layers] if each is not None]
        return [*self.keys[layers], *values, *index, *(each for pair in self.ranges[layers] for each in pair)]

    def copy_pages(self, source_M: npt.NDArray[np.int32], target_M: npt.NDArray[np.int32]) -> None:
        """Copies whole pages in every layer; all are read before any is written."""
        pages = upload(np.stack([source_M, target_M]).astype(np.int64), self.stores[0].device)
        copy = gather_pages if are_chained(source_M, target_M) else copy_pages
        copy(self.stores, pages[0], pages[1])

    def move_tokens(self, source_M: Tensor, target_M: Tensor, turns: Sequence[Turn | None]) -> None:
        """Copies single tokens (`page * page_size + offset`) in every layer; all are read before any is written. For pools
        with one line.

        `turns` says, for each layer, how keys turn; None: not at all.
        """
        for layer, (shape, keys, values, turn) in enumerate(
            zip(self._shapes, self.keys, self.values, turns, strict=True)
        ):
            if self.code_bits:
                self._move_codes(layer, source_M, target_M, turn)
                continue
            if not shape.latent:
                flat = _indexable(values.flatten(0, 1))
                flat[target_M] = flat[source_M]
            _move(keys, source_M, target_M, turn, shape.v_dim if shape.latent else 0)
            index = self.index[layer]
            if index is not None and shape.index is not None:
                other = None if turn is None else Turn(turn.angles_MR, shape.index.interleaved)
                _move(index, source_M, target_M, other, 0)

    def _move_codes(self, layer: int, source_M: Tensor, target_M: Tensor, turn: Turn | None) -> None:
        """`move_tokens` in a layer of codes. Keys that turn are opened and encoded anew."""
        ranges, keys = self.ranges[layer], self.keys[layer].flatten(0, 1)
        for plane in (self.values[layer], *(ranges if turn is None else ranges[1:])):
            flat = plane.flatten(0, 1)
            flat[target_M] = flat[source_M]
        codes_MKH = keys[source_M]
        if turn is None:
            keys[target_M] = codes_MKH
            return
        k_ranges = ranges.keys.flatten(0, 1)
        ranges_MK = k_ranges[source_M]
        for begin in range(0, len(codes_MKH), _TURNED_AT_ONCE):
            piece = slice(begin, begin + _TURNED_AT_ONCE)
            width = self._shapes[layer].k_dim
            spread = self.spreads.get(width)
            turned = decode(codes_MKH[piece], ranges_MK[piece], width)
            turned = turned if spread is None else turned @ spread
            turn_pairs(turned, turn.angles_MR[piece], turn.interleaved)
            turned = turned if spread is None else turned @ spread
            codes_MKH[piece], ranges_MK[piece] = encode(turned, self.code_bits)
        keys[target_M], k_ranges[target_M] = codes_MKH, ranges_MK


def _move(keys: Tensor, source_M: Tensor, target_M: Tensor, turn: Turn | None, first: int) -> None:
    """Copies the keys of single tokens, turned from their number `first` on."""
    flat = _indexable(keys.flatten(0, 1))
    moved_MKH = flat[source_M]
    if turn is not None:
        for begin in range(0, len(moved_MKH), _TURNED_AT_ONCE):
            piece = slice(begin, begin + _TURNED_AT_ONCE)
            turned = moved_MKH[piece].view(keys.dtype)[..., first:]
            turn_pairs(turned, turn.angles_MR[piece], turn.interleaved)
    flat[target_M] = moved_MKH


def turn_pairs(k_MKH: Tensor, angles_MR: Tensor, interleaved: bool = False) -> None:
    """Turns the pairs of each key, in place: (2i, 2i + 1) if `interleaved`, else (i, i + R / 2)."""
    half = angles_MR.shape[1]
    cos, sin = angles_MR.cos().unsqueeze(1), angles_MR.sin().unsqueeze(1)
    rotated = k_MKH[..., : 2 * half].float()
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    most = torch.finfo(k_MKH.dtype).max
    k_MKH[..., : 2 * half] = turned.clamp_(-most, most).to(k_MKH.dtype)


def _indexable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where its type can't be indexed."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU as fresh pages of the operating system, which take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
