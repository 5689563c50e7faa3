"""`Desk`: from what clients name to media that are ready to be sent, each prepared once however many ask for it."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, to_builtins

from bough.config.concerns import MediaConfig
from bough.core.errors import BoughError, InvalidRequest
from bough.core.media import MediaKind
from bough.ipc.features import open_features
from bough.multimodal.door import Door
from bough.multimodal.embeds import FORM, bad_embeddings
from bough.multimodal.errors import MediaTooLarge, MediaUnsupported
from bough.multimodal.feature_cache import FeatureCache
from bough.multimodal.local import too_many_bytes
from bough.multimodal.processor import Options, Prepared, Processor
from bough.multimodal.work import Stills, UnencodedPixels, Work
from bough.multimodal.workers import Workers

_CHARS_AT_ONCE = 1 << 20
"""Of a URL, hashed while other requests wait: 0.7 ms. More are hashed by another thread."""
_FETCHES = 16
"""Media that are fetched or decoded from base64 at the same time."""


FRAMES_PER_SECOND = 2.0
"""Frames a second of a video that was sent as frames, if the request does not say: what most families take."""
_MOST = 64
"""Media of each kind that a request may have, unless --limit-mm-data-per-request says otherwise."""


def limits_of(config: MediaConfig) -> dict[str, int]:
    """Media of each kind that a request may have."""
    given: dict[str, int] = json.loads(config.limit_mm_data_per_request or "{}")
    return {**dict.fromkeys(("image", "video", "audio"), _MOST), **given}


class RawPixels(Struct, frozen=True):
    """Pixels of a program in this process, never encoded."""

    raw: UnencodedPixels
    data: bytes


class Embeddings(Struct, frozen=True):
    """What a tower would give for an image, in a safetensors file (see `embeds`)."""

    file: str | bytes
    """A URL, or its bytes."""


class Frames(Struct, frozen=True, kw_only=True):
    """A video whose frames were taken out before."""

    images: tuple[str | bytes | RawPixels, ...]
    fps: float = 0.0
    """Of the video; 0: not known, two a second."""
    indices: tuple[int, ...] = ()
    """Their numbers in the video; empty: they are all of it."""
    total: int = 0
    """Frames of the video; 0: not known."""


class _Loaded(Struct, frozen=True, kw_only=True):
    """The bytes of a medium, and what they are."""

    data: bytes
    raw: UnencodedPixels | None = None
    form: str = ""
    stills: Stills | None = None

    @property
    def head(self) -> list[Any]:
        """What is hashed beside the bytes."""
        return [to_builtins(self.raw), self.form, to_builtins(self.stills)]


class MediaInput(Struct, frozen=True, kw_only=True):
    """A medium as a request names it."""

    kind: MediaKind
    source: str | bytes | RawPixels | Frames | Embeddings
    """A URL, the bytes of a file, pixels, a video's frames, or embeddings."""
    options: Mapping[str, Any] = {}
    """Settings of the processor for this one."""
    little_detail: bool = False
    param: str = "messages"
    """The client's field, for errors."""


