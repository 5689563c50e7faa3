"""Parts of OpenAI's response bodies: usage, log-probabilities, finish reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bough.core.messages import End, TokenLogprobs
from bough.tokenizer import Tokenizer

Json = dict[str, Any]
BytesOf = Callable[[int, str], bytes]
"""The bytes of a token, by its id and its text."""


def bytes_of(tokenizer: Tokenizer | None) -> BytesOf:
    """How a tokenizer's tokens are given in bytes: also those that hold a part of a character only, whose text can't be."""

    def look_up(token_id: int, text: str) -> bytes:
        table = tokenizer.token_bytes() if tokenizer is not None and "\ufffd" in text else None
        return table[token_id] if table is not None and 0 <= token_id < len(table) else text.encode()

    return look_up


def usage(ends: Iterable[End], *, with_cache: bool) -> Json:
    """Tokens of one prompt's completions: the prompt counts once, however many there are."""
    ends = list(ends)
    prompt = max((end.prompt_tokens for end in ends), default=0)
    completion = sum(end.completion_tokens for end in ends)
    counted: Json = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    details = {f"{kind}_tokens": count for end in ends[:1] for kind, count in end.media_tokens.items()}
    if with_cache:
        details = {"cached_tokens": min(prompt, max((end.cached_tokens for end in ends), default=0)), **details}
    if details:
        counted["prompt_tokens_details"] = details
    reasoning = sum(end.reasoning_tokens for end in ends)
    counted["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counted


def add_usage(parts: Sequence[Json]) -> Json:
    """Usage of several prompts together."""
    total: Json = {
        name: sum(part[name] for part in parts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    details: Counter[str] = Counter()
    for part in parts:
        details.update(part.get("prompt_tokens_details", {}))
    if any("prompt_tokens_details" in part for part in parts):
        total["prompt_tokens_details"] = dict(details)
    reasoning = sum(part["completion_tokens_details"]["reasoning_tokens"] for part in parts)
    total["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return total


def finish_reason(end: End, *, called_tools: bool = False, legacy: bool = False) -> str:
    """OpenAI's finish reason of a completion."""
    if end.reason == "stop" and called_tools:
        return "function_call" if legacy else "tool_calls"
    return end.reason


def chat_logprobs(scores: TokenLogprobs | None, known: BytesOf) -> Json | None:
    """`choices[i].logprobs` of chat completions."""
    if scores is None:
        return None
    return {"content": chat_logprob_items(scores, known), "refusal": None}


def chat_logprob_items(scores: TokenLogprobs, known: BytesOf) -> list[Json]:
    items: list[Json] = []
    for at, (token_id, text, logprob) in enumerate(zip(scores.token_ids, scores.text, scores.logprobs, strict=True)):
        item = _token(text, logprob, known(token_id, text))
        item["top_logprobs"] = []
        if scores.top:
            others = zip(scores.top_text[at], scores.top[at], strict=True)
            item["top_logprobs"] = [_token(name, score, known(other, name)) for name, (other, score) in others]
        items.append(item)
    return items


class CompletionLogprobs:
    """`choices[i].logprobs` of plain completions; keeps the text offset across chunks."""

    def __init__(self, *, top: int, known: BytesOf) -> None:
        self._top = top
        self._known = known
        self._begun = 0
        """Characters that have begun so far."""

    def render(self, scores: TokenLogprobs | None) -> Json | None:
        """The next positions' scores."""
        if scores is None:
            return None
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for at, (token_id, text) in enumerate(zip(scores.token_ids, scores.text, strict=True)):
            raw = self._known(token_id, text)
            goes_on = bool(raw) and _continues(raw[0]) and self._begun > 0
            offsets.append(self._begun - goes_on)
            self._begun += sum(not _continues(byte) for byte in raw)
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


def no_scores() -> TokenLogprobs:
    """Scores of no position."""
    return TokenLogprobs([], [], [], [], [], [])


def join_scores(parts: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    """Scores of consecutive positions as one."""
    if not parts:
        return None
    joined = no_scores()
    for part in parts:
        joined.token_ids.extend(part.token_ids)
        joined.logprobs.extend(part.logprobs)
        joined.top.extend(part.top)
        joined.chosen.extend(part.chosen)
        joined.top_text.extend(part.top_text)
        joined.text.extend(part.text)
    return joined


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is a continuation byte."""
    return byte & 0xC0 == 0x80


def _token(text: str, logprob: float | None, raw: bytes) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}
