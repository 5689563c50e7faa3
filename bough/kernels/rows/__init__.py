"""Rows of tables, or of activations, by number.

in: numbers and one or several tables. out: copies of the rows, a tensor for each table. never: numbers outside a table.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def take_rows(at_T: Tensor, *tables: Tensor) -> list[Tensor]:
    """[T, width] of each table [rows, width]: the rows `at_T`, which are whole numbers."""
    made: list[Tensor] = _IMPLEMENTATIONS.pick("take_rows", at_T.device)(at_T, *tables)
    return made