class Desk:
    """One API process's. Everything runs in one event loop."""

    def __init__(
        self, processor: Processor, door: Door, config: MediaConfig, workers: Workers, *, width: int = 0
    ) -> None:
        """`width`: values of an embedding."""
        self.processor = processor
        self._width = width
        self._door = door
        self._config = config
        self._workers = workers
        self._limits = limits_of(config)
        self._cache = FeatureCache(config.mm_processor_cache_size)
        self._pending: dict[bytes, asyncio.Task[None]] = {}
        self._fetching = asyncio.Semaphore(_FETCHES)

    @property
    def cache(self) -> FeatureCache:
        return self._cache

    def check(self, inputs: Sequence[MediaInput]) -> None:
        """What can be said without looking at the media. Raises `InvalidRequest`."""
        for kind, count in Counter(each.kind for each in inputs).items():
            param = next(each.param for each in inputs if each.kind == kind)
            if kind not in self.processor.kinds:
                raise InvalidRequest(
                    what=f"the request has {kind} input",
                    why=f"the served model takes text and {', '.join(sorted(self.processor.kinds))}",
                    fix="leave it out, or serve another model",
                    param=param,
                )
            most = self._limits.get(kind)
            if most is not None and count > most:
                raise InvalidRequest(
                    what=f"the request has {count} {kind} inputs",
                    why=f"at most {most} are taken (--limit-mm-data-per-request)",
                    fix="send fewer",
                    param=param,
                )

    async def prepare(self, inputs: Sequence[MediaInput], tenant: str = "") -> list[Prepared]:
        """All of them, in order, or an error and none. Each is in use until `release`. `tenant`: whose they are, where
        tenants share nothing. Raises `InvalidRequest` and its kinds, `Overloaded`, `RequestFailed`."""
        self.check(inputs)
        counts = Counter(each.kind for each in inputs)
        tasks = [asyncio.create_task(self._one(each, tenant, counts[each.kind])) for each in inputs]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self.release([each for each in ended if isinstance(each, Prepared)])
            raise

    async def decode_sound(self, data: bytes) -> npt.NDArray[np.float32]:
        """The samples of a sound's file, one channel at the family's rate. Nothing of it is kept. Raises `MediaError`,
        `RequestFailed`, `Unavailable`."""
        form = self._door.check_sound(data)
        digest = sha256(data).digest()
        work = Work(
            kind="audio", options={}, digest=digest, num_bytes=len(data), form=form, decode_only=True
        )  # fmt: skip
        _, features, descriptor = await self._workers.run(work, data)
        try:
            samples = await asyncio.to_thread(open_features, features)
        finally:
            os.close(descriptor)
        return samples.view(np.float32)

    def release(self, prepared: Sequence[Prepared]) -> None:
        """The request that they were prepared for has ended."""
        for each in _with_sounds(prepared):
            self._cache.done(each.digest)

    def again(self, prepared: Sequence[Prepared]) -> list[Prepared] | None:
        """Media of an earlier request for another one; None: some are gone."""
        taken: list[Prepared] = []
        for each in _with_sounds(prepared):
            if self._cache.use(each.digest) is None:
                for other in taken:
                    self._cache.done(other.digest)
                return None
            taken.append(each)
        return list(prepared)

    def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        self._workers.close()
        self._cache.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _one(self, each: MediaInput, tenant: str, among: int) -> Prepared:
        """`among`: how many media of its kind the request has."""
        try:
            options = {**self.processor.among(each.kind, among), **self.processor.options(each.kind, each.options)}
            if each.little_detail:
                options = {**self.processor.little_detail(), **options}
            heard = self.processor.with_sound(each.kind, options)
            name = b"" if heard else await self._name(each, options, tenant)
            if name and (known := self._cache.use_named(name)) is not None:
                return known
            async with self._fetching:
                found = await self._load(each)
                ready = await self._ready(each.kind, options, tenant, found)
                if heard:
                    return await self._heard(ready, tenant, found)
            if name:
                self._cache.name(name, ready.digest)
            return ready
        except BoughError as error:
            if error.param is None:
                error.param = each.param
            raise

    async def _name(self, each: MediaInput, options: Options, tenant: str) -> bytes:
        """What a medium is called whose bytes are in its URL: such a URL always names the same ones, so that those of a
        known name need not be decoded from base64, which takes eight times as long as hashing them. Empty: other URLs."""
        url = each.source
        if not isinstance(url, str) or url[:5].lower() != "data:":
            return b""
        head = json.dumps([each.kind, self.processor.identity, sorted(options.items()), tenant]).encode() + b"\0url\0"
        if len(url) <= _CHARS_AT_ONCE:
            return _hashed(head, url)
        return await asyncio.to_thread(_hashed, head, url)

    async def _ready(self, kind: MediaKind, options: Options, tenant: str, found: _Loaded) -> Prepared:
        """A medium, in use."""
        digest = await asyncio.to_thread(self._digest, kind, options, tenant, found)
        while (ready := self._cache.use(digest)) is None:
            work = Work(
                kind=kind, options=options, digest=digest, num_bytes=len(found.data),
                raw=found.raw, form=found.form, stills=found.stills,
            )  # fmt: skip
            await self._prepared(work, found.data)
        return ready

    async def _heard(self, video: Prepared, tenant: str, found: _Loaded) -> Prepared:
        """A video with its sound. Raises `MediaError` if it has none that can be decoded."""
        try:
            if found.stills is not None or found.raw is not None:
                raise MediaUnsupported(
                    what="this video's sound is to be heard, and it has none",
                    why="it was sent as frames",
                    fix="send its file, or leave out use_audio_in_video",
                )
            loaded = _Loaded(data=found.data, form=self._door.check_sound(found.data))
            return video.with_sound(await self._ready("audio", {}, tenant, loaded))
        except BaseException:
            self._cache.done(video.digest)
            raise

    async def _prepared(self, work: Work, data: bytes) -> None:
        """Returns when the medium is in the cache: prepared by this call, or by an earlier one that is still at work."""
        task = self._pending.get(work.digest)
        if task is None:
            task = self._pending[work.digest] = asyncio.create_task(self._prepare(work, data))
            task.add_done_callback(lambda _: self._pending.pop(work.digest, None))
        await asyncio.shield(task)

    async def _prepare(self, work: Work, data: bytes) -> None:
        processed, features, descriptor = await self._workers.run(work, data)
        if work.form == FORM and processed.shape[1] != self._width:
            os.close(descriptor)
            raise bad_embeddings(f"they are {processed.shape[1]} wide, those of this model {self._width}")
        prepared = Prepared(kind=work.kind, digest=work.digest, processed=processed, features=features)
        self._cache.add(prepared, descriptor)

    async def _load(self, each: MediaInput) -> _Loaded:
        source = each.source
        if isinstance(source, str) and each.kind == "video" and (frames := listed_frames(source)):
            source = Frames(images=frames)
        if isinstance(source, Frames):
            if each.kind != "video":
                raise MediaUnsupported(what=f"frames are no {each.kind}", fix="send a video")
            return await self._load_frames(source)
        if isinstance(source, Embeddings):
            return await self._load_embeddings(source, each.kind)
        if isinstance(source, RawPixels):
            return _Loaded(data=self._checked(source), raw=source.raw)
        data = await self._door.read(source) if isinstance(source, str) else source
        if each.kind == "video":
            return _Loaded(data=data, form=await asyncio.to_thread(self._door.check_video, data))
        if each.kind == "audio":
            return _Loaded(data=data, form=self._door.check_sound(data))
        return _Loaded(data=(await asyncio.to_thread(self._door.check, data)).data)

    async def _load_embeddings(self, given: Embeddings, kind: MediaKind) -> _Loaded:
        if not self._config.enable_mm_embeds:
            raise InvalidRequest(
                what="the request has embeddings in place of an image",
                why="this server takes none: they would reach the model unseen",
                fix="send the image, or start the server with --enable-mm-embeds",
            )
        if kind != "image":
            raise MediaUnsupported(what=f"embeddings are taken for images, not for {kind}", fix=f"send the {kind}")
        data = await self._door.read(given.file) if isinstance(given.file, str) else given.file
        if len(data) > self._config.max_media_bytes:
            raise too_many_bytes(self._config.max_media_bytes)
        return _Loaded(data=data, form=FORM)

    async def _load_frames(self, frames: Frames) -> _Loaded:
        """Frames as one medium. Raises `MediaError`."""
        count = len(frames.images)
        if not 0 < count <= self._config.max_video_frames:
            raise MediaTooLarge(
                what=f"this video has {count} frames",
                why=f"1 to {self._config.max_video_frames} are taken (--max-video-frames)",
                fix="send as many",
            )
        if frames.indices and len(frames.indices) != count:
            raise MediaUnsupported(
                what=f"this video has {count} frames and {len(frames.indices)} frames_indices",
                why="each frame has one",
                fix="send as many",
            )
        pieces, raws = [], set()
        for image in frames.images:
            if isinstance(image, RawPixels):
                pieces.append(self._checked(image))
                raws.add(image.raw)
            else:
                data = await self._door.read(image) if isinstance(image, str) else image
                pieces.append((await asyncio.to_thread(self._door.check, data)).data)
        total = sum(map(len, pieces))
        if total > self._config.max_media_bytes and not raws:
            raise too_many_bytes(self._config.max_media_bytes)
        if len(raws) > 1 or (raws and len(raws) != len({type(each) for each in frames.images})):
            raise MediaUnsupported(what="frames of a video differ in kind or size", fix="send frames of one size")
        indices = frames.indices or tuple(range(count))
        if any(b < a for a, b in pairwise(indices)) or indices[0] < 0:
            raise MediaUnsupported(what="frames_indices don't ascend", fix="send frames in order")
        stills = Stills(
            sizes=tuple(map(len, pieces)), fps=frames.fps or FRAMES_PER_SECOND, indices=indices,
            total=max(frames.total, indices[-1] + 1),
        )  # fmt: skip
        return _Loaded(data=b"".join(pieces), raw=next(iter(raws), None), stills=stills)

    def _checked(self, pixels: RawPixels) -> bytes:
        raw = pixels.raw
        if raw.width * raw.height > self._config.max_media_pixels:
            raise MediaTooLarge(
                what=f"this picture has {raw.width:,} x {raw.height:,} pixels",
                why=f"at most {self._config.max_media_pixels:,} pixels are taken",
                fix="send a smaller one",
            )
        return pixels.data

    def _digest(self, kind: MediaKind, options: Options, tenant: str, found: _Loaded) -> bytes:
        head = [kind, self.processor.identity, sorted(options.items()), tenant, *found.head]
        digest = sha256(json.dumps(head).encode())
        digest.update(b"\0")
        digest.update(found.data)
        return digest.digest()


def _hashed(head: bytes, url: str) -> bytes:
    digest = sha256(head)
    digest.update(url.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _with_sounds(prepared: Sequence[Prepared]) -> list[Prepared]:
    return [part for each in prepared for part in (each, each.sound) if part is not None]


def listed_frames(url: str) -> tuple[str, ...]:
    """The frames of `data:video/jpeg;base64,FRAME,FRAME...`, each as a URL; none of any other URL."""
    head, comma, rest = url.partition(",")
    if not comma or head.lower() != "data:video/jpeg;base64":
        return ()
    return tuple(f"data:image/jpeg;base64,{frame}" for frame in rest.split(","))
