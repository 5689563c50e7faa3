"""A checkpoint cut for the ranks of one layout by `bough shard`: what its manifest says, and which engines may read it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from bough.config.concerns import ParallelConfig
from bough.config.hosts import local_ranks
from bough.config.layout import Layout
from bough.core.errors import ConfigError

MANIFEST: Final = "bough_shards.json"
VERSION: Final = 1


class ShardedTensor(Struct):
    """A tensor of the original checkpoint."""

    kind: str
    shape: tuple[int, ...]
    nbytes: int


class Shards(Struct, frozen=True):
    """The manifest: how the checkpoint was cut."""

    layout: dict[str, int]
    """Fields of `Layout` that are sizes."""
    slots: tuple[tuple[int, ...], ...] | None
    """Experts by slot and layer, where --init-expert-location has moved them."""
    tensors: dict[str, ShardedTensor]
    stage_sizes: tuple[int, ...] = ()
    """As in `Layout`."""
    consolidated: bool = False
    """Tensors have the names of Mistral's own layout."""
    version: int = VERSION

    @property
    def num_ranks(self) -> int:
        return self.layout["pp"] * self.layout["tp"]

    def files(self, path: Path) -> tuple[Path, ...]:
        """The file of each rank."""
        return tuple(path / rank_file(rank, self.num_ranks) for rank in range(self.num_ranks))


def rank_file(rank: int, num_ranks: int) -> str:
    return f"rank-{rank:05}-of-{num_ranks:05}.safetensors"


def layout_fields(layout: Layout) -> dict[str, int]:
    return {name: int(value) for name, value in asdict(layout).items() if name != "stage_sizes"}


def read_manifest(path: Path) -> Shards | None:
    """The manifest of a directory; None: it is an ordinary checkpoint. Raises `ConfigError` if it can't be read."""
    file = path / MANIFEST
    if not file.exists():
        return None
    try:
        shards = msgspec.json.decode(file.read_bytes(), type=Shards)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(what=f"{file} can't be read", why=str(error), fix="run `bough shard` again") from error
    if shards.version != VERSION or not {"pp", "tp"} <= shards.layout.keys():
        raise ConfigError(
            what=f"{path} was cut by another version of bough",
            why=f"its format is {shards.version}, this version reads {VERSION}",
            fix="run `bough shard` again",
        )
    return shards


def check_shards(
    shards: Shards, path: Path, parallel: ParallelConfig, slots: tuple[tuple[int, ...], ...] | None
) -> None:
    """Raises `ConfigError` if an engine of this layout can't read the shards, or a file of this machine's ranks is missing.
    `slots`: where the engine's experts are at the start."""
    layout = Layout.of(parallel)
    wanted = layout_fields(layout)
    if shards.layout == wanted and shards.stage_sizes != layout.stage_sizes:
        raise ConfigError(
            what=f"{path} was cut for other stages",
            why=f"--pp-layer-partition was {','.join(map(str, shards.stage_sizes)) or 'not given'}",
            fix="start with that, or run `bough shard` again",
        )
    if shards.layout != wanted:
        differ = [name for name in wanted if shards.layout.get(name) != wanted[name]]
        raise ConfigError(
            what=f"{path} was cut for other ranks",
            why=", ".join(f"{_FLAGS[name]} was {shards.layout.get(name)}, now it is {wanted[name]}" for name in differ),
            fix=f"start with {_flags(shards.layout)}, or run `bough shard` again",
        )
    if shards.slots != slots:
        raise ConfigError(
            what=f"{path} was cut for experts at other places",
            why="--init-expert-location is another one",
            fix="start with the location that `bough shard` had, or run it again",
        )
    files = shards.files(path)
    missing = [files[rank].name for rank in local_ranks(parallel) if not files[rank].exists()]
    if missing:
        raise ConfigError(
            what=f"{path} lacks {', '.join(missing)}",
            why="each rank reads a file of its own",
            fix="copy what `bough shard` has written for the ranks of this machine",
        )


_FLAGS: Final = {
    "pp": "--pp-size",
    "tp": "--tp-size",
    "dp": "--attn-dp-size",
    "cp": "--attn-cp-size",
    "ep": "--ep-size",
    "redundant": "--ep-num-redundant-experts",
    "whole_shared": "--moe-a2a-backend (0: none, 1: another)",
}


def _flags(layout: dict[str, int]) -> str:
    said = [
        f"{_FLAGS[name]} {value}"
        for name, value in layout.items()
        if name in _FLAGS and name != "whole_shared" and value != int(name not in ("redundant",))
    ]
    if layout.get("whole_shared"):
        said.append("--moe-a2a-backend allgather or alltoall")
    return " ".join(said) or "one rank"
