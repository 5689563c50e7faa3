"""Similarity and label scores."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bough.config.pooling_facts import ScoreScale

Floats: TypeAlias = npt.NDArray[np.float32]


def shortened(values: Floats, dimensions: int, normalised: bool) -> Floats:
    """The first values of an embedding, normalised again if it was normalised."""
    cut: Floats = values[:dimensions]
    length = float(np.linalg.norm(cut))
    return (cut / length).astype(np.float32) if normalised and length > 0 else cut


def scaled(logits: Floats, scale: ScoreScale) -> Floats:
    """Scores of logits."""
    match scale:
        case "identity":
            return logits
        case "sigmoid":
            out: Floats = (1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
            return out
        case "softmax":
            return probabilities(logits.astype(np.float64)).astype(np.float32)


def cosine(first: Floats, second: Floats) -> float:
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(np.dot(first, second)) / lengths if lengths else 0.0


def as_weights(pairs: Floats) -> dict[int, float]:
    """Sparse pairs (ids, then values) as a dict."""
    ids, values = np.split(pairs, 2)
    return dict(zip(ids.astype(np.int64).tolist(), values.tolist(), strict=True))


def sparse_dot(first: Floats, second: Floats) -> float:
    mine, theirs = as_weights(first), as_weights(second)
    return sum(weight * theirs.get(token, 0.0) for token, weight in mine.items())


def probabilities(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    powers: npt.NDArray[np.float64] = np.exp(logits - logits.max())
    powers /= powers.sum()
    return powers
