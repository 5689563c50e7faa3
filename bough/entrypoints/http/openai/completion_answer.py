"""Deltas of a plain completion request as OpenAI's body, or as its chunks. Choice `p * n + c` is copy c of prompt p."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Struct, field

from bough.core.messages import Delta, End, Ids, TokenLogprobs, unpack_ids
from bough.engine_client.endings import raise_if_failed
from bough.entrypoints.http.openai.chat_answer import meta_info
from bough.entrypoints.http.openai.shapes import (
    BytesOf,
    CompletionLogprobs,
    add_usage,
    bytes_of,
    finish_reason,
    join_scores,
    no_scores,
    usage,
)
from bough.entrypoints.service import News
from bough.entrypoints.stream import DONE, event

Json = dict[str, Any]

_encode = msgspec.json.Encoder().encode


class CompletionForm(Struct, frozen=True, kw_only=True):
    """The format of one request's answers."""

    id: str
    model: str
    num_prompts: int = 1
    n: int = 1
    """Completions returned for each prompt."""
    best_of: int = 1
    """Completions computed per prompt, of which the `n` most likely are returned, the most likely first."""
    echo: tuple[str, ...] | None = None
    """The prompts' texts, to stand before their completions."""
    top_logprobs: int | None = None
    """None: no log-probabilities."""
    known: BytesOf = field(default_factory=lambda: bytes_of(None))
    """The bytes of scored tokens."""
    token_ids: bool = False
    prompt_ids: bool = False
    report_cache: bool = True
    include_usage: bool = False
    usage_in_chunks: bool = False
    meta_info: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def candidates(self) -> int:
        return max(self.n, self.best_of)


