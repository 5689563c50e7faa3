"""Texts to calibrate and to compare models on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.compress.open_model import OpenModel
from bough.core.errors import ConfigError
from bough.kernels.attention.whole import WholeAttention, whole_inputs
from bough.layers.batch import Batch, Model

Ids = list[int]
_AT_ONCE = 256
"""Tokens whose logits are held at a time."""


def built_in_text() -> str:
    """English prose and code that every Python has: the topics of its documentation. Raises `ConfigError` where they are
    missing."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            what="there is no text to calibrate on",
            why="this Python comes without the topics of its documentation",
            fix="name a text file by --calibration",
            param="calibration",
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def cut_text(ids: Sequence[int], count: int, length: int) -> list[Ids]:
    """Up to `count` runs of `length` tokens, evenly spread over a text; all of it if that is shorter than one."""
    if len(ids) <= length:
        return [list(ids)] if len(ids) > 1 else []
    count = max(1, min(count, len(ids) // length))
    step = (len(ids) - length) / max(1, count - 1)
    return [list(ids[int(at * step) : int(at * step) + length]) for at in range(count)]


def whole_batch(ids: Ids, device: torch.device) -> Batch:
    """A text as a step of its own, that leaves nothing behind; all its logits are wanted."""
    length = len(ids)
    inputs = whole_inputs(np.array([length], dtype=np.int32), device)
    positions = torch.arange(length, device=device)
    return Batch(torch.tensor(ids, device=device), positions, WholeAttention(inputs), num_tokens=length)


@dataclass(frozen=True, slots=True)
class Likeness:
    """How well a model knows texts, and how far it is from another one."""

    perplexity: float
    divergence: float
    """Mean over the tokens of KL(exact || this), in nats."""


class Judge:
    """Compares models with an exact one on the same texts. Keeps the exact one's last hidden states and its head."""

    def __init__(self, exact: OpenModel, texts: Sequence[Ids]) -> None:
        self._texts = list(texts)
        self._head = exact.model.head
        with torch.no_grad():
            self._hidden = [exact.model.forward(whole_batch(ids, exact.device)) for ids in self._texts]

    @torch.no_grad()
    def exact(self) -> Likeness:
        """Of the exact model itself."""
        return self._judge(self._head, self._hidden)

    @torch.no_grad()
    def of(self, model: Model, device: torch.device) -> Likeness:
        return self._judge(model.logits, [model.forward(whole_batch(ids, device)) for ids in self._texts])

    def _judge(self, logits_of: Callable[[Tensor], Tensor], hidden: Sequence[Tensor]) -> Likeness:
        loss = divergence = 0.0
        count = 0
        for ids, ours, theirs in zip(self._texts, hidden, self._hidden, strict=True):
            wanted = torch.tensor(ids[1:], device=ours.device)
            for at in range(0, len(ids) - 1, _AT_ONCE):
                end = min(at + _AT_ONCE, len(ids) - 1)
                found = logits_of(ours[at:end]).float().log_softmax(-1)
                exact = self._head(theirs[at:end]).float().log_softmax(-1)
                loss -= float(found.gather(1, wanted[at:end, None]).sum())
                divergence += float((exact.exp() * (exact - found)).sum())
            count += len(ids) - 1
        return Likeness(math.exp(loss / count), divergence / count)
