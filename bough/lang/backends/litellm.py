"""LiteLLM, a library that speaks many providers' APIs, as a backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from importlib import import_module
from typing import Any

from bough.lang.backends.base import Backend, Generation, conversation, select_by_schema
from bough.lang.backends.openai_dialect import read_event, read_reply, request_fields, wrapped_dtype
from bough.lang.chat_template import ChatTemplate, get_chat_template
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from bough.lang.errors import LangError
from bough.lang.sampling import SamplingParams
from bough.lang.transcript import Prompt


class LiteLLM(Backend):
    """Calls `litellm.acompletion(model=model_name, ...)`; `options` (api_key, api_base, ...) are passed with every
    call."""

    is_chat = True

    def __init__(self, model_name: str, chat_template: str | None = None, **options: Any) -> None:
        try:
            self._litellm: Any = import_module("litellm")
        except ImportError as error:
            raise LangError(
                what="the LiteLLM backend needs the package litellm",
                why="it is not installed here",
                fix="pip install litellm",
            ) from error
        self.model_name = model_name
        self.options = options
        self._template = get_chat_template(chat_template or "default")

    @property
    def name(self) -> str:
        return f"LiteLLM ({self.model_name})"

    def known_chat_template(self) -> ChatTemplate:
        return self._template

    async def async_generate(self, prompt: Prompt, params: SamplingParams) -> Generation:
        reply = await self._litellm.acompletion(**self._arguments(prompt, params))
        return read_reply(reply.model_dump(), params, chat=True, extensions=False)

    async def async_stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Generation]:
        if params.n > 1 or params.return_logprob or wrapped_dtype(params, extensions=False) is not None:
            yield await self.async_generate(prompt, params)
            return
        so_far = Generation("")
        async for event in await self._litellm.acompletion(**self._arguments(prompt, params), stream=True):
            so_far = read_event(event.model_dump(), so_far, chat=True)
            yield so_far

    async def async_select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        return await select_by_schema(self, prompt, choices, temperature, method)

    def _arguments(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        fields = request_fields(params, self, chat=True, extensions=False)
        messages = conversation(prompt, self, prefill=False)
        return {"model": self.model_name, "messages": messages} | fields | self.options
