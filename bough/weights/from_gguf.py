"""Tensors of GGUF files, under the names the safetensors checkpoint of the same model would give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.config.fields import Fields
from bough.config.gguf_header import BLOCK_SIZES
from bough.config.hf import Checkpoint
from bough.core.errors import UnsupportedModel
from bough.kernels import packed_linear
from bough.weights.gguf_names import IN_CONFIG, hf_name, is_interleaved, norms_include_one
from bough.weights.stored import AsRow, Item, Reordered, Shifted, Stored, is_packed

_DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a mapped file. The mapping lives as long as its blocks are referenced."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    """The tensor's bytes, one dimension."""

    def read(self, start: int, stop: int) -> Tensor:
        rows = self._rows(start, stop)
        if self.kind in _DTYPES:
            return torch.from_numpy(rows).view(_DTYPES[self.kind]).view(stop - start, *self.shape[1:])
        return dequantise(self.kind, rows, self.shape[-1]).view(stop - start, *self.shape[1:])

    def blocks(self, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self._rows(start, stop).reshape(stop - start, -1))

    def _rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        row_bytes = len(self.data) // self.shape[0]
        return self.data[start * row_bytes : stop * row_bytes]


def dequantise(kind: str, blocks: npt.NDArray[np.uint8], num_cols: int) -> Tensor:
    """Blocks of whole rows, -> float32 [rows, num_cols]. Common kinds go through our kernels, the rest through gguf's."""
    per_block, block_bytes = BLOCK_SIZES[kind]
    rows = blocks.reshape(-1, num_cols // per_block * block_bytes)
    if packed_linear.supported(kind):
        return packed_linear.dequantise(packed_linear.pack(kind, torch.from_numpy(rows), num_cols))
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        weights: Any = dequantize(rows, GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise UnsupportedModel(what=f"GGUF weights of type {kind} can't be read", fix="use another file") from error
    return torch.from_numpy(np.ascontiguousarray(weights, dtype=np.float32))


def open_gguf(checkpoint: Checkpoint) -> dict[str, Stored]:
    """All tensors by their Hugging Face names, with what llama.cpp's converter did to them undone."""
    config, architecture = Fields(checkpoint.config), checkpoint.architecture
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default=num_heads)
    arch = str(checkpoint.gguf[0].metadata["general.architecture"])
    tensors: dict[str, Stored] = {}
    for path, header in zip(checkpoint.files, checkpoint.gguf, strict=True):
        bytes_ = np.memmap(path, np.uint8, mode="c")  # never written; "c" is what torch takes without a warning
        for name, info in header.tensors.items():
            if name in IN_CONFIG:
                continue
            data = bytes_[info.offset : info.offset + info.nbytes].view(np.ndarray)
            raw: Stored = GgufTensor(name, info.kind, info.shape, data)
            if info.kind not in _DTYPES and not is_packed(raw):
                raise UnsupportedModel(what=f"GGUF tensor {name} has the type {info.kind}, which no weight has")
            if is_interleaved(arch, name):
                heads = num_heads if ".attn_q." in name else num_kv_heads
                raw = Reordered(raw, _halves_from_pairs(info.shape[0], heads))
            if norms_include_one(arch, name):
                raw = Shifted(raw, -1.0)
            if name.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1:
                raw = AsRow(raw)
            target = hf_name(name, architecture)
            if "#" in target:
                tensors |= {target.replace("#", str(index)): Item(raw, index) for index in range(info.shape[0])}
            else:
                tensors[target] = raw
    return tensors


def _halves_from_pairs(num_rows: int, num_heads: int) -> Tensor:
    """The row order that turns heads rotated in neighbouring pairs into heads rotated in halves."""
    head_dim = num_rows // num_heads
    pairs = torch.arange(num_rows).view(num_heads, head_dim // 2, 2)
    return pairs.transpose(1, 2).reshape(-1)
