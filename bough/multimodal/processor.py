"""What a family's processor is: from decoded media to features, and from features to what stands in a prompt for them.

The first half (`image`) runs in worker processes, the second in API processes, each of which builds a processor of its own
from the checkpoint's config. Nothing here decodes: a worker does, under limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from bough.core.errors import InvalidRequest
from bough.core.media import Features, MediaItem, MediaKind
from bough.core.messages import Ids
from bough.multimodal.errors import MediaUnsupported

if TYPE_CHECKING:  # only workers need Pillow
    from PIL.Image import Image

Options = dict[str, int | float | bool | str]
"""Checked settings of one item, those that differ from the checkpoint's only."""


class ItemShape(Struct, frozen=True):
    """One item of a medium, without its place: see `core.media.MediaItem`."""

    grid: tuple[int, ...]
    count: int
    cost: int
    first: int = 0
    last: int = 0
    embedded: bool = False


class Processed(Struct, frozen=True, kw_only=True):
    """What became of a medium."""

    dtype: Literal["uint8", "float32"]
    shape: tuple[int, ...]
    items: tuple[ItemShape, ...]
    notes: tuple[str, ...] = ()
    """Texts that stand in the prompt beside the items (timestamps), in the family's order."""
    sound: tuple[ItemShape, ...] | None = None
    """Items of the sound of a video, which stand between its own; None: it is silent, or not asked for."""


class Prepared(Struct, frozen=True, kw_only=True):
    """A medium that is ready to be sent: its features are in shared memory."""

    kind: MediaKind
    digest: bytes
    processed: Processed
    features: Features
    sound: Prepared | None = None
    """The sound of a video, where it is heard, too."""

    def with_sound(self, sound: Prepared) -> Prepared:
        """The same video, heard."""
        processed = structs.replace(self.processed, sound=sound.processed.items)
        return structs.replace(self, processed=processed, sound=sound)


class PlaceholderRun(Struct, frozen=True):
    """Placeholders of an item, in a row."""

    item: int
    count: int
    of_sound: bool = False
    """The item is one of the medium's sound (`Processed.sound`)."""


class Token(Struct, frozen=True):
    """A token of the vocabulary that stands beside placeholders."""

    id: int


Piece = str | Token | PlaceholderRun
"""What a medium becomes in a prompt: text, marks, and placeholders."""


class VideoInfo(Struct, frozen=True, kw_only=True):
    """A video before its frames are decoded."""

    total: int
    """Frames."""
    fps: float
    """Frames a second."""
    width: int
    height: int


class SoundRules(Struct, frozen=True):
    """How sounds are decoded for a family."""

    rate: int
    """Samples a second."""
    seconds: float
    """At most."""
    piece_s: float = 0.0
    """Seconds of a piece of a longer sound that is transcribed by itself; 0: as many as there may be."""


Mark = tuple[int, ...] | str
"""Token ids, or a text where the config does not know its ids."""


class Marker(Struct, frozen=True):
    """What stands for a medium of one kind in a prompt before it is expanded."""

    find: Mark
    """What chat templates write, and what the medium's pieces replace."""
    insert: Mark
    """What is put before a prompt that has no marker."""
    token: int
    """The placeholder. Kinds may share one."""
    also: Mark = ()
    """What stands for a medium where nothing is like `find`."""
    numbered: str = ""
    """What may stand in texts instead of `find`: with `%d` for the number of a medium, which counts for nothing."""


