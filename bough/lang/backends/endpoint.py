"""A running bough (or SGLang) server as a backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from bough.lang.backends.http import HttpClient
from bough.lang.backends.native import NativeBackend
from bough.lang.errors import BackendError
from bough.lang.loop import run_sync


class RuntimeEndpoint(NativeBackend):
    """Sends requests to `base_url` over the native HTTP API. Nothing is sent before the first use.

    `verify` is False to accept any certificate, or the path of the certificates to trust. `chat_template_name` replaces
    the template of the server's model.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        super().__init__(chat_template_name)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/")
        self.http = HttpClient(self.base_url, headers=headers, verify=True if verify is None else verify)

    @property
    def name(self) -> str:
        return f"the server at {self.base_url}"

    async def call(self, body: dict[str, Any]) -> Any:
        return await self.http.post("/generate", body)

    async def call_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for reply in self.http.sse("/generate", body | {"stream": True}):
            yield reply

    async def call_join(self, body: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = await self.http.post("/concate_and_append_request", body)
        return reply

    async def async_model_info(self) -> dict[str, Any]:
        """The server's description of its model."""
        info: dict[str, Any] = await self.http.get("/model_info")
        return info

    async def async_server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self.http.get("/server_info")
        return info

    async def async_flush_cache(self) -> None:
        await self.http.post("/flush_cache")

    async def async_separate_reasoning(self, text: str, model_type: str) -> tuple[str, str]:
        try:
            reply = await self.http.post("/separate_reasoning", {"text": text, "reasoning_parser": model_type})
        except BackendError as error:
            if error.http_status == 404:
                return await super().async_separate_reasoning(text, model_type)
            raise
        return str(reply["reasoning_text"] or ""), str(reply["text"] or "")

    def get_model_name(self) -> str:
        """The path of the model that the server runs."""
        return str(run_sync(self.async_model_info())["model_path"])

    def shutdown(self) -> None:
        self.http.close()
