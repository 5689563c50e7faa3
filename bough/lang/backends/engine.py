"""An engine inside this process as a backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, runtime_checkable

from bough.lang.backends.native import NativeBackend


@runtime_checkable
class EngineLike(Protocol):
    """The part of the Engine API that programs need. `async_generate` may be awaited on any event loop."""

    def async_generate(self, prompt: Any = None, sampling_params: Any = None, **kwargs: Any) -> Awaitable[Any]: ...

    def get_server_info(self) -> dict[str, Any]: ...

    def flush_cache(self) -> Any: ...

    def shutdown(self) -> None: ...


@runtime_checkable
class ModelInfoEngine(Protocol):
    """An engine that also describes its model."""

    def get_model_info(self) -> dict[str, Any]: ...


@runtime_checkable
class JoiningEngine(Protocol):
    """An engine that also joins KV."""

    def async_concate_and_append(self, **body: Any) -> Awaitable[dict[str, Any]]: ...


class EngineBackend(NativeBackend):
    """Runs programs on an engine object, which the caller must shut down."""

    text_in_logprobs = False

    def __init__(self, engine: EngineLike, chat_template_name: str | None = None) -> None:
        super().__init__(chat_template_name)
        self.engine = engine

    @property
    def name(self) -> str:
        return "the in-process engine"

    async def call(self, body: dict[str, Any]) -> Any:
        return await self.engine.async_generate(**_engine_arguments(body))

    async def call_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for reply in await self.engine.async_generate(**_engine_arguments(body), stream=True):
            yield reply

    async def call_join(self, body: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(self.engine, JoiningEngine):
            return {"success": False, "message": "the engine has no KV join"}
        return await self.engine.async_concate_and_append(**body)

    async def async_model_info(self) -> dict[str, Any]:
        if isinstance(self.engine, ModelInfoEngine):
            return await asyncio.to_thread(self.engine.get_model_info)
        return await self.async_server_info()

    async def async_server_info(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.engine.get_server_info)

    async def async_flush_cache(self) -> None:
        await asyncio.to_thread(self.engine.flush_cache)


def _engine_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """A request's body as the engine's keyword arguments: the same names, except for the prompt's."""
    return {("prompt" if key == "text" else key): value for key, value in body.items()}
