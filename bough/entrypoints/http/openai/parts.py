"""Content parts that requests of other dialects become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bough.engine_client.media_fields import WHERE

Json = dict[str, Any]


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def media_url_part(kind: str, url: str, where: str, **extra: Any) -> Json:
    """`kind`: image, video or audio. `where`: the client's field, for errors."""
    name = f"{kind}_url"
    return {"type": name, name: {"url": url, **extra}, WHERE: where}


def is_text(part: Json) -> bool:
    return bool(part["type"] == "text")


def content_of(parts: Sequence[Json], between: str = "\n") -> str | list[Json]:
    """The content of a message: one text if there are only texts, because every template takes that."""
    if all(map(is_text, parts)):
        return between.join(part["text"] for part in parts)
    return list(parts)


def joined(first: str | list[Json], second: str | list[Json]) -> str | list[Json]:
    """Contents of two turns of one speaker as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[text_part(each)] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], text_part("\n\n"), *parts[1]]
