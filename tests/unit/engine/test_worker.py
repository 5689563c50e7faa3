"""Rank 0 and another: the same steps and masks, also where one of them fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bough.core.step import Step
from bough.engine.loop import EngineBroken
from bough.engine.worker import BroadcastRunner, Masks, RunStep, Stop, run_worker


class Launches:
    """A runner whose launches note their masks."""

    def __init__(self) -> None:
        self.sampled: dict[int, int] = {}
        self.fails = ""

    def launch(self, step: Any) -> Any:
        if self.fails == "launch":
            raise RuntimeError("no luck")

        def sample(masks: Any) -> None:
            if self.fails == "sample":
                raise RuntimeError("no luck")
            self.sampled[step.index] = int(masks[0, 0])

        return SimpleNamespace(step=step, needs_masks=True, sample=sample, wait=lambda: None)

    def clear(self) -> None: ...


class Sent(list[Any]):
    """A way to another rank that keeps what goes there."""

    send = list.append


def step(index: int) -> Step:
    none = np.empty(0, np.int32)
    return Step(
        index=index, num_decodes=0, slots=none, num_query=none, context=none, samples=none.astype(np.bool_), tokens=none,
        table_at=none.astype(np.int64), table_pages=none,
    )  # fmt: skip


def mask(number: int) -> Any:
    return np.full((1, 1), number, np.int32)


@pytest.mark.parametrize("fails", ["launch", "sample"])
def test_ranks_that_are_apart_do_not_go_on(fails: str) -> None:
    local, sent = Launches(), Sent()
    runner = BroadcastRunner(local, sent)
    runner.launch(step(0)).sample(mask(5))
    local.fails = fails
    with pytest.raises(EngineBroken, match="one of several ranks"):
        runner.launch(step(1)).sample(mask(6))
    assert [type(each) for each in sent][:3] == [RunStep, Masks, RunStep]


def test_masks_find_their_step() -> None:
    """Rank 0 could not work out the masks of a step: those of the next are not taken for them."""
    local, other, sent = Launches(), Launches(), Sent()
    runner = BroadcastRunner(local, sent)
    runner.launch(step(0)).sample(mask(5))
    runner.launch(step(1))
    runner.launch(step(2)).sample(mask(7))
    runner.stop()
    inbox = SimpleNamespace(closed=False, drain=lambda block_s: sent)
    run_worker(inbox, other)  # type: ignore[arg-type]
    assert isinstance(sent[-1], Stop)
    assert other.sampled == local.sampled == {0: 5, 2: 7}
