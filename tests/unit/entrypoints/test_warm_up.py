"""What a server asks itself before its first client does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bough.core.errors import InvalidRequest
from bough.engine_client import EngineClient, Request
from bough.entrypoints.http import worker


class _Client:
    """Notes requests. Those with media fail, if the test asks for that."""

    context_length, vocab_size, pools = 64, 10, False

    def __init__(self, kinds: set[str], *, refuses: bool = False) -> None:
        self.media = SimpleNamespace(kinds=kinds) if kinds else None
        self.asked: list[Request] = []
        self._refuses = refuses

    async def collect(self, request: Request) -> None:
        self.asked.append(request)
        if request.media and self._refuses:
            raise InvalidRequest(what="the prompt is too long", why="", fix="")

    async def warm_up(self, **options: Any) -> list[list[str]]:
        """Kinds of the media of each request."""
        await worker._warm_up(cast(EngineClient, self), **options)
        return [[each.kind for each in request.media] for request in self.asked]


@pytest.mark.parametrize(
    ("kinds", "images", "asked"),
    [
        (set(), True, [[]]),
        ({"image", "video"}, True, [[], ["image"]]),
        ({"image"}, False, [[]]),
        ({"audio"}, True, [[]]),
    ],
)
async def test_an_image_is_asked_about_where_kernels_are_compiled(
    kinds: set[str], images: bool, asked: list[list[str]]
) -> None:
    assert await _Client(kinds).warm_up(images=images) == asked


async def test_a_context_without_room_for_it_does_not_stop_the_server() -> None:
    assert await _Client({"image"}, refuses=True).warm_up(images=True) == [[], ["image"]]
