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

import numpy.typing as npt
from PIL import Image, ImageOps

from bough.ipc.features import write_features
from bough.multimodal.errors import MediaError, MediaUnsupported
from bough.multimodal.families import processor_of
from bough.multimodal.processor import ItemShape, Processed, Processor
from bough.multimodal.work import Done, Raw, Start, Work, receive, receive_bytes, send

_PR_SET_PDEATHSIG = 1
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")


def main(descriptor: int) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    start, _ = receive(sock, Start)
    processor = processor_of(start.config)
    assert processor is not None, "workers are started for models that take media"
    Image.init()
    Image.MAX_IMAGE_PIXELS = start.max_pixels
    _limit_memory(start.memory_bytes)
    send(sock, Done())
    while True:
        try:
            work, _ = receive(sock, Work)
            data = receive_bytes(sock, work.num_bytes)
        except EOFError:
            return 0
        _limit_time(start.cpu_s)
        done, features = _answer(processor, work, data)
        del data
        send(sock, done, features)
        if features >= 0:
            os.close(features)


def _answer(processor: Processor, work: Work, data: bytes) -> tuple[Done, int]:
    """What to say, and the descriptor of the features (-1: there are none)."""
    try:
        array, items = _prepare(processor, work, data)
        dtype: Any = array.dtype.name
        processed = Processed(dtype=dtype, shape=array.shape, items=items)
        return Done(processed=processed), write_features(array, work.digest)
    except MediaError as error:
        return Done(error=error.what, why=error.why, fix=error.fix, code=error.code or ""), -1
    except MemoryError:
        return Done(error="this picture takes too much memory", fix="send a smaller one", code="media_too_large"), -1


def _prepare(processor: Processor, work: Work, data: bytes) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
    image = _decode(data) if work.raw is None else _raw(data, work.raw)
    return processor.image(image, work.options)


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


def _raw(data: bytes, raw: Raw) -> Image.Image:
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
