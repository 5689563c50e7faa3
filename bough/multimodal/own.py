"""Media that a program in this process has: images in memory and files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bough.config.concerns import MediaConfig
from bough.core.errors import InvalidRequest
from bough.multimodal.desk import Frames, RawPixels
from bough.multimodal.local import read_file
from bough.multimodal.sound import wav_bytes
from bough.multimodal.work import UnencodedPixels

SOUND_RATE = 16_000
"""Samples a second of sounds that are arrays."""
_MODES = frozenset({"RGB", "RGBA", "L", "LA"})


def own_media(given: Any, config: MediaConfig) -> Any:
    """What the program names, with images, arrays and paths as what any request may hold. Lists are looked into."""
    if isinstance(given, list | tuple):
        return [own_media(each, config) for each in given]
    if isinstance(given, Path):
        return _file(given, config)
    if isinstance(given, str) and not given.startswith(("data:", "http:", "https:", "file:")):
        path = Path(given[:4096]).expanduser()
        return _file(path, config) if len(given) <= 4096 and _is_file(path) else given
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind == "f":
        return wav_bytes(given.astype(np.float32), SOUND_RATE)
    if isinstance(given, np.ndarray):
        return _array(given) if given.ndim != 4 else Frames(images=tuple(_array(frame) for frame in given))
    if isinstance(given, dict) and "frames" in given:
        return {**given, "frames": own_media(list(given["frames"]), config)}
    if hasattr(given, "tobytes") and hasattr(given, "getbands"):  # a PIL image: Pillow need not be imported for this
        image = given if given.mode in _MODES else given.convert("RGB")
        return RawPixels(UnencodedPixels(image.width, image.height, image.mode), image.tobytes())
    return given


def _array(pixels: np.ndarray[Any, Any]) -> RawPixels:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise InvalidRequest(
            what=f"an image is an array of {pixels.dtype} with shape {list(pixels.shape)}",
            why="it must be uint8, height x width x 3 or 4",
            fix="convert it, or pass a PIL image",
            param="image_data",
        )
    height, width, bands = pixels.shape
    return RawPixels(
        UnencodedPixels(width, height, "RGB" if bands == 3 else "RGBA"), np.ascontiguousarray(pixels).tobytes()
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _file(path: Path, config: MediaConfig) -> bytes:
    try:
        return read_file(path, config.max_media_bytes)
    except OSError as error:
        raise InvalidRequest(
            what=f"can't read {str(path)[:200]!r}", why=error.strerror or type(error).__name__, param="image_data"
        ) from error
