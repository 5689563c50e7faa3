"""Measures requests as an API worker sees them: how long they wait, how fast tokens arrive, how they end."""

from __future__ import annotations

import time
from collections.abc import Callable

from bough.core.errors import Overloaded
from bough.core.messages import End
from bough.observability.metrics import ENDINGS, Sheet


class _Live:
    """An unfinished request."""

    __slots__ = ("began_s", "last_s", "prompt_tokens")

    def __init__(self, began_s: float, prompt_tokens: int) -> None:
        self.began_s = began_s
        self.last_s = 0.0
        """Time of its last tokens; 0: there were none yet."""
        self.prompt_tokens = prompt_tokens


class RequestMeter:
    """Is informed of all requests of one API worker and writes their metrics."""

    def __init__(self, sheet: Sheet, clock: Callable[[], float] = time.perf_counter) -> None:
        self.refused = 0
        """Requests that the engine refused because too much was queued (others never get that far)."""
        self._clock = clock
        self._live: dict[int, _Live] = {}
        self._num_live = sheet.cell("num_live_reqs")
        self._submitted = sheet.cell("requests_submitted_total")
        self._ended = {reason: sheet.cell("requests_total", reason) for reason in ENDINGS}
        self._aborted = sheet.cell("aborted_requests_total")
        self._deadline = sheet.cell("deadline_exceeded_total")
        self._prompt = sheet.cell("prompt_tokens_total")
        self._generated = sheet.cell("generation_tokens_total")
        self._cached = sheet.cell("cached_tokens_total")
        self._reasoning = sheet.cell("reasoning_tokens_total")
        self._queue_s = sheet.histogram("queue_time_seconds")
        self._prefill_s = sheet.histogram("prefill_time_seconds")
        self._decode_s = sheet.histogram("decode_time_seconds")
        self._grammar_s = sheet.histogram("grammar_time_seconds")
        self._first_s = sheet.histogram("time_to_first_token_seconds")
        self._between_s = sheet.histogram("inter_token_latency_seconds")
        self._whole_s = sheet.histogram("e2e_request_latency_seconds")
        self._prompt_size = sheet.histogram("request_prompt_tokens")
        self._answer_size = sheet.histogram("request_generation_tokens")

    def submitted(self, request_id: int, prompt_tokens: int) -> None:
        self._live[request_id] = _Live(self._clock(), prompt_tokens)
        self._num_live.set(len(self._live))
        self._submitted.add()

    def news(self, request_id: int, num_tokens: int, end: End | None) -> None:
        """Records new tokens, the end of the request, or both."""
        live = self._live.get(request_id)
        if live is None:
            return
        if end is None:
            now = self._clock()
            if not live.last_s:
                self._first_s.observe(now - live.began_s)
                if num_tokens > 1:
                    self._between_s.observe(0.0, num_tokens - 1)  # they arrived together
            elif num_tokens:
                self._between_s.observe((now - live.last_s) / num_tokens, num_tokens)
            live.last_s = now
        else:
            self._end(request_id, live, num_tokens, end)

    def given_up(self, request_id: int, how: str) -> None:
        """Records that the request ended without a message from the engine: its client disconnected (`given_up`), or
        the engine died (`error`)."""
        if self._live.pop(request_id, None) is not None:
            self._num_live.set(len(self._live))
            self._ended[how if how in self._ended else "error"].add()
            if how == "given_up":
                self._aborted.add()

    def _end(self, request_id: int, live: _Live, num_tokens: int, end: End) -> None:
        del self._live[request_id]
        now = self._clock()
        self._num_live.set(len(self._live))
        self._ended[end.reason].add()
        self.refused += end.status == Overloaded.status
        if end.reason == "abort":
            (self._deadline if end.code == "deadline_exceeded" else self._aborted).add()
        if end.completion_tokens:
            self._tokens_at_end(live, num_tokens, end, now)
        self._prompt.add(end.prompt_tokens)
        self._generated.add(end.completion_tokens)
        self._cached.add(end.cached_tokens)
        self._reasoning.add(end.reasoning_tokens)
        self._queue_s.observe(end.queued_s)
        self._whole_s.observe(now - live.began_s)
        self._prompt_size.observe(end.prompt_tokens)
        self._answer_size.observe(end.completion_tokens)
        if end.prefill_s:
            self._prefill_s.observe(end.prefill_s)
        if end.decode_s:
            self._decode_s.observe(end.decode_s)
        if end.grammar_s:
            self._grammar_s.observe(end.grammar_s)

    def _tokens_at_end(self, live: _Live, num_tokens: int, end: End, now: float) -> None:
        """Records the times of the tokens that arrived with the end. If the whole answer arrived at once, only the
        engine knows them."""
        if not live.last_s:
            self._first_s.observe(end.queued_s + end.prefill_s)
            if end.completion_tokens > 1:
                self._between_s.observe(end.decode_s / (end.completion_tokens - 1), end.completion_tokens - 1)
        elif num_tokens:
            self._between_s.observe((now - live.last_s) / num_tokens, num_tokens)
