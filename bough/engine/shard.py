"""Cuts a checkpoint into a file for each rank of an engine, which holds what that rank reads and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from bough.config.layout import Layout
from bough.config.sharded import MANIFEST, ShardedTensor, Shards, layout_fields, rank_file
from bough.core.errors import ConfigError
from bough.distributed.collectives import ALONE
from bough.distributed.mesh import make_mesh
from bough.engine.decide import Decided
from bough.engine.dtypes import DTYPES
from bough.engine.expert_plan import plan_experts
from bough.layers.spread import TokenSpread
from bough.models.load import reads_of
from bough.quantization.names import kv_scale_of
from bough.weights.load import open_tensors
from bough.weights.shards import write_shard


def shard_checkpoint(decided: Decided, out: Path, tell: Callable[[str], None]) -> list[int]:
    """Writes the directory `out`, and returns the bytes of each rank's file. `tell` hears of each that is written.

    Raises `ConfigError` if `out` exists, or if the model can't be cut.
    """
    _check(decided, out)
    checkpoint, facts, config = decided.checkpoint, decided.facts, decided.resolved.config
    layout = Layout.of(config.parallel)
    experts = plan_experts(config.parallel, facts)
    sizes: list[int] = []
    out.mkdir(parents=True)
    with open_tensors(checkpoint) as tensors:
        for rank in range(layout.size):
            mesh = make_mesh(layout, rank, lambda axis, ranks, place: ALONE)
            reads = reads_of(
                checkpoint,
                tensors,
                dtype=DTYPES[config.model.dtype],
                quantization=config.model.quantization,
                mesh=mesh,
                experts_plan=experts,
                spread=TokenSpread(mesh) if mesh.tokens.size > 1 else None,
            )
            for name, stored in tensors.items():
                if kv_scale_of(name) is not None:  # every rank reads those of all layers
                    reads.note(name, tuple((0, extent) for extent in stored.shape))
            name = rank_file(rank, layout.size)
            sizes.append(write_shard(out / name, tensors, reads.pieces()))
            tell(name)
    shards = Shards(
        layout=layout_fields(layout),
        slots=experts.slots,
        stage_sizes=layout.stage_sizes,
        tensors={name: ShardedTensor(of.kind, of.shape, of.nbytes) for name, of in checkpoint.tensors.items()},
        consolidated=checkpoint.is_consolidated,
    )
    _copy_others(checkpoint.path, out)
    (out / MANIFEST).write_bytes(msgspec.json.encode(shards))  # last: without it the directory is no checkpoint
    return sizes


def _check(decided: Decided, out: Path) -> None:
    checkpoint, facts = decided.checkpoint, decided.facts
    why = ""
    if checkpoint.kind != "safetensors":
        why = f"it is a {checkpoint.kind} checkpoint; only safetensors are cut"
    elif checkpoint.shards is not None:
        why = "it has been cut already"
    elif facts.through_transformers:
        why = "it runs through transformers' own modules"
    elif decided.pooling is not None:
        why = "models that pool are not cut"
    elif Layout.of(decided.resolved.config.parallel).size == 1:
        why = "one rank reads all of it"
    if why:
        raise ConfigError(
            what=f"{checkpoint.name} can't be cut into shards",
            why=why,
            fix="name a checkpoint in safetensors, and say for which ranks: --tp-size, --pp-size, --ep-size",
        )
    if out.exists():
        raise ConfigError(
            what=f"{out} is there already", why="nothing is overwritten", fix="name a directory that does not exist yet"
        )


def _copy_others(source: Path, out: Path) -> None:
    """The configuration, the tokenizer and whatever else belongs to the model, but no weights."""
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or path.name.endswith(".index.json")
        if path.is_file() and not weights:
            shutil.copy2(path, out / path.name)
