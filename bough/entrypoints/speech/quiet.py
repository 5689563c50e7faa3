"""Splits long audio for models that take it in pieces: at the quietest point near the end of each piece."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_LOOK_BACK_S = 5.0
"""Seconds before the end of a piece in which a quiet point is searched."""
_FRAME_S = 0.02


def quiet_pieces(samples: npt.NDArray[np.float32], rate: int, most_s: float) -> list[npt.NDArray[np.float32]]:
    """The audio in consecutive pieces of at most `most_s` seconds."""
    most, back, frame = int(most_s * rate), int(min(_LOOK_BACK_S, most_s / 2) * rate), max(1, int(_FRAME_S * rate))
    pieces, at = [], 0
    while len(samples) - at > most:
        tail = samples[at + most - back : at + most]
        count = len(tail) // frame
        loudness = np.square(tail[: count * frame].reshape(count, frame)).mean(1)
        end = at + most - back + int(loudness.argmin()) * frame + frame // 2
        pieces.append(samples[at:end])
        at = end
    pieces.append(samples[at:])
    return pieces
