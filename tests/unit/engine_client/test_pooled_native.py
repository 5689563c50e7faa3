from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.core.errors import InvalidRequest
from bough.engine_client.pooled_native import native_inputs


@pytest.mark.parametrize(
    ("ids", "inputs", "single"),
    [
        ([1, 2], [[1, 2]], True),
        (np.arange(2), [[0, 1]], True),
        ([[1], (2, 3)], [[1], [2, 3]], False),
        (np.zeros((2, 1), np.int32), [[0], [0]], False),
    ],
)
def test_ids_of_one_text_or_many(ids: Any, inputs: list[list[int]], single: bool) -> None:
    assert native_inputs(None, ids) == (inputs, single)


@pytest.mark.parametrize("ids", [[], "abc", 5, [[1], 2], [1.5], np.array(5), [[1], np.array(5)], np.empty((0, 3))])
def test_what_are_no_lists_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="input_ids"):
        native_inputs(None, ids)