class _Completion:
    """One candidate, as it grows."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.scores: list[TokenLogprobs] = []
        self.prompt_scores: list[TokenLogprobs] = []
        self.token_ids: list[int] = []
        self.hidden_states: list[list[float]] = []
        self.end: End | None = None
        self.prompt: Ids | None = None

    @property
    def ended(self) -> End:
        if self.end is None:
            raise RuntimeError("a completion has not ended")
        return self.end

    @property
    def mean_logprob(self) -> float:
        scores = join_scores(self.scores)
        given = [each for each in scores.logprobs if each is not None] if scores is not None else []
        return sum(given) / len(given) if given else float("-inf")


class CompletionBody:
    """Collects the deltas of all candidates into one response."""

    def __init__(self, form: CompletionForm) -> None:
        self._form = form
        self._prompts = [[_Completion() for _ in range(form.candidates)] for _ in range(form.num_prompts)]

    def add(self, news: News) -> None:
        """Raises the error that a completion ended with."""
        prompt, stream, delta = news
        one = self._prompts[prompt][stream.index]
        one.prompt = stream.prompt
        one.texts.append(delta.text)
        if delta.logprobs is not None and delta.tokens:  # without any, of a token that is not given
            one.scores.append(delta.logprobs)
        if delta.prompt_logprobs is not None:
            one.prompt_scores.append(delta.prompt_logprobs)
        if self._form.token_ids and delta.tokens:
            one.token_ids.extend(unpack_ids(delta.tokens).tolist())
        if delta.hidden_states is not None:
            one.hidden_states.extend(delta.hidden_states)
        if delta.end is not None:
            raise_if_failed(delta.end)
            one.end = delta.end

    def render(self) -> Json:
        """The whole response. Every completion must have ended."""
        form = self._form
        choices: list[Json] = []
        for prompt, candidates in enumerate(self._prompts):
            chosen = candidates
            if form.best_of > form.n:
                chosen = sorted(candidates, key=lambda each: each.mean_logprob, reverse=True)[: form.n]
            choices += [self._choice(prompt, prompt * form.n + copy, one) for copy, one in enumerate(chosen)]
        counted = [usage((one.ended for one in each), with_cache=form.report_cache) for each in self._prompts]
        return {
            "id": form.id,
            "object": "text_completion",
            "created": form.created,
            "model": form.model,
            "choices": choices,
            "usage": add_usage(counted),
        }

    def _choice(self, prompt: int, index: int, one: _Completion) -> Json:
        form = self._form
        text = "".join(one.texts)
        logprobs = None
        if form.top_logprobs is not None:
            scores = join_scores([*one.prompt_scores, *one.scores] if form.echo is not None else one.scores)
            logprobs = CompletionLogprobs(top=form.top_logprobs, known=form.known).render(scores)
        choice: Json = {
            "index": index,
            "text": text if form.echo is None else form.echo[prompt] + text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(one.ended),
            "matched_stop": one.ended.matched,
        }
        if form.token_ids:
            choice["token_ids"] = one.token_ids
        if form.prompt_ids and one.prompt is not None:
            choice["prompt_token_ids"] = one.prompt.tolist()
        if one.hidden_states:
            choice["hidden_states"] = one.hidden_states
        if form.meta_info:
            choice["meta_info"] = meta_info(one.ended)
        return choice


class CompletionChunks:
    """Renders deltas as server-sent events."""

    def __init__(self, form: CompletionForm) -> None:
        self._form = form
        count = form.num_prompts * form.n
        head = {"id": form.id, "object": "text_completion", "created": form.created, "model": form.model}
        self._head = b"data: " + _encode(head)[:-1]
        self._before = [self._head + b',"choices":[{"index":%d,"text":' % index for index in range(count)]
        self._after = b',"logprobs":null,"finish_reason":null}]' + (
            b',"usage":null}\n\n' if form.include_usage else b"}\n\n"
        )
        self._plain = form.top_logprobs is None and not (form.usage_in_chunks or form.token_ids)
        self._scores = [CompletionLogprobs(top=form.top_logprobs or 0, known=form.known) for _ in range(count)]
        self._begun = [False] * count
        self._counts = [0] * count
        self._ends: list[list[End]] = [[] for _ in range(form.num_prompts)]
        self._asked: dict[int, Ids] = {}

    def add(self, news: News) -> bytes:
        """The delta's events. Raises the error that a completion ended with."""
        form = self._form
        prompt, stream, delta = news
        index = prompt * form.n + stream.index
        self._asked[prompt] = stream.prompt
        self._counts[index] += len(delta.tokens) // 4
        text = delta.text
        scores = delta.logprobs if delta.tokens else None
        if not self._begun[index]:
            self._begun[index] = True
            if form.echo is not None:
                text = form.echo[prompt] + text
                scores = join_scores([each for each in (delta.prompt_logprobs, scores) if each is not None])
        if delta.end is None and self._plain:
            return self._before[index] + _encode(text) + self._after if text else b""
        if delta.end is None:
            return self._chunk(prompt, index, text, delta, scores) if text or scores or delta.tokens else b""
        raise_if_failed(delta.end)
        self._ends[prompt].append(delta.end)
        return self._chunk(prompt, index, text, delta, scores, self._finish(prompt, delta.end, delta.hidden_states))

    def last(self) -> bytes:
        """What follows the last completion's end."""
        if not self._form.include_usage:
            return DONE
        counted = [usage(ends, with_cache=self._form.report_cache) for ends in self._ends]
        return self._head + b',"choices":[],"usage":' + _encode(add_usage(counted)) + b"}\n\n" + DONE

    def _chunk(
        self,
        prompt: int,
        index: int,
        text: str,
        delta: Delta,
        scores: TokenLogprobs | None,
        finish: Json | None = None,
    ) -> bytes:
        logprobs = None
        if self._form.top_logprobs is not None:
            logprobs = self._scores[index].render(scores or (no_scores() if finish else None))
        choice: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **(finish or {})}
        if self._form.token_ids:
            choice["token_ids"] = unpack_ids(delta.tokens).tolist()
        return event(self._wrap(prompt, choice))

    def _finish(self, prompt: int, end: End, hidden_states: list[list[float]] | None) -> Json:
        """What a completion's last chunk has beyond its text and its scores."""
        finish: Json = {"finish_reason": finish_reason(end), "matched_stop": end.matched}
        if hidden_states is not None:
            finish["hidden_states"] = hidden_states
        if self._form.prompt_ids:
            finish["prompt_token_ids"] = self._asked[prompt].tolist()
        if self._form.meta_info:
            finish["meta_info"] = meta_info(end)
        return finish

    def _wrap(self, prompt: int, choice: Json) -> Json:
        form = self._form
        chunk: Json = {
            "id": form.id,
            "object": "text_completion",
            "created": form.created,
            "model": form.model,
            "choices": [choice],
        }
        if form.usage_in_chunks:
            sent = sum(self._counts[prompt * form.n : (prompt + 1) * form.n])
            asked = len(self._asked[prompt])
            chunk["usage"] = {"prompt_tokens": asked, "completion_tokens": sent, "total_tokens": asked + sent}
        elif form.include_usage:
            chunk["usage"] = None
        return chunk
