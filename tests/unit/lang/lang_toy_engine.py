"""An engine object over the toy model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from lang_fake_server import FakeServer


class ToyEngine:
    """The Engine API over the toy model, in this process."""

    def __init__(self) -> None:
        self.fake = FakeServer()
        self.calls: list[dict[str, Any]] = []

    async def async_generate(self, prompt: Any = None, sampling_params: Any = None, **kwargs: Any) -> Any:
        self.calls.append({"prompt": prompt, "sampling_params": sampling_params, **kwargs})
        body = {"sampling_params": sampling_params, **kwargs} | ({"text": prompt} if prompt is not None else {})
        if kwargs.get("stream"):
            return self._stream(body)
        batch = prompt if prompt is not None else kwargs["input_ids"]
        if isinstance(batch, list):
            return list(await asyncio.gather(*(self.fake.answer(body, i) for i in range(len(batch)))))
        return await self.fake.answer(body, None)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        reply = await self.fake.answer(body, None)
        for i in range(1, len(reply["text"]) + 1):
            yield reply | {"text": reply["text"][:i]}

    def get_server_info(self) -> dict[str, Any]:
        return {"model_path": "toy/chatml-instruct", "role_affixes": self.fake.model_info["role_affixes"]}

    def flush_cache(self) -> None:
        self.fake._cached.clear()

    def shutdown(self) -> None:
        return
