"""Writes a quantised checkpoint: tensors pass one at a time, and go to files of a few GiB."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from bough.compress.targets import Target, packed_ints
from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError
from bough.kernels.packed_linear import Codes
from bough.tokenizer.gguf import save_gguf_tokenizer
from bough.weights.mapping import Mapping as Names
from bough.weights.stored import Stored, is_packed, read_all

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KEPT: Final = re.compile(
    r"(^|\.)(embed\w*|lm_head|\w*norm\w*|gate|router|shared_expert_gate|wte|wpe|score|classifier)\.weight$"
)
"""Embeddings, output heads, norms and routers: small, or what answers depend on most."""
_FILE_BYTES: Final = 4 << 30
Tell = Callable[[str], None]


def check_source(source: Checkpoint, out: Path) -> None:
    """Raises `ConfigError` if the source is not a model in floats or in GGUF's blocks, or `out` is there already."""
    if source.kind == "config-only" or source.quantization or source.shards is not None:
        why = "it has no weights" if source.kind == "config-only" else "its weights are quantised already"
        raise ConfigError(
            what=f"{source.name} can't be quantised",
            why="it was cut into files of single ranks" if source.shards is not None else why,
            fix="name a model with safetensors in float32, float16 or bfloat16, or a GGUF file",
        )
    if out.exists():
        raise ConfigError(
            what=f"{out} is there already", why="nothing is overwritten", fix="name a directory that does not exist yet"
        )


class Selection:
    """Which tensors of a checkpoint are quantised."""

    def __init__(self, target: Target, group: int, names: Names | None) -> None:
        """`names` are the model's; None: it is known by the names of its tensors alone."""
        self.target = target
        self.group = group
        self._names = names

    def has(self, name: str, stored: Stored) -> bool:
        return self.is_linear(name, stored) and self.target.fits(stored.shape, self.group)

    def is_linear(self, name: str, stored: Stored) -> bool:
        """Whether it is a projection of a block, stored outputs first."""
        if not is_matrix(name, stored) or _KEPT.search(name):
            return False
        if self._names is None:
            return True
        slots = self._names.targets_of(name) or ()
        return not self._names.has_inputs_first(name) and any(slot.startswith("layers.") for slot in slots)


def is_matrix(name: str, stored: Stored) -> bool:
    return name.endswith(".weight") and len(stored.shape) == 2 and (stored.kind in _DTYPES or is_packed(stored))


def write_quantised(
    source: Checkpoint,
    tensors: Mapping[str, Stored],
    made: Mapping[str, Codes],
    out: Path,
    selection: Selection,
    tell: Tell,
) -> None:
    """Fills the new directory `out` with a checkpoint that `bough serve` and others read. `made`: tensors whose codes are
    known already; others are rounded to the nearest."""
    target, group = selection.target, selection.group
    out.mkdir(parents=True)
    files = _Files(out, tell)
    kept: list[str] = []
    for name, stored in tensors.items():
        layer = name.removesuffix(".weight")
        if name in made:
            files.add({f"{layer}.{last}": value for last, value in packed_ints(made[name]).items()})
        elif selection.has(name, stored):
            files.add({f"{layer}.{last}": value for last, value in target.store(read_all(stored), group).items()})
        else:
            files.add({name: _plain(stored)})
            kept += [layer] if is_matrix(name, stored) else []
    files.close()
    _copy_others(source, out)
    config = {**source.config, "quantization_config": target.config(group, sorted(set(kept)))}
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _plain(stored: Stored) -> Tensor:
    """In the type that it is stored in, also if it was replaced by floats of another; float16 of GGUF's blocks."""
    value = read_all(stored)
    return value.half() if is_packed(stored) else value.to(_DTYPES.get(stored.kind, value.dtype))


class _Files:
    """Takes tensors, and writes a file whenever there are enough of them."""

    def __init__(self, out: Path, tell: Tell) -> None:
        self._out = out
        self._tell = tell
        self._held: dict[str, Tensor] = {}
        self._bytes = 0
        self._written: list[list[str]] = []

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._held |= {name: value.contiguous().cpu() for name, value in tensors.items()}
        self._bytes += sum(value.numel() * value.element_size() for value in tensors.values())
        if self._bytes >= _FILE_BYTES:
            self._write()

    def _write(self) -> None:
        save_file(self._held, self._out / f"{len(self._written)}.part", {"format": "pt"})
        self._written.append(list(self._held))
        self._held, self._bytes = {}, 0
        self._tell(f"{len(self._written)} files written")

    def close(self) -> None:
        """Names the files, once it is known how many there are."""
        if self._held or not self._written:
            self._write()
        count = len(self._written)
        where: dict[str, str] = {}
        for place, names in enumerate(self._written):
            file = "model.safetensors" if count == 1 else f"model-{place + 1:05}-of-{count:05}.safetensors"
            (self._out / f"{place}.part").rename(self._out / file)
            where |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {}, "weight_map": where}
            (self._out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _copy_others(source: Checkpoint, out: Path) -> None:
    """The tokenizer and whatever else belongs to the model, but no weights."""
    if source.kind == "gguf":
        (out / "generation_config.json").write_text(json.dumps(source.generation_config, indent=2))
        save_gguf_tokenizer(source.gguf[0].metadata, out)
        return
    for path in source.path.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".gguf") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copy2(path, out / path.name)


def largest_group(sizes: list[int], most: int = 128) -> int:
    """The largest group of columns, up to `most`, that divides all of these widths; at least 32."""
    return max(32, math.gcd(most, *sizes)) if sizes else most
