"""Pieces that OpenAI's response bodies are made of: usage, log-probabilities, finish reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bough.core.messages import End, TokenLogprobs

Json = dict[str, Any]


def usage(ends: Iterable[End], *, with_cache: bool) -> Json:
    """Tokens of one prompt's completions: the prompt counts once, however many there are."""
    ends = list(ends)
    prompt = max((end.prompt_tokens for end in ends), default=0)
    completion = sum(end.completion_tokens for end in ends)
    counted: Json = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if with_cache:
        counted["prompt_tokens_details"] = {
            "cached_tokens": min(prompt, max((end.cached_tokens for end in ends), default=0))
        }
    reasoning = sum(end.reasoning_tokens for end in ends)
    counted["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counted


def add_usage(parts: Sequence[Json]) -> Json:
    """Usage of several prompts together."""
    total: Json = {
        name: sum(part[name] for part in parts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    if parts and "prompt_tokens_details" in parts[0]:
        cached = sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts)
        total["prompt_tokens_details"] = {"cached_tokens": cached}
    reasoning = sum(part["completion_tokens_details"]["reasoning_tokens"] for part in parts)
    total["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return total


def finish_reason(end: End, *, called_tools: bool = False) -> str:
    """OpenAI's word for how a completion ended."""
    if end.reason == "stop":
        return "tool_calls" if called_tools else "stop"
    return end.reason


def chat_logprobs(scores: TokenLogprobs | None) -> Json | None:
    """`choices[i].logprobs` of chat completions."""
    if scores is None:
        return None
    return {"content": chat_logprob_items(scores), "refusal": None}


def chat_logprob_items(scores: TokenLogprobs) -> list[Json]:
    items: list[Json] = []
    for at, (text, logprob) in enumerate(zip(scores.text, scores.logprobs, strict=True)):
        item = _token(text, logprob)
        item["top_logprobs"] = []
        if scores.top:
            texts = scores.top_text[at]
            item["top_logprobs"] = [_token(name, score) for name, (_, score) in zip(texts, scores.top[at], strict=True)]
        items.append(item)
    return items


class CompletionLogprobs:
    """`choices[i].logprobs` of plain completions; keeps the text offset across chunks."""

    def __init__(self, *, top: int, offset: int = 0) -> None:
        self._top = top
        self._offset = offset

    def render(self, scores: TokenLogprobs | None) -> Json | None:
        """The next positions' scores."""
        if scores is None:
            return None
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for at, text in enumerate(scores.text):
            offsets.append(self._offset)
            self._offset += len(text)
            if not self._top:
                continue
            chosen = scores.logprobs[at]
            if chosen is None:
                tops.append(None)
                continue
            alternatives = dict(zip(scores.top_text[at], (score for _, score in scores.top[at]), strict=True))
            tops.append({**alternatives, text: chosen})
        return {
            "tokens": list(scores.text),
            "token_logprobs": list(scores.logprobs),
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }


def join_scores(parts: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    """Scores of consecutive positions as one."""
    if not parts:
        return None
    joined = TokenLogprobs([], [], [], [], [], [])
    for part in parts:
        joined.token_ids.extend(part.token_ids)
        joined.logprobs.extend(part.logprobs)
        joined.top.extend(part.top)
        joined.chosen.extend(part.chosen)
        joined.top_text.extend(part.top_text)
        joined.text.extend(part.text)
    return joined


def _token(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
