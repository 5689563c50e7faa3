"""Embeddings that a client has computed before, in place of an image: a safetensors file, read with every size checked.

The file has `embeddings` [positions, width] in F32, F16 or BF16, what the model's tower gives, and for families whose images
have shapes of their own `grid`, an integer vector with the image's patches (height and width, or 1, height and width).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from bough.multimodal.errors import MediaUnsupported

FORM: Final = "safetensors"
"""As `Work.form`."""
_FLOATS: Final = {"F32": np.float32, "F16": np.float16}
_INTEGERS: Final = {"I64": np.int64, "I32": np.int32}
_MOST_AXES: Final = 3


def read_embeddings(data: bytes) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    """[positions, width], and the grid (empty: the file has none). Raises `MediaUnsupported`."""
    try:
        tensors: dict[str, dict[str, Any]] = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, TypeError) as error:
        raise bad_embeddings("they are no safetensors file") from error
    extra = sorted(tensors.keys() - {"embeddings", "grid"})
    if "embeddings" not in tensors or extra:
        named = f"has {extra[0][:40]!r}" if extra else "has no 'embeddings'"
        raise bad_embeddings(f"the file {named}; it must have 'embeddings', and may have 'grid'")
    return _embeddings(tensors["embeddings"]), _grid(tensors["grid"]) if "grid" in tensors else ()


def _embeddings(stored: dict[str, Any]) -> npt.NDArray[np.float32]:
    dtype, shape = stored["dtype"], tuple(stored["shape"])
    if len(shape) != 2 or not all(shape):
        raise bad_embeddings(f"embeddings have the shape {list(shape)}, not [positions, width]")
    raw = bytes(stored["data"])
    if dtype == "BF16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype in _FLOATS:
        values = np.frombuffer(raw, _FLOATS[dtype]).astype(np.float32)
    else:
        raise bad_embeddings(f"embeddings are {dtype}, not F32, F16 or BF16")
    if not np.isfinite(values).all():
        raise bad_embeddings("some embeddings are not finite")
    return values.reshape(shape)


def _grid(stored: dict[str, Any]) -> tuple[int, ...]:
    dtype, shape = stored["dtype"], tuple(stored["shape"])
    if dtype not in _INTEGERS or len(shape) != 1 or not 0 < shape[0] <= _MOST_AXES:
        raise bad_embeddings(
            f"grid is {dtype} {list(shape)}, not a vector of I64 or I32 with at most {_MOST_AXES} values"
        )
    found = tuple(int(each) for each in np.frombuffer(bytes(stored["data"]), _INTEGERS[dtype]))
    if any(not 0 < each <= 1 << 20 for each in found):
        raise bad_embeddings(f"grid is {list(found)}")
    return found


def bad_embeddings(why: str) -> MediaUnsupported:
    """The error of embeddings that are not those of an image of the served model."""
    return MediaUnsupported(
        what="these embeddings can't be used", why=why, fix="send what the model's tower gives, as safetensors"
    )


def embedded_grid(count: int, grid: tuple[int, ...], merge: int) -> tuple[int, int, int]:
    """The grid of an image of which embeddings were sent, for families with a position for every `merge x merge` patches.
    Raises `MediaError` if no image has it."""
    h, w = grid[-2:] if len(grid) == 2 or (len(grid) == 3 and grid[0] == 1) else (0, 0)
    if not h or h % merge or w % merge or h * w != count * merge**2:
        raise bad_embeddings(
            f"{count} positions and grid {list(grid)} are no image: it has a position for every {merge} x {merge} patches, "
            "and grid is [height, width] in patches"
        )
    return (1, h, w)
