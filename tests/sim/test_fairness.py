"""One user's very long prompt and the others' tokens, on a device whose steps take the time that their tokens cost."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.step import Step
from tests.sim.harness import VOCAB, Client, Sim

DECODE_MS, TOKEN_MS, ATTENTION_MS = 8.0, 0.04, 4e-7
"""About an 8-billion-parameter model on one large GPU: a decode step, a prompt's token, and its look at one KV token."""
USERS = 8


class Device:
    """Makes the simulation's clock run by the steps' cost, and notes when each user's tokens came."""

    def __init__(self, long_prompt: int, **settings: object) -> None:
        self.sim = Sim(
            context_length=long_prompt + 1024, page_size=64, num_pages=long_prompt // 64 + 600, max_step_tokens=8192,
            min_chunk_tokens=64, fail_wait=self._cost, **settings,
        )  # fmt: skip
        self.times: dict[int, list[float]] = {}

    def _cost(self, step: Step) -> None:
        prefill = step.num_query[step.num_decodes :].astype(np.int64)
        looks = int((prefill * (step.context[step.num_decodes :] + prefill)).sum())
        self.sim.clock.now += (DECODE_MS + TOKEN_MS * int(prefill.sum()) + ATTENTION_MS * looks) / 1e3

    def turn(self) -> None:
        before = {number: len(client.tokens) for number, client in self.sim.clients.items()}
        self.sim.loop.turn()
        for number, client in self.sim.clients.items():
            self.times.setdefault(number, []).extend(
                [self.sim.clock.now] * (len(client.tokens) - before.get(number, 0))
            )

    def ask(self, length: int, tokens: int) -> Client:
        rng = np.random.default_rng(len(self.sim.clients))
        return self.sim.ask(rng.integers(0, VOCAB, length).tolist(), max_new=tokens)

    def tpot_ms(self, client: Client) -> float:
        times = self.times[client.ask.id]
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)

    def gaps_ms(self, client: Client) -> list[float]:
        return (1e3 * np.diff(self.times[client.ask.id])).tolist()


def users(device: Device, tokens: int) -> list[Client]:
    asked = [device.ask(100, tokens) for _ in range(USERS)]
    while not all(client.tokens for client in asked):
        device.turn()
    return asked


@pytest.mark.parametrize("depth", [0, 1])
def test_others_hardly_notice_a_prompt_of_128k_tokens(depth: int) -> None:
    device = Device(131_072, depth=depth, num_slots=16)
    warm = users(device, 60)
    while not all(client.ends for client in warm):
        device.turn()
    idle = np.percentile([device.tpot_ms(client) for client in warm], 99)
    watching = users(device, 200)
    long = device.ask(131_072, 4)
    began = device.sim.clock.now
    beside: list[Client] = []
    while not long.ends:
        device.turn()
        if not device.sim.queues.running or (len(beside) < 40 and all(client.ends for client in (*watching, *beside))):
            beside += users(device, 200)
    took = device.sim.clock.now - began
    busy = [client for client in (*watching, *beside) if client.ends]
    assert len(busy) >= 3 * USERS, "others came and went while it was computed"
    tpot = np.percentile([device.tpot_ms(client) for client in busy], 99)
    assert tpot <= 2 * idle, f"{tpot:.1f} ms beside it, {idle:.1f} ms without"
    gaps = [gap for client in busy for gap in device.gaps_ms(client)]
    assert np.percentile(gaps, 95) <= 2.2 * idle
    alone = (131_072 * TOKEN_MS + ATTENTION_MS * 131_072**2 / 2) / 1e3
    assert took <= 4 * alone, f"it took {took:.1f} s instead of {alone:.1f}"
    assert not device.sim.runner.violations


def test_a_short_prompt_beside_it_is_answered_within_a_second() -> None:
    device = Device(131_072, num_slots=16)
    users(device, 3000)
    for _ in range(40):
        device.turn()
    device.ask(131_072, 4)
    for _ in range(50):
        device.turn()
    began = device.sim.clock.now
    short = device.ask(250, 4)
    while not short.tokens:
        device.turn()
    assert device.times[short.ask.id][0] - began <= 1.0
