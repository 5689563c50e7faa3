"""How many of an answer's tokens are reasoning."""

from __future__ import annotations

import numpy as np

from bough.core.step import I32


def reasoning_of(output: I32, mark: tuple[int, ...], *, opened: bool) -> tuple[int, int]:
    """The tokens before the `mark` that ends the reasoning, and those of the mark (0: it is not there, or not whole).

    Without the mark all tokens are reasoning if the answer began inside (`opened`), else none as far as ids can tell.
    """
    for at in np.flatnonzero(output == mark[0]).tolist() if mark else ():
        if tuple(output[at : at + len(mark)].tolist()) == mark:
            return int(at), len(mark)
    return (len(output) if mark and opened else 0), 0
