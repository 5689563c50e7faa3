"""Sounds as workers decode them: one channel of float32 at a rate. WAV files of that rate need nothing, all others PyAV."""

from __future__ import annotations

import io
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bough.multimodal.errors import MediaTooLarge, MediaUnsupported

F32 = npt.NDArray[np.float32]
SOUND_KINDS: Final = {
    b"ID3": "mp3", b"\xff\xfb": "mp3", b"\xff\xf3": "mp3", b"\xff\xf2": "mp3", b"fLaC": "flac", b"OggS": "ogg",
    b"\x1a\x45\xdf\xa3": "matroska",
}  # fmt: skip
"""First bytes of files."""
_DEMUXERS: Final = {
    "wav": "wav", "mp3": "mp3", "flac": "flac", "ogg": "ogg", "matroska": "matroska,webm", "mp4": "mov,mp4,m4a,3gp,3g2,mj2",
}  # fmt: skip
_FORMATS: Final = {(1, 8): "u1", (1, 16): "<i2", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}
"""(tag, bits) of what WAV files hold."""


def sniff_sound(data: bytes) -> str | None:
    """The kind of a file by its first bytes; None: none of ours."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[4:8] == b"ftyp":
        return "mp4"
    return next((kind for magic, kind in SOUND_KINDS.items() if data.startswith(magic)), None)


def read_sound(data: bytes, kind: str, rate: int, most_seconds: float) -> F32:
    """Raises `MediaError` if it can't be decoded, is empty or too long."""
    samples = _wav(data, rate) if kind == "wav" else None
    if samples is None:
        try:
            samples = _decoded(data, kind, rate, most_seconds)
        except (MediaUnsupported, MediaTooLarge, MemoryError):
            raise
        except Exception as error:  # decoders raise anything
            raise _broken() from error
    if not len(samples):
        raise _broken()
    if len(samples) > most_seconds * rate:
        raise MediaTooLarge(
            what=f"this sound has {len(samples) / rate:.1f} s",
            why=f"the model takes at most {most_seconds:g} s",
            fix="send a shorter one, or several",
        )
    return samples


def wav_bytes(samples: F32, rate: int) -> bytes:
    """A WAV file of one channel."""
    body = np.ascontiguousarray(samples, "<f4").tobytes()
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(body), b"WAVE", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32,
                       b"data", len(body))  # fmt: skip
    return head + body


def _wav(data: bytes, rate: int) -> F32 | None:
    """The samples of a WAV file; None: PyAV must read it, because of its rate or what it holds."""
    at, form = 12, None
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"fmt " and size >= 16 and at + 24 <= len(data):
            form = struct.unpack_from("<HHIIHH", data, at + 8)
        elif name == b"data" and form is not None:
            tag, channels, found, _, _, bits = form
            kind = _FORMATS.get((tag, bits))
            if kind is None or found != rate or not 1 <= channels <= 8:
                return None
            body = data[at + 8 : at + 8 + size]
            body = body[: len(body) // (channels * bits // 8) * (channels * bits // 8)]
            values = np.frombuffer(body, kind).reshape(-1, channels).astype(np.float32).mean(1)
            if tag == 3:
                return np.asarray(np.nan_to_num(values), np.float32)
            scaled = (values - 128) / 128 if bits == 8 else values / 2 ** (bits - 1)
            return np.asarray(scaled, np.float32)
        at += 8 + size + (size & 1)
    raise _broken()


def _decoded(data: bytes, kind: str, rate: int, most_seconds: float) -> F32:
    try:
        import av
    except ImportError as error:
        raise MediaUnsupported(
            what="this server decodes no such sound",
            why=f"PyAV is not installed: without it, WAV files of {rate:,} samples a second are taken",
            fix="install bough[video], or convert the sound",
        ) from error
    library: Any = av
    resampler = library.AudioResampler(format="flt", layout="mono", rate=rate)
    parts: list[F32] = []
    total = 0
    options = {"protocol_whitelist": "file"}
    with library.open(io.BytesIO(data), format=_DEMUXERS[kind], options=options) as container:
        for frame in container.decode(audio=0):
            for made in resampler.resample(frame):
                parts.append(made.to_ndarray().reshape(-1).astype(np.float32))
                total += len(parts[-1])
            if total > most_seconds * rate + rate:
                break  # which is too long
        for made in resampler.resample(None):
            parts.append(made.to_ndarray().reshape(-1).astype(np.float32))
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _broken() -> MediaUnsupported:
    return MediaUnsupported(what="this sound can't be decoded", why="its file is broken or empty", fix="save it again")
