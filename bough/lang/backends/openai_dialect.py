"""Sampling parameters and replies in the format of OpenAI's API, which many servers and libraries use."""

from __future__ import annotations

import json
from typing import Any

from bough.lang.backends.base import Backend, Generation
from bough.lang.sampling import DTYPE_REGEX, SamplingParams
from bough.lang.typed_output import dtype_object_schema, dtype_text, read_answer

_PLAIN = {"temperature", "top_p", "frequency_penalty", "presence_penalty", "n"}
_EXTENSIONS = {
    "min_new_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "top_k": "top_k",
    "min_p": "min_p",
    "ignore_eos": "ignore_eos",
    "regex": "regex",
}
_HANDLED = {"max_new_tokens", "stop", "return_logprob", "top_logprobs_num", "return_text_in_logprobs"}


def request_fields(
    params: SamplingParams, backend: Backend, *, chat: bool, extensions: bool, max_tokens_field: str = "max_tokens"
) -> dict[str, Any]:
    """The request's fields apart from prompt and model. Raises for parameters that the API does not have."""
    body: dict[str, Any] = {max_tokens_field: params.max_new_tokens}
    if params.stop:
        body["stop"] = list(params.stop)
    for name, value in params.changed().items():
        if name in _PLAIN:
            body[name] = value
        elif name in _EXTENSIONS and extensions:
            body[_EXTENSIONS[name]] = list(value) if isinstance(value, tuple) else value
        elif name == "json_schema" and (chat or extensions):
            body |= _schema_field(json.loads(value), chat)
        elif name == "dtype" and extensions:
            body["regex"] = DTYPE_REGEX[value]
        elif name == "dtype" and chat:
            body |= _schema_field(dtype_object_schema(value), chat)
        elif name not in _HANDLED:
            raise backend.unsupported(
                name,
                "the API has no such parameter",
                "leave it out, run on a bough server, or pass extensions=True if the server knows SGLang's fields",
            )
    if params.return_logprob and chat:
        body |= {"logprobs": True, "top_logprobs": params.top_logprobs_num or 0}
    elif params.return_logprob:
        body["logprobs"] = params.top_logprobs_num or 1
    return body


def wrapped_dtype(params: SamplingParams, *, extensions: bool) -> str | None:
    """The dtype whose value comes back inside an object, where the request asked for one."""
    return None if extensions else params.dtype


def read_reply(reply: dict[str, Any], params: SamplingParams, *, chat: bool, extensions: bool) -> Generation:
    """The generation in a whole (not streamed) reply."""
    texts, metas = [], []
    dtype = wrapped_dtype(params, extensions=extensions) if chat else None
    for choice in reply["choices"]:
        text = (choice["message"].get("content") or "") if chat else choice["text"]
        texts.append(dtype_text(read_answer(text), dtype) if dtype is not None else text)
        metas.append(_meta(reply, choice, chat))
    return Generation(texts, metas) if params.n > 1 else Generation(texts[0], metas[0])


def read_event(event: dict[str, Any], so_far: Generation, *, chat: bool) -> Generation:
    """`so_far` with one streamed event added."""
    meta = dict(so_far.meta_info) if isinstance(so_far.meta_info, dict) else {}
    meta |= _usage(event)
    text = str(so_far.text)
    for choice in event.get("choices") or ():
        text += (choice["delta"].get("content") or "") if chat else (choice.get("text") or "")
        if choice.get("finish_reason"):
            meta["finish_reason"] = {"type": choice["finish_reason"]}
    return Generation(text, meta)


def _schema_field(schema: dict[str, Any], chat: bool) -> dict[str, Any]:
    if not chat:
        return {"json_schema": json.dumps(schema)}
    strict = schema.get("additionalProperties") is False
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": strict},
        }
    }


def _usage(reply: dict[str, Any]) -> dict[str, Any]:
    usage = reply.get("usage") or {}
    meta = {key: usage[key] for key in ("prompt_tokens", "completion_tokens") if key in usage}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return meta | ({"cached_tokens": cached} if cached is not None else {})


def _meta(reply: dict[str, Any], choice: dict[str, Any], chat: bool) -> dict[str, Any]:
    meta = {"id": reply.get("id"), "finish_reason": {"type": choice.get("finish_reason")}} | _usage(reply)
    logprobs = choice.get("logprobs")
    if logprobs and chat:
        content = logprobs.get("content") or []
        meta["output_token_logprobs"] = [[t["logprob"], None, t["token"]] for t in content]
        meta["output_top_logprobs"] = [[[o["logprob"], None, o["token"]] for o in t["top_logprobs"]] for t in content]
    elif logprobs:
        pairs = zip(logprobs["token_logprobs"], logprobs["tokens"], strict=True)
        meta["output_token_logprobs"] = [[logprob, None, token] for logprob, token in pairs]
    reasoning = (choice.get("message") or {}).get("reasoning_content")
    return meta | ({"reasoning_content": reasoning} if reasoning else {})
