"""Numbers that come out of NumPy are as good as Python's, and an error's text is whole in a traceback."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.errors import InvalidRequest
from bough.core.sampling import SamplingParams
from bough.engine_client import parse_sampling


def test_numpy_numbers() -> None:
    given = {
        "max_new_tokens": np.int64(7), "n": np.uint8(2), "top_k": np.float32(3), "temperature": np.float32(0.5),
        "stop_token_ids": [np.int32(4)], "logit_bias": {np.int64(3): np.float16(1.5)},
    }  # fmt: skip
    plain = SamplingParams(
        max_new_tokens=7, n=2, top_k=3, temperature=0.5, stop_token_ids=(4,), logit_bias={3: 1.5}
    )  # fmt: skip
    params = parse_sampling(given).params
    assert params == plain
    assert {type(params.max_new_tokens), type(params.top_k), type(params.temperature)} == {int, float}


@pytest.mark.parametrize("wrong", [np.float64(1.5), np.nan, np.inf, np.True_, np.array([2]), 1j, "2"])
def test_what_is_no_whole_number(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens is"):
        parse_sampling({"max_new_tokens": wrong})


def test_tracebacks_say_what_why_and_what_to_do() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_sampling({"temperature": -1})
    assert str(caught.value) == caught.value.sentence()
    assert "between" in str(caught.value)
