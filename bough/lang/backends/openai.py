"""OpenAI, and every server that speaks its API, as a backend: chat models and completion models."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.lang.backends.base import Backend, Generation, conversation, select_by_schema
from bough.lang.backends.http import HttpClient
from bough.lang.backends.openai_dialect import read_event, read_reply, request_fields, wrapped_dtype
from bough.lang.chat_template import ChatTemplate, get_chat_template, get_chat_template_by_model_path
from bough.lang.choices import (
    ChoiceScores,
    ChoicesDecision,
    ChoicesSamplingMethod,
    TokenLogprob,
    decide,
    mean_logprob,
)
from bough.lang.sampling import SamplingParams
from bough.lang.transcript import Prompt

OPENAI_URL = "https://api.openai.com/v1"
_COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")


@dataclass
class TokenUsage:
    """Tokens that a backend has used since it was made or `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        """Counts from zero."""
        self.prompt_tokens = self.completion_tokens = 0

    def add(self, meta: object) -> None:
        """Adds what a generation's `meta_info` (or a list of them, one an answer to the same prompt) says."""
        usage = meta[0] if isinstance(meta, list) and meta else meta
        if isinstance(usage, dict):
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.completion_tokens += usage.get("completion_tokens", 0)


class OpenAI(Backend):
    """Talks to `{base_url}/chat/completions` or, for completion models, `{base_url}/completions`.

    `extensions=True` says that the server knows SGLang's extra fields (bough and SGLang do): then regex, top_k,
    stop_regex, min_tokens and the rest work, and an assistant message that has begun is continued.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        extensions: bool = False,
        verify: bool | str = True,
        max_retries: int = 3,
        timeout_s: float | None = None,
    ) -> None:
        self.model_name = model_name
        self.is_chat = is_chat_model if is_chat_model is not None else model_name not in _COMPLETION_MODELS
        self.extensions = extensions
        self.token_usage = TokenUsage()
        self._template = _template_of(chat_template, model_name, self.is_chat)
        url = (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        auth = {"Authorization": f"Bearer {key}"} if key else {}
        self._max_tokens_field = "max_completion_tokens" if url == OPENAI_URL and self.is_chat else "max_tokens"
        self.http = HttpClient(
            url, headers={**auth, **(headers or {})}, verify=verify, retries=max_retries, timeout_s=timeout_s
        )

    @property
    def name(self) -> str:
        kind = "chat" if self.is_chat else "completion"
        return f"the {kind} API at {self.http.base_url} ({self.model_name})"

    @property
    def _path(self) -> str:
        return "/chat/completions" if self.is_chat else "/completions"

    def known_chat_template(self) -> ChatTemplate:
        return self._template

    async def async_generate(self, prompt: Prompt, params: SamplingParams) -> Generation:
        reply = await self.http.post(self._path, self._body(prompt, params))
        made = read_reply(reply, params, chat=self.is_chat, extensions=self.extensions)
        self.token_usage.add(made.meta_info)
        return made

    async def async_stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Generation]:
        if params.n > 1 or params.return_logprob or wrapped_dtype(params, extensions=self.extensions) is not None:
            yield await self.async_generate(prompt, params)
            return
        body = self._body(prompt, params) | {"stream": True, "stream_options": {"include_usage": True}}
        so_far = Generation("")
        async for event in self.http.sse(self._path, body):
            so_far = read_event(event, so_far, chat=self.is_chat)
            yield so_far
        self.token_usage.add(so_far.meta_info)

    async def async_select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        if not self.is_chat:
            return decide(method, temperature, await self._score(prompt, choices, method))
        return await select_by_schema(self, prompt, choices, temperature, method)

    async def _score(self, prompt: Prompt, choices: Sequence[str], method: ChoicesSamplingMethod) -> ChoiceScores:
        """Likelihoods of the choices by echoing the whole text; every choice is scored from the same character."""
        if method.requires_unconditional_logprobs:
            raise self.unsupported(type(method).__name__, "it needs likelihoods of bare tokens")
        texts = [self._text(prompt) + choice for choice in choices]
        reply = await self.http.post(
            "/completions",
            {"model": self.model_name, "prompt": texts, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1},
        )
        rows = [_echoed(choice, len(text)) for choice, text in zip(reply["choices"], texts, strict=True)]
        end = len(prompt.text)
        start = min(max((at for at, _ in row if at <= end), default=end) for row in rows)
        tokens = [[token for at, token in row if at >= start] for row in rows]
        return ChoiceScores(
            choices=choices,
            normalized_prompt_logprobs=[mean_logprob(row) for row in tokens],
            input_token_logprobs=tokens,
            output_token_logprobs=[[] for _ in choices],
        )

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model_name} | request_fields(
            params, self, chat=self.is_chat, extensions=self.extensions, max_tokens_field=self._max_tokens_field
        )
        if not self.is_chat:
            return body | {"prompt": self._text(prompt)}
        messages = conversation(prompt, self, prefill=self.extensions)
        body["messages"] = messages
        if messages[-1]["role"] == "assistant":
            body["continue_final_message"] = True
        return body

    def _text(self, prompt: Prompt) -> str:
        if prompt.media:
            raise self.unsupported(prompt.media[0].kind, "a completion prompt is text only", "use a chat model")
        return prompt.text

    def shutdown(self) -> None:
        self.http.close()


def _echoed(choice: dict[str, Any], length: int) -> list[tuple[int, TokenLogprob]]:
    """(offset, [logprob, id, text]) of the echoed tokens; the one generated token is left out."""
    logprobs = choice["logprobs"]
    columns = zip(logprobs["text_offset"], logprobs["token_logprobs"], logprobs["tokens"], strict=True)
    return [(at, [logprob, None, token]) for at, logprob, token in columns if at < length]


def _template_of(template: ChatTemplate | str | None, model_name: str, is_chat: bool) -> ChatTemplate:
    if isinstance(template, ChatTemplate):
        return template
    if template is not None:
        return get_chat_template(template)
    return get_chat_template("default") if is_chat else get_chat_template_by_model_path(model_name)
