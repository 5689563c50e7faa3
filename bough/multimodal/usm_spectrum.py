"""Spectra of sound as the Universal Speech Model hears them: logarithms of magnitudes in bands of the mel scale. Numpy only,
in the precision that the model was trained with."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bough.config.usm import UsmSpectrum
from bough.multimodal.spectrum import F32

_AT_ONCE = 512
"""Frames: a long sound takes little memory."""


def usm_spectrum(facts: UsmSpectrum, samples: F32) -> F32:
    """[frames, mels] of one sound, float32."""
    if facts.scale != 1.0:
        samples = samples * np.float32(facts.scale)
    count = facts.frames(len(samples))
    cut = np.lib.stride_tricks.sliding_window_view(samples, facts.window + 1)[:: facts.hop][:count]
    shape = (0.5 * (1 - np.cos(2 * np.pi * np.arange(facts.window, dtype=np.float32) / facts.window))).astype(
        np.float32
    )
    filters = _filters(facts)
    made = np.empty((count, facts.mels), np.float32)
    for start in range(0, count, _AT_ONCE):
        frames = _emphasised(facts, cut[start : start + _AT_ONCE]) * shape
        bands = np.abs(np.fft.rfft(frames, n=facts.fft, axis=-1)) @ filters
        logs = np.log(np.maximum(bands, facts.floor))
        if facts.mean:
            logs = logs - np.array(facts.mean)
        if facts.std:
            logs = logs / np.array(facts.std)
        made[start : start + _AT_ONCE] = logs
    return made


def _emphasised(facts: UsmSpectrum, cut: F32) -> F32:
    """Frames, of which each has one sample more than the window."""
    part = np.float32(facts.preemphasis)
    if part <= 0:
        return cut[:, :-1]
    if not facts.htk:
        return cut[:, 1:] - part * cut[:, :-1]
    first = cut[:, :1] * np.float32(1.0 - facts.preemphasis)
    return np.concatenate((first, cut[:, 1:-1] - part * cut[:, :-2]), axis=1)


@lru_cache(maxsize=4)
def _filters(facts: UsmSpectrum) -> npt.NDArray[np.float64]:
    """[frequencies, mels]: triangles of equal height."""
    frequencies = np.arange(facts.fft // 2 + 1, dtype=np.float32) * (facts.rate / facts.fft)
    corners = _hertz(np.linspace(_mel(facts.low), _mel(facts.high), facts.mels + 2))
    widths = np.diff(corners)
    slopes = corners[None, :] - frequencies[:, None]
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    made: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return made


def _mel(hertz: float) -> float:
    """HTK's scale."""
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    made: npt.NDArray[np.float64] = 700.0 * (10 ** (mels / 2595.0) - 1.0)
    return made
