"""Anthropic's Messages API as a backend."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from bough.lang.backends.base import Backend, Generation, conversation, select_by_schema
from bough.lang.backends.http import HttpClient
from bough.lang.chat_template import ChatTemplate, get_chat_template
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from bough.lang.media import split_data_url
from bough.lang.sampling import SamplingParams
from bough.lang.transcript import Message, Prompt
from bough.lang.typed_output import dtype_object_schema, dtype_text, read_answer

_KNOWN = {"max_new_tokens", "stop", "temperature", "top_p", "top_k", "json_schema", "dtype"}


class Anthropic(Backend):
    """Sends requests to `{base_url}/v1/messages`. `prefill=True` for models that continue an assistant message they are
    given."""

    is_chat = True

    def __init__(
        self,
        model_name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        prefill: bool = False,
        verify: bool | str = True,
        max_retries: int = 3,
        timeout_s: float | None = None,
    ) -> None:
        self.model_name = model_name
        self.prefill = prefill
        key = api_key or os.environ.get("ANTHROPIC_API_KEY")
        auth = {"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})
        url = base_url or os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com"
        self.http = HttpClient(
            url, headers={**auth, **(headers or {})}, verify=verify, retries=max_retries, timeout_s=timeout_s
        )

    @property
    def name(self) -> str:
        return f"the Anthropic API ({self.model_name})"

    def known_chat_template(self) -> ChatTemplate:
        return get_chat_template("claude")

    async def async_generate(self, prompt: Prompt, params: SamplingParams) -> Generation:
        reply = await self.http.post("/v1/messages", self._body(prompt, params))
        text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        if params.dtype is not None:
            text = dtype_text(read_answer(text), params.dtype)
        return Generation(text, {"id": reply["id"]} | _usage(reply) | _finish(reply["stop_reason"]))

    async def async_stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Generation]:
        if params.dtype is not None:
            yield await self.async_generate(prompt, params)
            return
        text = ""
        meta: dict[str, Any] = {}
        async for event in self.http.sse("/v1/messages", self._body(prompt, params) | {"stream": True}):
            kind = event["type"]
            if kind == "message_start":
                meta |= {"id": event["message"]["id"]} | _usage(event["message"])
            elif kind == "message_delta":
                meta |= _usage(event) | _finish(event["delta"].get("stop_reason"))
            elif kind == "content_block_delta" and event["delta"]["type"] == "text_delta":
                text += event["delta"]["text"]
            elif kind == "message_stop":
                break
            else:
                continue
            yield Generation(text, dict(meta))

    async def async_select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        return await select_by_schema(self, prompt, choices, temperature, method)

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        changed = params.changed()
        for name in changed:
            if name not in _KNOWN:
                raise self.unsupported(name, "the API has no such parameter")
        messages = conversation(prompt, self, prefill=self.prefill)
        body: dict[str, Any] = {
            "model": self.model_name,
            "max_tokens": params.max_new_tokens,
            "messages": [self._message(message) for message in messages if message["role"] != "system"],
        }
        system = "\n".join(str(message["content"]) for message in messages if message["role"] == "system")
        if system:
            body["system"] = system
        if params.stop:
            body["stop_sequences"] = list(params.stop)
        body |= {name: changed[name] for name in ("temperature", "top_p", "top_k") if name in changed}
        if params.json_schema is not None:
            body["output_config"] = _format(json.loads(params.json_schema))
        elif params.dtype is not None:
            body["output_config"] = _format(dtype_object_schema(params.dtype))
        return body

    def _message(self, message: Message) -> Message:
        if isinstance(message["content"], str):
            return message
        return {"role": message["role"], "content": [self._part(part) for part in message["content"]]}

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        if part["type"] != "image_url":
            raise self.unsupported("video", "the API has no such content")
        url = part["image_url"]["url"]
        data = split_data_url(url)
        if data is None:
            return {"type": "image", "source": {"type": "url", "url": url}}
        return {"type": "image", "source": {"type": "base64", "media_type": data[0], "data": data[1]}}

    def shutdown(self) -> None:
        self.http.close()


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": schema}}


def _usage(holder: dict[str, Any]) -> dict[str, Any]:
    usage = holder.get("usage") or {}
    names = {
        "input_tokens": "prompt_tokens",
        "output_tokens": "completion_tokens",
        "cache_read_input_tokens": "cached_tokens",
    }
    return {ours: usage[theirs] for theirs, ours in names.items() if usage.get(theirs) is not None}


def _finish(reason: str | None) -> dict[str, Any]:
    kinds = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}
    return {"finish_reason": {"type": kinds.get(reason, reason)}} if reason else {}
