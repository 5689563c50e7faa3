"""Media in requests: OpenAI's content parts and SGLang's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.core.media import MediaKind
from bough.multimodal.desk import Embeddings, Frames, MediaInput, RawPixels

NATIVE_MEDIA: Final[Mapping[str, MediaKind]] = {"image_data": "image", "video_data": "video", "audio_data": "audio"}
PARTS: Final[Mapping[str, tuple[MediaKind, str]]] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "image"),
    "image_embeds": ("image", "image_embeds"),
    "video_url": ("video", "video_url"),
    "video": ("video", "video"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "audio": ("audio", "audio"),
}
"""Types of content parts -> what they are, and the field that holds it."""
WHERE: Final = "bough_where"
"""Field of a converted part that names the client's own field, for errors."""
_LEVELS = ("auto", "low", "high", "original", None)
_OPTIONS = frozenset({
    "max_dynamic_patch", "min_dynamic_patch", "min_pixels", "max_pixels", "fps", "num_frames", "nframes", "min_frames",
    "max_frames",
})  # fmt: skip
"""Processor settings that may be given next to a URL."""


def media_part(part: Mapping[str, Any], where: str, shared: Mapping[str, Any]) -> MediaInput:
    """A content part that is not text. `shared`: the request's settings for all media. Raises `InvalidRequest`."""
    kind, field = PARTS[str(part["type"])]
    given = part.get(field)
    named = str(part.get(WHERE, f"{where}.{field}"))[:200]
    detail = part.get("detail")
    options: dict[str, Any] = dict(shared)
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        options |= {name: value for name, value in given.items() if name in _OPTIONS and value is not None}
        given = _sound(given, where) if field == "input_audio" else given.get("url")
    if detail not in _LEVELS:
        raise InvalidRequest(
            what=f"{where}.detail is {str(detail)[:40]!r}",
            why="it must be auto, low or high",
            fix="send one of them, or leave it out",
            param=f"{where}.detail",
        )
    if not isinstance(given, str) or not given:
        raise InvalidRequest(
            what=f"{named} has no URL",
            why=f"it must name the {kind}",
            fix='send {"url": "https://..."} or a data: URL',
            param=named,
        )
    if field == "image_embeds":
        return MediaInput(kind=kind, source=Embeddings(with_scheme(given)), param=named)
    return MediaInput(kind=kind, source=given, options=options, little_detail=detail == "low", param=named)


def native_media(fields: Mapping[str, Any]) -> tuple[MediaInput, ...]:
    """The media of one prompt's `image_data`, `video_data` and `audio_data`. Raises `InvalidRequest`."""
    shared = processor_options(fields.get("mm_processor_kwargs"))
    for name in ("max_dynamic_patch", "min_dynamic_patch"):
        if fields.get(name) is not None:
            shared[name] = fields[name]
    found: list[MediaInput] = []
    for name, kind in NATIVE_MEDIA.items():
        given = fields.get(name)
        each = given if isinstance(given, list | tuple) else [given]
        bounds.count("content_parts", each, name)
        found += [_native(one, kind, name, shared) for one in each if one is not None]
    return tuple(found)


def processor_options(given: Any) -> dict[str, Any]:
    """A request's `mm_processor_kwargs`. Raises `InvalidRequest`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequest(
            what="mm_processor_kwargs is no object",
            why="it maps names of the processor's settings to values",
            fix="send an object, or leave it out",
            param="mm_processor_kwargs",
        )
    bounds.count("template_kwargs", given, "mm_processor_kwargs")
    return dict(given)


def split_by_prompt(name: str, value: Any, rows: int, single: bool) -> Sequence[Any]:
    """One entry per prompt: a batch lists media by prompt; a single prompt has all of them."""
    if single:
        return [value]
    if not isinstance(value, list | tuple) or not value:
        return [value] * rows
    if len(value) != rows:
        raise InvalidRequest(
            what=f"{name} has {len(value)} entries for {rows} prompts",
            why="a list must have one entry for each prompt, which may be a list itself",
            fix=f"send one {name}, or a list as long as the prompts'",
            param=name,
        )
    return list(value)


def _native(given: Any, kind: MediaKind, name: str, shared: Mapping[str, Any]) -> MediaInput:
    options = dict(shared)
    if isinstance(given, Mapping) and "frames" in given:
        return MediaInput(kind=kind, source=_frames(given, name), options=options, param=name)
    if isinstance(given, Mapping) and given.get("format") == "precomputed_embedding":
        return MediaInput(kind=kind, source=_embeddings(given, name), param=name)
    if isinstance(given, Mapping):
        options |= {key: value for key, value in given.items() if key in _OPTIONS and value is not None}
        given = given.get("url", given.get(kind))
    if isinstance(given, bytes | RawPixels | Frames):
        return MediaInput(kind=kind, source=given, options=options, param=name)
    if not isinstance(given, str) or not given:
        raise InvalidRequest(
            what=f"{name} names no {kind}",
            why="it must be a URL, base64, or a list of these",
            fix="for example data:image/png;base64,iVBORw0...",
            param=name,
        )
    return MediaInput(kind=kind, source=with_scheme(given), options=options, param=name)


def _embeddings(given: Mapping[str, Any], name: str) -> Embeddings:
    data = given.get("data")
    if not isinstance(data, str | bytes) or not data:
        raise InvalidRequest(
            what=f"{name} has a precomputed_embedding without data",
            why="data must be a safetensors file: base64, or a URL",
            fix="send both",
            param=name,
        )
    return Embeddings(with_scheme(data) if isinstance(data, str) else data)


def _frames(given: Mapping[str, Any], name: str) -> Frames:
    """A video as a list of its frames, with what is known of the video."""
    images, fps = given["frames"], given.get("fps", 0.0)
    indices, total = given.get("frames_indices", ()), given.get("total_num_frames", 0)
    numbers = [fps, total, *indices] if isinstance(indices, list | tuple) else [None]
    if (
        not isinstance(images, list | tuple)
        or not all(isinstance(each, str | bytes | RawPixels) for each in images)
        or any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers)
        or not 0 <= fps <= 1000
        or not all(isinstance(each, int) and 0 <= each < 2**31 for each in (total, *indices))
    ):
        raise InvalidRequest(
            what=f"{name} has frames that can't be read",
            why="frames is a list of URLs or base64; fps a number; frames_indices a list of numbers",
            fix="send a valid list",
            param=name,
        )
    images = tuple(with_scheme(each) if isinstance(each, str) else each for each in images)
    return Frames(images=images, fps=float(fps), indices=tuple(indices), total=total)


def with_scheme(source: str) -> str:
    """Bare base64 as a data: URL; URLs as they are."""
    head = source[:64].lower()
    if head.startswith(("data:", "http:", "https:", "file:")) or "://" in head:
        return source
    return f"data:application/octet-stream;base64,{source}"


def _sound(given: Mapping[str, Any], where: str) -> str:
    """OpenAI's `input_audio` as a data: URL."""
    data, form = given.get("data"), given.get("format")
    if not isinstance(data, str) or form not in ("wav", "mp3", "flac", "ogg"):
        raise InvalidRequest(
            what=f"{where}.input_audio is incomplete",
            why="it must have base64 data and a format (wav, mp3, flac or ogg)",
            fix="send both",
            param=f"{where}.input_audio",
        )
    return f"data:audio/{form};base64,{data}"
