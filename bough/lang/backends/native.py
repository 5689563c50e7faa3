"""Shared code of all backends with the native generate protocol; only the transport differs."""

from __future__ import annotations

import asyncio
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bough.lang.backends.base import Backend, Generation, JoinResult
from bough.lang.chat_template import (
    ChatTemplate,
    from_role_affixes,
    get_chat_template,
    get_chat_template_by_model_path,
)
from bough.lang.choices import ChoiceScores, ChoicesDecision, ChoicesSamplingMethod, TokenLogprob, decide, mean_logprob
from bough.lang.config import global_config
from bough.lang.errors import BackendError
from bough.lang.loop import Once
from bough.lang.sampling import SamplingParams
from bough.lang.transcript import JoinedContext, PlacedMedia, Prompt

_ONLY_PREFILL = {"max_new_tokens": 0, "temperature": 0.0}


class NativeBackend(Backend):
    """Generates through `{text, sampling_params, ...} -> {text, meta_info}`."""

    has_prefix_cache = True
    text_in_logprobs = True
    """The transport can ask for each scored token's text beside its id."""

    def __init__(self, chat_template_name: str | None) -> None:
        self._chat_template = Once(self._find_chat_template)
        self._server_info = Once(self.async_server_info)
        self._fixed_template = get_chat_template(chat_template_name) if chat_template_name is not None else None

    @abstractmethod
    async def call(self, body: dict[str, Any]) -> Any:
        """One generate request, to its end."""

    @abstractmethod
    def call_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One generate request, reply by reply."""

    @abstractmethod
    async def async_model_info(self) -> dict[str, Any]:
        """The server's description of its model."""

    @abstractmethod
    async def call_join(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for a KV join: `{src_rids, dst_rid}` -> `{success, session_id | message}`."""

    async def async_generate(self, prompt: Prompt, params: SamplingParams) -> Generation:
        reply = await self.call(self._body(prompt, params))
        if isinstance(reply, list):
            return Generation([str(r["text"]) for r in reply], [_checked(r)["meta_info"] for r in reply])
        return Generation(str(reply["text"]), _checked(reply)["meta_info"])

    async def async_stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[Generation]:
        info = await self._server_info.get()
        in_pieces = bool(info.get("incremental_streaming_output"))
        text = ""
        async for reply in self.call_stream(self._body(prompt, params)):
            text = text + reply["text"] if in_pieces else reply["text"]
            yield Generation(text, _checked(reply)["meta_info"])

    async def async_select(
        self, prompt: Prompt, choices: Sequence[str], temperature: float, method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        """Prefill the prompt once, then score all choices over it in one batched request."""
        prompt_tokens = 0
        if prompt.text:
            reply = await self.call(self._prefill_body(prompt))
            prompt_tokens = int(_checked(reply)["meta_info"]["prompt_tokens"])
        tokens = await self._score(prompt, choices, prompt_tokens)
        alone: list[list[TokenLogprob]] | None = None
        if method.requires_unconditional_logprobs:
            replies = await self.call(
                {
                    "input_ids": [[token[1] for token in choice] for choice in tokens],
                    "sampling_params": _ONLY_PREFILL,
                    "return_logprob": True,
                    "logprob_start_len": 0,
                }
            )
            alone = [_checked(r)["meta_info"]["input_token_logprobs"] for r in replies]
        scores = ChoiceScores(
            choices=choices,
            normalized_prompt_logprobs=[mean_logprob(choice) for choice in tokens],
            input_token_logprobs=tokens,
            output_token_logprobs=[[] for _ in choices],
            unconditional_token_logprobs=alone,
        )
        return decide(method, temperature, scores)

    async def _score(self, prompt: Prompt, choices: Sequence[str], prompt_tokens: int) -> list[list[TokenLogprob]]:
        """Logprobs of each choice's tokens, all from the same place in the text.

        A choice may merge with the end of the prompt into other tokens than the prompt has alone. The prompt itself
        therefore goes along in the batch: where any choice's tokens first depart from it, all scores begin. One
        token before the end is looked at first, more only if a merge reaches further back.
        """
        texts = [prompt.text] * bool(prompt.text) + [prompt.text + choice for choice in choices]
        look_back = 2
        while True:
            start = max(prompt_tokens - look_back, 0)
            body = self._media_fields(prompt, len(texts)) | {
                "text": [text[_sent_from(prompt) :] for text in texts],
                "sampling_params": _ONLY_PREFILL,
                "return_logprob": True,
                "logprob_start_len": start,
            }
            if self.text_in_logprobs:
                body["return_text_in_logprobs"] = True
            rows = [_positioned(_checked(reply)) for reply in await self.call(body)]
            own, scored = (rows[0], rows[1:]) if prompt.text else ({}, rows)
            departs = min(
                (at for at in own for row in scored if at not in row or row[at][1] != own[at][1]),
                default=prompt_tokens,
            )
            seen_before = min(own, default=prompt_tokens)
            known = all(departs in row and row[departs][0] is not None for row in scored)
            if start == 0 or (known and (departs > seen_before or departs == prompt_tokens)):
                return [[row[at] for at in sorted(row) if at >= departs] for row in scored]
            look_back *= 4

    async def async_cache_prefix(self, prompt: Prompt) -> None:
        await self.call(self._prefill_body(prompt))

    async def async_shares_in_flight(self) -> bool:
        """True for a bough server with a prefix cache: a request waits while another one computes their common
        prefix."""
        return (await self._server_info.get()).get("radix_cache") is True

    async def async_chat_template(self) -> ChatTemplate:
        return self._fixed_template or await self._chat_template.get()

    def known_chat_template(self) -> ChatTemplate | None:
        return self._fixed_template or self._chat_template.peek()

    async def _find_chat_template(self) -> ChatTemplate:
        info = await self.async_model_info()
        path = str(info.get("model_path", ""))
        return from_role_affixes(path, info) or get_chat_template_by_model_path(path)

    async def async_concatenate_and_append(
        self, parent: Prompt, branches: Sequence[Prompt], position_ids_offset: Sequence[int] | None
    ) -> JoinResult:
        """Prefill parent and branches under their own request ids, then let the server join their KV."""
        if not global_config.enable_parallel_encoding:
            return JoinResult(None, "global_config.enable_parallel_encoding is off")
        if not (await self._server_info.get()).get("kv_join"):
            return JoinResult(None, "the server has no KV join for this model")
        rids = [uuid.uuid4().hex for _ in range(1 + len(branches))]
        await asyncio.gather(
            *(
                self.call(self._prefill_body(prompt) | {"rid": rid})
                for prompt, rid in zip((parent, *branches), rids, strict=True)
            )
        )
        body: dict[str, Any] = {"src_rids": rids[1:], "dst_rid": rids[0]}
        if position_ids_offset is not None:
            body["position_ids_offset"] = list(position_ids_offset)
        try:
            reply = await self.call_join(body)
        except BackendError as error:
            return JoinResult(None, error.sentence())
        if not reply.get("success"):
            return JoinResult(None, str(reply.get("message", "the server refused the join")))
        info = {key: value for key, value in reply.items() if key not in ("success", "session_id", "message")}
        return JoinResult(JoinedContext(str(reply["session_id"]), rids[0], 0), info=info)

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        return (
            self._media_fields(prompt, None)
            | {"text": prompt.text[_sent_from(prompt) :], "sampling_params": params.to_native()}
            | params.logprob_fields()
        )

    def _prefill_body(self, prompt: Prompt) -> dict[str, Any]:
        return self._media_fields(prompt, None) | {
            "text": prompt.text[_sent_from(prompt) :],
            "sampling_params": _ONLY_PREFILL,
        }

    def _media_fields(self, prompt: Prompt, batch: int | None) -> dict[str, Any]:
        """Images, videos and the joined context of the text; `batch`: one entry per text."""
        fields: dict[str, Any] = {}
        for kind in ("image", "video"):
            items = [item for item in prompt.media if item.kind == kind and item.position >= _sent_from(prompt)]
            if items:
                sent = [_named(item) for item in items]
                fields[f"{kind}_data"] = sent if batch is None else [sent] * batch
        if prompt.context is not None:
            fields["session_params"] = {"id": prompt.context.session_id, "rid": prompt.context.rid}
        return fields


def _named(item: PlacedMedia) -> str | dict[str, Any]:
    """A medium as /generate takes it."""
    return item.url if item.num_frames is None else {"url": item.url, "num_frames": item.num_frames}


def _sent_from(prompt: Prompt) -> int:
    """Text before this place is behind the joined context and not sent again."""
    return prompt.context.position if prompt.context is not None else 0


def _positioned(reply: dict[str, Any]) -> dict[int, TokenLogprob]:
    """A reply's input logprobs by absolute token position: they are those of the prompt's last tokens."""
    meta = reply["meta_info"]
    entries = meta["input_token_logprobs"]
    first = int(meta["prompt_tokens"]) - len(entries)
    return {first + i: entry for i, entry in enumerate(entries)}


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply. Raises if the server aborted the request."""
    reason = reply["meta_info"].get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise BackendError(
            what="the server aborted the request",
            why=str(reason.get("message", "")),
            http_status=reason.get("status_code"),
        )
    return reply
