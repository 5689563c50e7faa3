"""Media as requests meet them: prepared by the `Desk`, put into prompts by the `Placer`, held until the request ends."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from bough.config.concerns import AUTO, Config
from bough.config.hf import Checkpoint
from bough.core.errors import PromptTooLong
from bough.core.media import MediaItem, MediaKind
from bough.core.messages import Ids
from bough.multimodal.desk import Desk, MediaInput
from bough.multimodal.door import Door
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placed, Placer
from bough.multimodal.processor import Prepared
from bough.multimodal.workers import Workers
from bough.tokenizer import Tokenizer


class Media:
    """One API process's. Everything runs in one event loop."""

    def __init__(self, desk: Desk, placer: Placer, *, longest: int) -> None:
        """`longest`: positions that the model can tell apart."""
        self.desk = desk
        self.placer = placer
        self._longest = longest

    @property
    def kinds(self) -> frozenset[MediaKind]:
        return self.desk.processor.kinds

    def markers(self) -> dict[str, str]:
        """By kind: what stands for a medium in a text; none where nothing does. Needs a tokenizer."""
        if not self.desk.processor.in_prompt:
            return {}
        return {kind: self.placer.marker_text(kind) for kind in self.kinds}

    async def prepare(self, inputs: Sequence[MediaInput], tenant: str) -> Lease:
        """All of a request's media, in use until the lease has ended. Raises as `Desk.prepare`."""
        return Lease(self.desk, await self.desk.prepare(inputs, tenant))

    def again(self, prepared: Sequence[Prepared]) -> Lease | None:
        """Media of an earlier request once more; None: some are no longer kept."""
        taken = self.desk.again(prepared)
        return None if taken is None else Lease(self.desk, taken)

    def positions(self, ids: Ids, items: Sequence[MediaItem]) -> bytes:
        """As `Generate.positions`. Raises `PromptTooLong` if they reach beyond what the model can tell apart."""
        processor = self.desk.processor
        if not processor.axes or not items:
            return b""
        axes = processor.positions(ids, items)
        if int(axes.max()) >= self._longest:
            raise PromptTooLong(
                what=f"the prompt's media reach position {int(axes.max()):,}",
                why=f"the context has {self._longest:,}",
                fix="send shorter media, or start the server with a larger --context-length",
                param="messages",
            )
        return axes.astype("<i4").tobytes()

    def together(self, items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
        """All items of a prompt, where what a tower makes of one depends on the others."""
        return self.desk.processor.together(items)

    def adapter(self, items: Sequence[MediaItem]) -> int:
        """As `Generate.adapter`, of a prompt with these items."""
        return self.desk.processor.adapter({item.kind for item in items})

    def close(self) -> None:
        self.desk.close()


class Lease:
    """Prepared media that answers of a request use. They stay until all of these have ended."""

    def __init__(self, desk: Desk, prepared: Sequence[Prepared]) -> None:
        self.prepared = tuple(prepared)
        self._desk = desk
        self._users = 0

    def joined(self, other: Lease) -> Lease:
        """Both, as one; these two are not to be ended."""
        return Lease(self._desk, [*self.prepared, *other.prepared])

    def use(self) -> None:
        """One more answer."""
        self._users += 1

    def end(self) -> None:
        """One answer less, or none came of it."""
        self._users -= 1
        if self._users <= 0:
            self._desk.release(self.prepared)
            self.prepared = ()


def shifted(placed: Placed, before: int) -> tuple[MediaItem, ...]:
    """The items of a prompt that comes behind `before` other tokens."""
    return tuple(replace(item, start=item.start + before) for item in placed.items)


def routed(ids: Ids, items: Sequence[MediaItem]) -> Ids:
    """Ids that tell prompts apart by their media, for whatever spreads requests by prefix."""
    made = ids.copy()
    for item in items:
        span = made[item.start : item.stop]
        span[span == item.token] = np.frombuffer(item.key[:4], "<i4")[0]
    return made


def media_of(
    config: Config,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    *,
    kinds: Sequence[str],
    context_length: int,
    width: int = 0,
) -> Media | None:
    """What an API process prepares media with; None: the engine takes text only (`kinds` is empty). `width`: values of an
    embedding."""
    if not kinds:
        return None
    processor = processor_of(checkpoint.config)
    if processor is None:
        return None
    media = config.media
    count = media.mm_workers if media.mm_workers is not AUTO else max(1, min(8, (os.cpu_count() or 1) // 4))
    settings = json.loads(json.dumps(checkpoint.config, default=str))
    workers = Workers(
        settings, count=count, max_pixels=media.max_media_pixels, cpu_s=media.media_cpu_s,
        max_frames=media.max_video_frames, max_audio_s=media.max_audio_s,
    )  # fmt: skip
    workers.warm()
    desk = Desk(processor, Door(media), media, workers, width=width)
    return Media(desk, Placer(processor, tokenizer), longest=context_length)
