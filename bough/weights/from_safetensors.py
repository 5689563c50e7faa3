"""Tensors of safetensors files, mapped into memory and read slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bough.core.errors import WeightsError
from bough.weights.stored import Stored


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor of an open file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Any

    def read(self, start: int, stop: int) -> Tensor:
        part: Tensor = self.file.get_slice(self.name)[start:stop] if self.shape else self.file.get_tensor(self.name)
        return part

    def read_part(self, start: int, stop: int, *inner: slice) -> Tensor:
        part: Tensor = self.file.get_slice(self.name)[(slice(start, stop), *inner)]
        return part

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name}: safetensors hold no GGUF blocks")


@contextmanager
def open_safetensors(paths: tuple[Path, ...]) -> Iterator[dict[str, Stored]]:
    """All tensors of all files by name, readable inside the `with`."""
    tensors: dict[str, Stored] = {}
    with ExitStack() as stack:
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    what=f"{path} can't be read", why=str(error).splitlines()[0], fix="download it again"
                ) from error
            for name in file.keys():  # noqa: SIM118
                if name in tensors:
                    raise WeightsError(what=f"tensor {name} is in two files", why=f"the second is {path}")
                part = file.get_slice(name)
                tensors[name] = SafeTensor(name, part.get_dtype(), tuple(part.get_shape()), file)
        yield tensors
