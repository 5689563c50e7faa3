"""The way through real processes, on a device that is only a clock."""

from __future__ import annotations

import pytest

from bough.bench.hops import batch, lone


def test_the_hops_of_lone_requests_add_up() -> None:
    """The medians do, unless the machine stalls in another hop each time."""

    def add_up() -> bool:
        result = lone(6, 64, 0.001, 3.0, 0.5)
        spread = result["us"]
        assert spread["device"]["min"] >= 3000
        assert spread["overhead"]["min"] > 0
        whole = sum(spread[name]["median"] for name in spread if name != "overhead") - 3000
        return bool(whole == pytest.approx(spread["overhead"]["median"], rel=0.9, abs=3000))

    assert any(add_up() for _ in range(5))


def test_the_times_of_a_batch_are_in_order() -> None:
    times = batch(96, 512, 2.0, 0.0)["ms"]
    assert 0 < times["until the first step is launched"] < times["until all are answered"]
    assert times["until the engine has all"] < times["until all are answered"]
    assert times["of that on the device"] <= times["until all are answered"]