class Processor(ABC):
    """One family's."""

    kinds: frozenset[MediaKind]
    in_prompt: bool = True
    """Whether something in a prompt stands for each medium; otherwise cross attention alone reads them, and `marker` is not
    asked for."""
    once: str = ""
    """A mark that is written once where the pieces of neighbours have it twice."""
    axes: int = 0
    """Axes of positions, where they have several; 0: they have one."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Everything but the bytes and the options that features depend on."""

    @abstractmethod
    def options(self, kind: MediaKind, given: Mapping[str, Any]) -> Options:
        """A request's settings for a medium, checked. Raises `InvalidRequest`."""

    def among(self, kind: MediaKind, count: int) -> Options:
        """Options that follow from how many media of this kind a request has."""
        return {}

    def together(self, items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
        """The items of a prompt, where what a tower makes of one depends on the others. Such items have other keys."""
        return items

    def adapter(self, kinds: Collection[MediaKind]) -> int:
        """The adapter of prompts with media of these kinds, counted from 1; 0: none."""
        return 0

    def with_sound(self, kind: MediaKind, options: Options) -> bool:
        """Whether the sound of a medium is to be heard with it."""
        return False

    def little_detail(self) -> Options:
        """Options for an image of which the client wants little detail; none where the family can't give less."""
        return {}

    @abstractmethod
    def image(self, image: Image, options: Options) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """Features of an RGB image. Raises `MediaError` if the family can't take it."""

    def embedded(self, count: int, grid: tuple[int, ...]) -> ItemShape:
        """An image of `count` positions whose embeddings a client sends with its grid (empty: none was sent). Raises
        `MediaError` if no image of this family is like that."""
        raise MediaUnsupported(
            what="this model takes no embeddings in place of images",
            why="text stands between the positions of its images",
            fix="send the image",
        )

    def sample(self, info: VideoInfo, options: Options) -> list[int]:
        """Which frames of a video are taken, in order. Only for families that take video."""
        raise NotImplementedError

    def video(
        self, info: VideoInfo, indices: Sequence[int], frames: Iterable[Image], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...], tuple[str, ...]]:
        """Features of frames, items, and the notes that go with them (`Processed.notes`). Only for families that take
        video."""
        raise NotImplementedError

    @property
    def sound(self) -> SoundRules:
        """Only for families that take audio."""
        raise NotImplementedError

    def audio(
        self, samples: npt.NDArray[np.float32], options: Options
    ) -> tuple[npt.NDArray[Any], tuple[ItemShape, ...]]:
        """Features of a sound, one channel at the family's rate. Only for families that take audio."""
        raise NotImplementedError

    @abstractmethod
    def marker(self, kind: MediaKind) -> Marker: ...

    def tidied(self, text: str) -> str:
        """A text with all pieces in it, as it is tokenised."""
        return text

    def prefix(self, kind: MediaKind, number: int) -> Sequence[Piece]:
        """Texts before the pieces of a prompt's medium, by its number among those of its kind."""
        return ()

    @abstractmethod
    def pieces(self, kind: MediaKind, processed: Processed) -> Sequence[Piece]:
        """What replaces a medium's marker."""

    def positions(self, ids: Ids, items: Sequence[MediaItem]) -> npt.NDArray[np.int32]:
        """[axes, tokens]. Only for families whose positions have several axes."""
        raise NotImplementedError


def bounded_count(name: str, value: Any, low: int, high: int) -> int:
    """A whole number of a request's settings. Raises `InvalidRequest`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(
            what=f"{name} is {str(value)[:40]!r}",
            why=f"it must be a whole number from {low:,} to {high:,}",
            fix="send a valid number, or leave it out",
            param="mm_processor_kwargs",
        )
    return value


def bounded_number(name: str, value: Any, low: float, high: float) -> float:
    """A number of a request's settings. Raises `InvalidRequest`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(
            what=f"{name} is {str(value)[:40]!r}",
            why=f"it must be a number from {low:g} to {high:g}",
            fix="send a valid number, or leave it out",
            param="mm_processor_kwargs",
        )
    return float(value)


def bounded_flag(name: str, value: Any) -> bool:
    """A switch of a request's settings, off if it is not sent. Raises `InvalidRequest`."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(
        what=f"{name} is {str(value)[:40]!r}",
        why="it must be true or false",
        fix="send true or false, or leave it out",
        param="mm_processor_kwargs",
    )


def unknown_option(name: str, known: Sequence[str]) -> InvalidRequest:
    return InvalidRequest(
        what=f"mm_processor_kwargs has no {str(name)[:60]!r}",
        why=f"this model's processor takes {', '.join(known) or 'no settings'}",
        fix="leave it out",
        param="mm_processor_kwargs",
    )
