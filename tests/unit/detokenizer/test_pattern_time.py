"""Stop patterns may search for a while; how long the machine stands still meanwhile does not count."""

from __future__ import annotations

import time

from bough.detokenizer.stops import StopPatterns


class OnABusyMachine(StopPatterns):
    """Each search waits for a processor first."""

    def _first_match(self) -> tuple[int, int, str] | None:
        time.sleep(0.8)
        return super()._first_match()


def test_time_that_the_machine_takes_is_not_the_patterns() -> None:
    stops = OnABusyMachine(("[0-9]{3}",))
    assert "".join(stops.feed(piece).text for piece in ("one ", "12 two ", "three ")) == "one 12 two three "
    found = stops.feed("is 456 or so")
    assert (found.text, found.matched) == ("is ", "[0-9]{3}")
