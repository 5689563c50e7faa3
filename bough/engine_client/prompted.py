"""A tokenised prompt with its media."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bough.core.media import MediaItem
from bough.core.messages import Ids
from bough.multimodal.media import Lease, routed
from bough.multimodal.processor import Prepared


class PromptMedia(NamedTuple):
    """The media of a prompt, in use until the lease has ended."""

    items: tuple[MediaItem, ...]
    lease: Lease
    positions_of: Callable[[Ids, tuple[MediaItem, ...]], bytes]
    adapter: int = 0
    """As `Generate.adapter`."""

    def positions(self, ids: Ids) -> bytes:
        """As `Generate.positions`, of a prompt that begins as this one does."""
        return self.positions_of(ids, self.items)

    @property
    def prepared(self) -> tuple[Prepared, ...]:
        return self.lease.prepared


class Prompted(NamedTuple):
    """A tokenised prompt."""

    ids: Ids
    media: PromptMedia | None = None

    @property
    def routed(self) -> Ids:
        """What replicas are chosen by: prompts with other media differ."""
        return self.ids if self.media is None else routed(self.ids, self.media.items)

    def let_go(self) -> None:
        """Releases the media if no request was made from it."""
        if self.media is not None:
            self.media.lease.end()
