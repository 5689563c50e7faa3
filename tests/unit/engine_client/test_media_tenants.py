"""Whose media are prepared: a tenant's own where tenants share nothing, everybody's otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from bough.engine_client.caller import Caller
from bough.engine_client.limits import RequestLimits
from bough.engine_client.media_fields import media_part, native_media
from bough.engine_client.prepare import Preparer
from bough.engine_client.request import Request
from bough.lora.registry import AdapterRegistry
from bough.multimodal.desk import MediaInput


class Asked(Exception):
    """Ends a request once its media are asked for."""


class FakeMedia:
    def __init__(self) -> None:
        self.tenants: list[str] = []

    async def prepare(self, inputs: Any, tenant: str) -> Any:
        self.tenants.append(tenant)
        raise Asked


@pytest.mark.parametrize(
    ("caller", "tenant"),
    [(Caller(tenant="a", isolated=True), "a"), (Caller(tenant="a"), ""), (Caller(), "")],
)
async def test_the_tenant_is_part_of_the_key_where_caches_are_isolated(caller: Caller, tenant: str) -> None:
    media: Any = FakeMedia()
    nothing: Any = None
    limits = RequestLimits(64, 100, None, truncate=False)
    preparer = Preparer(
        limits, None, nothing, nothing, pools=None, processors=None, adapters=AdapterRegistry(()), media=media
    )
    request = Request(prompt=[1, 2], media=(MediaInput(kind="image", source=b"x"),), caller=caller)
    with pytest.raises(Asked):
        await preparer.prompts([request])
    assert media.tenants == [tenant]


def test_bounds_of_a_request_reach_the_processor() -> None:
    """Of one image, and of all of a request."""
    url = {"url": "data:,", "max_dynamic_patch": 2, "max_pixels": 640, "unknown": 1}
    part = media_part({"type": "image_url", "image_url": url}, "messages[0].content[0]", {"min_pixels": 64})
    assert part.options == {"min_pixels": 64, "max_dynamic_patch": 2, "max_pixels": 640}
    (native,) = native_media({"image_data": "AAAA", "max_dynamic_patch": 3, "mm_processor_kwargs": {"max_pixels": 9}})
    assert native.options == {"max_dynamic_patch": 3, "max_pixels": 9}
