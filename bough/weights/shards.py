"""Checkpoints cut for the ranks of one layout: each rank has a file with the parts of tensors that it reads.

To a model a tensor keeps its whole shape; reading what a rank's file does not hold is an error. So whatever is checked and
done while loading stays the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bough.config.sharded import Shards, rank_file
from bough.core.errors import WeightsError
from bough.weights.stored import ITEM_BYTES, Stored, read_part

_PIECES: Final = "pieces"
Box = tuple[tuple[int, int], ...]
"""Part of a tensor: begin and end along each dimension."""


@dataclass(slots=True)
class TracedReads:
    """What was read of a checkpoint, by tensor."""

    boxes: dict[str, list[Box]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def note(self, name: str, box: Box) -> None:
        with self._lock:
            self.boxes.setdefault(name, []).append(box)

    def pieces(self) -> dict[str, list[Box]]:
        """The same without repetition: what lies in another part is left out, parts that lie side by side or overlap along
        one dimension are joined."""
        return {name: _joined(boxes) for name, boxes in sorted(self.boxes.items())}

    def num_bytes(self, tensors: Mapping[str, Stored]) -> int:
        """Of all pieces."""
        return sum(
            _volume(box) * ITEM_BYTES[tensors[name].kind] for name, boxes in self.pieces().items() for box in boxes
        )


@dataclass(frozen=True, slots=True)
class Noted:
    """A tensor that notes what is read of it."""

    base: Stored
    reads: TracedReads

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def kind(self) -> str:
        return self.base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def read(self, start: int, stop: int) -> Tensor:
        return self.read_part(start, stop)

    def read_part(self, start: int, stop: int, *inner: slice) -> Tensor:
        self.reads.note(self.name, _box(self.shape, start, stop, inner))
        return read_part(self.base, start, stop, *inner) if inner else self.base.read(start, stop)

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: blocks are not cut into shards")


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """A tensor of which a rank's file holds some parts."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Box], ...]
    """Each with its name in the file."""
    file: Any
    path: Path

    def read(self, start: int, stop: int) -> Tensor:
        return self.read_part(start, stop)

    def read_part(self, start: int, stop: int, *inner: slice) -> Tensor:
        wanted = _box(self.shape, start, stop, inner)
        if not wanted:
            if not self.pieces:
                raise self._absent(wanted)
            found: Tensor = self.file.get_tensor(self.pieces[0][0])
            return found
        parts: list[Tensor] = []
        at = wanted[0][0]
        while at < wanted[0][1] or not parts:
            rest = ((at, wanted[0][1]), *wanted[1:])
            key, box = self._holding(rest)
            end = min(wanted[0][1], box[0][1])
            cut = ((at, end), *wanted[1:])
            slices = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(cut, box, strict=True))
            parts.append(self.file.get_slice(key)[slices])
            if end == at:
                break
            at = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _holding(self, wanted: Box) -> tuple[str, Box]:
        """The piece that holds the first rows of a part."""
        begin, end = wanted[0]
        for key, box in self.pieces:
            within = all(low <= a and b <= high for (a, b), (low, high) in zip(wanted[1:], box[1:], strict=True))
            if within and box[0][0] <= begin and (begin < box[0][1] or begin == end <= box[0][1]):
                return key, box
        raise self._absent(wanted)

    def _absent(self, wanted: Box) -> WeightsError:
        what = ", ".join(f"{begin}:{end}" for begin, end in wanted)
        return WeightsError(
            what=f"{self.path.name} does not hold {self.name}[{what}]",
            why="it was cut for an engine that reads other parts of the checkpoint",
            fix="run `bough shard` with the flags of this engine, or serve the checkpoint that was cut",
        )

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: shards hold no GGUF blocks")


@contextmanager
def open_shards(shards: Shards, path: Path, rank: int) -> Iterator[dict[str, Stored]]:
    """All tensors of the checkpoint that was cut; what rank `rank` holds of them can be read inside the `with`."""
    file_path = path / rank_file(rank, shards.num_ranks)
    with ExitStack() as stack:
        held: dict[str, list[tuple[str, Box]]] = {}
        try:
            file = stack.enter_context(safe_open(file_path, framework="pt"))
            for key, (name, box) in json.loads((file.metadata() or {})[_PIECES]).items():
                held.setdefault(name, []).append((key, tuple((begin, end) for begin, end in box)))
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise WeightsError(
                what=f"{file_path} can't be read", why=str(error).splitlines()[0], fix="run `bough shard` again"
            ) from error
        yield {
            name: ShardTensor(name, given.kind, given.shape, tuple(held.get(name, ())), file, file_path)
            for name, given in shards.tensors.items()
        }


def write_shard(path: Path, tensors: Mapping[str, Stored], pieces: Mapping[str, list[Box]]) -> int:
    """Writes the parts of tensors to a file, one at a time, and returns its bytes."""
    header: dict[str, Any] = {}
    where: dict[str, tuple[str, Box]] = {}
    at = 0
    for name, boxes in pieces.items():
        for box in boxes:
            stored, key = tensors[name], str(len(where))
            nbytes = _volume(box) * ITEM_BYTES[stored.kind]
            shape = [end - begin for begin, end in box]
            header[key] = {"dtype": stored.kind, "shape": shape, "data_offsets": [at, at + nbytes]}
            where[key] = (name, box)
            at += nbytes
    header["__metadata__"] = {"format": "pt", _PIECES: json.dumps(where)}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, box in where.values():
            part = _read_box(tensors[name], box).contiguous()
            file.write(part.reshape(-1).view(torch.uint8).numpy().data)
        return file.tell()


def _read_box(stored: Stored, box: Box) -> Tensor:
    if not box:
        return stored.read(0, 1)
    return read_part(stored, *box[0], *(slice(begin, end) for begin, end in box[1:]))


def _box(shape: tuple[int, ...], start: int, stop: int, inner: tuple[slice, ...]) -> Box:
    if not shape:
        return ()
    wanted = (*inner, *[slice(None)] * (len(shape) - 1 - len(inner)))
    rest = [each.indices(extent)[:2] for each, extent in zip(wanted, shape[1:], strict=True)]
    return ((start, stop), *rest)


def _volume(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def _joined(boxes: Iterable[Box]) -> list[Box]:
    found = sorted(set(boxes))
    for dim in range(len(found[0])):
        joined: list[Box] = []
        for box in sorted(found, key=lambda each: (each[:dim], each[dim + 1 :], each[dim])):
            last = joined[-1] if joined else None
            alike = last is not None and (last[:dim], last[dim + 1 :]) == (box[:dim], box[dim + 1 :])
            if last is not None and alike and box[dim][0] <= last[dim][1]:
                joined[-1] = (*box[:dim], (last[dim][0], max(last[dim][1], box[dim][1])), *box[dim + 1 :])
            else:
                joined.append(box)
        found = joined
    return sorted(each for each in found if not any(other != each and _within(each, other) for other in found))


def _within(box: Box, other: Box) -> bool:
    return all(low <= begin and end <= high for (begin, end), (low, high) in zip(box, other, strict=True))
