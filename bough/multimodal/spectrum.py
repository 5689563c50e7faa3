"""Spectra of sound as Whisper has them: logarithms of energies in bands of the mel scale. Numpy only."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
_LINEAR_BELOW = 1000.0
"""Hertz: the scale of Slaney is linear up to here."""
_PER_MEL = 200.0 / 3
"""Hertz per mel of the linear part; above it the scale is logarithmic."""
_STEP = np.log(6.4) / 27.0
_DYNAMIC = 8.0
"""Powers of ten below the loudest band that still count."""


def log_mel(samples: F32, *, mels: int, rate: int, window: int, hop: int) -> F32:
    """[frames, mels] of one sound: a frame every `hop` samples."""
    shape = np.hanning(window + 1)[:-1]
    padded = np.pad(samples.astype(np.float64), window // 2, mode="reflect")
    count = len(samples) // hop
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop][:count]
    filters = _filters(mels, rate, window)
    bands = np.empty((count, mels))
    for start in range(0, count, 512):  # so that a long sound takes little memory
        spectrum = np.fft.rfft(frames[start : start + 512] * shape)
        bands[start : start + 512] = (spectrum.real**2 + spectrum.imag**2) @ filters
    logs = np.log10(np.maximum(bands, 1e-10))
    scaled: F32 = ((np.maximum(logs, logs.max() - _DYNAMIC) + 4.0) / 4.0).astype(np.float32)
    return scaled


@lru_cache(maxsize=4)
def _filters(mels: int, rate: int, window: int) -> npt.NDArray[np.float64]:
    """[frequencies, mels]: triangles of equal area."""
    frequencies = np.linspace(0, rate / 2, window // 2 + 1)
    corners = _hertz(np.linspace(0.0, _mel(rate / 2), mels + 2))
    widths = np.diff(corners)
    slopes = corners[None, :] - frequencies[:, None]
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    made: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (corners[2:] - corners[:-2]))
    return made


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_BELOW:
        return hertz / _PER_MEL
    return float(_LINEAR_BELOW / _PER_MEL + np.log(hertz / _LINEAR_BELOW) / _STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    first = _LINEAR_BELOW / _PER_MEL
    made: npt.NDArray[np.float64] = np.where(
        mels < first, mels * _PER_MEL, _LINEAR_BELOW * np.exp(_STEP * (np.maximum(mels, first) - first))
    )
    return made
