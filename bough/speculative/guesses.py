"""What a proposer that looks at tokens alone has to say about a row."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from bough.core.step import I32
from bough.speculative.acceptance import F64


class Guess(NamedTuple):
    """Tokens that may follow."""

    tokens: I32
    kind: int
    """How much it rests on: guesses of a kind are right about as often."""


NO_GUESS = Guess(np.empty(0, np.int32), 0)


class Guesser(Protocol):
    """Guesses how texts go on, from tokens that it has seen. Answers of `guess` depend on its arguments and on the texts
    that were added."""

    @property
    def most(self) -> int:
        """Longest guess."""
        ...

    @property
    def prior(self) -> F64:
        """By kind: how often the first token is right, as long as nothing is known."""
        ...

    def guess(self, text: I32, namespace: str) -> Guess:
        """How a text goes on; without tokens if it has no idea."""
        ...

    def add(self, text: I32, num_prompt: int, namespace: str) -> None:
        """A request has ended: its prompt and its output."""
        ...
