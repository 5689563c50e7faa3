"""A runner whose device takes a set time and draws tokens at random among those allowed: for timing the host beside it.

Steps are packed as for a real device; only what the device does is a matter of waiting. Forward passes and samplings are
queued one behind the other, as on a stream.
"""

from __future__ import annotations

import time

import numpy as np

from bough.core.step import I32, Mask, Outcome, RunnerLimits, Step
from bough.runner.inputs import Packer, Sizes, StepLayout
from bough.sampler.state import SlotParams

_TRIES = 64
"""Tokens tried at random before all that a mask allows are listed."""
_SPIN_S = 0.0005
"""Sleeping is not exact: the last of it is spent looking at the clock."""


class PacedLaunched:
    """A step on the paced device."""

    def __init__(self, runner: PacedRunner, step: Step) -> None:
        self.step = step
        self.needs_masks = len(step.constrained) > 0
        self.ready_s = 0.0
        """When the device will be through with it."""
        self._runner = runner
        self._masks: Mask | None = None

    def sample(self, masks: Mask) -> None:
        self._masks = masks
        self.needs_masks = False
        self._runner.queue_sampling(self)

    def wait(self) -> Outcome:
        tokens = self._runner.draw(self.step, self._masks)
        _sleep_until(self.ready_s)
        self._runner.arrived_s = time.perf_counter()
        return Outcome(tokens=tokens, counts=self.step.samples.astype(np.int32))


class PacedRunner:
    """A `core.step.Runner` that computes nothing."""

    def __init__(self, limits: RunnerLimits, *, forward_s: float, queueing_s: float = 0.0) -> None:
        """`forward_s`: the device's time for a step; `queueing_s`: the host's, to hand it over, beside packing it."""
        self.limits = limits
        self.idle_s = 0.0
        """How long the device has had nothing to do, since the first step."""
        self.chain_s = 0.0
        """From the arrival of tokens to the queueing of the sampling that their masks are for, in all."""
        self.arrived_s = 0.0
        """When the last tokens came."""
        self._forward_s = forward_s
        self._queueing_s = queueing_s
        self._free_s = 0.0
        self._packer = Packer(limits.num_slots, limits.pages_per_slot, limits.layout)
        self._params = SlotParams(limits.num_slots, limits.vocab_size)
        self._dice = np.random.default_rng(0)

    def launch(self, step: Step) -> PacedLaunched:
        for setup in step.setups:
            self._params.fill(setup)
        samples = self._params.gather(step)
        layout = StepLayout(Sizes(step.num_tokens, max(step.num_rows, 1), samples.count, writes=len(step.table_at)))
        self._packer.pack(step, samples, layout, np.empty(layout.num_bytes, np.uint8))
        launched = PacedLaunched(self, step)
        self._queue(self._forward_s)
        if not launched.needs_masks:
            launched.ready_s = self._free_s
        return launched

    def queue_sampling(self, launched: PacedLaunched) -> None:
        self._queue(0.0)
        launched.ready_s = self._free_s
        self.chain_s += time.perf_counter() - self.arrived_s

    def clear(self) -> None:
        """Nothing is left to wait for."""

    def _queue(self, seconds: float) -> None:
        _sleep_until(time.perf_counter() + self._queueing_s)
        now = time.perf_counter()
        if self._free_s:
            self.idle_s += max(0.0, now - self._free_s)
        self._free_s = max(now, self._free_s) + seconds

    def draw(self, step: Step, masks: Mask | None) -> I32:
        """What the device would have sampled: any token, or any that a row's mask allows."""
        tokens = self._dice.integers(0, self.limits.vocab_size, (step.num_rows, 1), np.int32)
        if masks is None:
            return tokens
        tried = self._dice.integers(0, self.limits.vocab_size, (len(masks), _TRIES), np.int32)
        words = np.take_along_axis(masks, tried >> 5, axis=1)
        allowed = (words >> (tried & 31) & 1).astype(np.bool_)
        first = allowed.argmax(axis=1)
        for at, row in enumerate(step.constrained.tolist()):
            if allowed[at, first[at]]:
                tokens[row, 0] = tried[at, first[at]]
            else:
                some = np.flatnonzero(masks[at])
                word = int(self._dice.choice(some))
                bits = np.flatnonzero(np.unpackbits(masks[at, word : word + 1].view(np.uint8), bitorder="little"))
                tokens[row, 0] = 32 * word + int(self._dice.choice(bits))
        return tokens


def _sleep_until(when_s: float) -> None:
    left = when_s - time.perf_counter()
    if left > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.perf_counter() < when_s:
        pass
