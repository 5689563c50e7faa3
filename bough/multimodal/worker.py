"""The process that decodes media and cuts them to what a tower takes: `python -m bough.multimodal.worker FD`. It may run out
of memory, hang or crash; it is ended then, and nothing else notices. It imports neither torch nor transformers."""

from __future__ import annotations

import ctypes
import io
import os
import resource
import signal
import socket
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from bough.ipc.features import write_features
from bough.multimodal.embeds import FORM, bad_embeddings, read_embeddings
from bough.multimodal.errors import MediaError, MediaUnsupported
from bough.multimodal.families import processor_of
from bough.multimodal.film import Film, StillFilm, open_film
from bough.multimodal.processor import ItemShape, PlaceholderRun, Processed, Processor, VideoInfo
from bough.multimodal.sound import read_sound
from bough.multimodal.work import (
    MediaResult,
    MediaWorkerStart,
    Stills,
    UnencodedPixels,
    Work,
    receive,
    receive_bytes,
    send,
)

_PR_SET_PDEATHSIG = 1
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")


def main(descriptor: int) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    start, _ = receive(sock, MediaWorkerStart)
    processor = processor_of(start.config)
    assert processor is not None, "workers are started for models that take media"
    Image.init()
    Image.MAX_IMAGE_PIXELS = start.max_pixels
    _limit_memory(start.memory_bytes)
    send(sock, MediaResult())
    while True:
        try:
            work, _ = receive(sock, Work)
            data = receive_bytes(sock, work.num_bytes)
        except EOFError:
            return 0
        _limit_time(start.cpu_s)
        done, features = _answer(processor, work, data, start)
        del data
        send(sock, done, features)
        if features >= 0:
            os.close(features)


def _answer(processor: Processor, work: Work, data: bytes, start: MediaWorkerStart) -> tuple[MediaResult, int]:
    """What to say, and the descriptor of the features (-1: there are none)."""
    try:
        array, items, notes = _prepare(processor, work, data, start)
        dtype: Any = array.dtype.name
        processed = Processed(dtype=dtype, shape=array.shape, items=items, notes=notes)
        return MediaResult(processed=processed), write_features(array, work.digest)
    except MediaError as error:
        return MediaResult(error=error.what, why=error.why, fix=error.fix, code=error.code or ""), -1
    except MemoryError:
        return MediaResult(
            error="this medium takes too much memory", fix="send a smaller one", code="media_too_large"
        ), -1


Features = tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]


def _prepare(processor: Processor, work: Work, data: bytes, start: MediaWorkerStart) -> Features:
    if work.form == FORM:
        return _embedded(processor, data)
    if work.kind == "image":
        array, items = processor.image(_decode(data) if work.raw is None else _raw(data, work.raw), work.options)
        return array, items, ()
    if work.kind == "audio":
        rules = processor.sound
        if work.decode_only:
            return read_sound(data, work.form, rules.rate, start.max_audio_s), (), ()
        array, items = processor.audio(read_sound(data, work.form, rules.rate, rules.seconds), work.options)
        return array, items, ()
    if work.stills is not None:
        film, indices = _stills(data, work.stills, work.raw), list(work.stills.indices)
    else:
        film = open_film(data, work.form, start.max_pixels)
        indices = thinned(processor.sample(film.info, work.options), start.max_frames)
    return processor.video(film.info, indices, film.frames(indices), work.options)


def _embedded(processor: Processor, data: bytes) -> Features:
    """Embeddings that stand for an image, if one could have them."""
    values, grid = read_embeddings(data)
    item = processor.embedded(len(values), grid)
    placed = processor.pieces("image", Processed(dtype="float32", shape=values.shape, items=(item,)))
    if sum(piece.count for piece in placed if isinstance(piece, PlaceholderRun)) != len(values):
        raise bad_embeddings("images of this model have another number of positions")
    return values, (item,), ()


def thinned(indices: list[int], most: int) -> list[int]:
    """At most `most` of the indices, at even distances."""
    if len(indices) <= most:
        return indices
    return [indices[at] for at in np.linspace(0, len(indices) - 1, most).round().astype(int)]


def _stills(data: bytes, stills: Stills, raw: UnencodedPixels | None) -> Film:
    """Frames as images of one size: that of the first."""
    images: list[Image.Image] = []
    start = 0
    for size in stills.sizes:
        piece = data[start : start + size]
        image = _decode(piece) if raw is None else _raw(piece, raw)
        images.append(image if not images or image.size == images[0].size else image.resize(images[0].size))
        start += size
    width, height = images[0].size
    return StillFilm(images, VideoInfo(total=stills.total, fps=stills.fps, width=width, height=height))


def _decode(data: bytes) -> Image.Image:
    """The first frame, upright, in RGB."""
    try:
        return _in_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data), formats=_FORMATS)))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise anything
        raise MediaUnsupported(
            what="this picture can't be decoded", why="its file is broken", fix="save it again"
        ) from error


def _raw(data: bytes, raw: UnencodedPixels) -> Image.Image:
    return _in_rgb(Image.frombytes(raw.mode, (raw.width, raw.height), data))


def _in_rgb(image: Image.Image) -> Image.Image:
    """Transparent pixels lie on white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _limit_memory(extra_bytes: int) -> None:
    """Address space, from now on: what there is, and `extra_bytes` more. No file, no process, no core dump."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra_bytes, now + extra_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (extra_bytes, extra_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    """The processor's time for the next medium; the kernel ends the process beyond it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    most = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
