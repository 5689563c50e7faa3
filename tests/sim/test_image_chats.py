"""Chats about images beside streams of others, on a device whose steps take the time that their tokens and patches cost."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from bough.core.media import Features, MediaItem
from bough.core.step import MediaLimits, Step
from tests.sim.harness import VOCAB, Client
from tests.sim.test_fairness import Cost, Device, users

PAD = VOCAB - 1
POSITIONS, PER_POSITION = 1564, 4
"""Of an image of 1,280 x 960 pixels, and patches of each (Qwen2.5-VL)."""
PATCH_MS = 0.005
DECODING = Cost(5.3, 0.015, 0.0, 0.0)
"""Seven billion parameters on one large GPU: tower and prefill of such an image take 54 ms."""


class SeeingDevice(Device):
    """A device that also computes images."""

    def __init__(self) -> None:
        super().__init__(
            8192, DECODING, num_slots=64, media=MediaLimits(num_rows=1 << 17, step_tokens=8192, axes=0)
        )  # fmt: skip

    def _cost(self, step: Step) -> None:
        super()._cost(step)
        if step.media is not None:
            patches = PER_POSITION * sum(len(each.rows) for each in step.media.encode)
            self.sim.clock.now += PATCH_MS * patches / 1e3

    def ask_about(self, image: int, tokens: int) -> Client:
        """A question about an image of its own."""
        key = sha256(str(image).encode()).digest()
        item = MediaItem(
            key=key, kind="image", start=8, length=POSITIONS, token=PAD, count=POSITIONS, cost=PER_POSITION * POSITIONS,
            grid=(1,), features=Features(path=str(image), digest=key, dtype="uint8", shape=(POSITIONS,)),
        )  # fmt: skip
        rng = np.random.default_rng(image)
        text = rng.integers(0, VOCAB - 1, 72).tolist()
        return self.sim.ask([*text[:8], *[PAD] * POSITIONS, *text[8:]], max_new=tokens, media=(item,))


def p99(device: Device, clients: list[Client]) -> float:
    return float(np.percentile([device.tpot_ms(client) for client in clients], 99))


@pytest.mark.parametrize("per_second", [pytest.param(2, marks=pytest.mark.long), 4])
def test_others_hardly_notice_chats_about_images(per_second: int) -> None:
    device = SeeingDevice()
    alone = users(device, 100)
    while not all(client.ends for client in alone):
        device.turn()
    idle = p99(device, alone)
    watching = users(device, 180)
    began, chats = device.sim.clock.now, []
    while not all(client.ends for client in watching):
        if device.sim.clock.now >= began + len(chats) / per_second:
            chats.append(device.ask_about(len(chats), 16))
        device.turn()
    assert len(chats) >= per_second, "more than a second of them"
    assert sum(bool(chat.ends) for chat in chats) >= len(chats) - 2, "they are answered, too"
    busy = p99(device, watching)
    assert busy <= 1.5 * idle, f"{busy:.1f} ms beside images, {idle:.1f} ms without"
    assert not device.sim.runner.violations


def test_a_repeated_image_costs_others_nothing() -> None:
    device = SeeingDevice()
    first = device.ask_about(0, 4)
    while not first.ends:
        device.turn()
    watching = users(device, 100)
    for _ in range(10):
        again = device.ask_about(0, 4)
        while not again.ends:
            device.turn()
    while not all(client.ends for client in watching):
        device.turn()
    gaps = [gap for client in watching for gap in device.gaps_ms(client)]
    assert max(gaps) <= DECODING.decode + 2.0, "neither tower nor prompt is computed again"
    account = device.sim.queues.media
    assert account is not None
    assert account.counters.tower_tokens == PER_POSITION * POSITIONS
