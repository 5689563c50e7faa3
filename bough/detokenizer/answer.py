"""The output of one request: tokens become text, the text is searched for stops and parsed, and deltas are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bough.core.errors import BoughError
from bough.core.messages import (
    Began,
    Delta,
    End,
    EndReason,
    ParsedEvent,
    RowOutput,
    TextSpec,
    TokenLogprobs,
    plain_delta,
    unpack_ids,
)
from bough.detokenizer.decode import DecoderFactory, TokenDecoder
from bough.detokenizer.stops import Stops
from bough.parsers import ResponseParser


class Verdict(NamedTuple):
    """The end of an answer as found in its text. It takes precedence over an end that the engine reports later."""

    num_tokens: int
    reason: EndReason
    matched: str | None = None
    error: BoughError | None = None


class PlainAnswer:
    """A request that wants token ids only."""

    __slots__ = ("id",)

    def __init__(self, request_id: int) -> None:
        self.id = request_id

    def advance(self, ids: Sequence[int], packed: bytes, row: RowOutput | None) -> Delta | None:
        return plain_delta(self.id, packed, row)


class TextAnswer:
    """A request that wants text. `verdict` is set when its end is found in the text; the engine must then be
    informed."""

    __slots__ = (
        "_decoder",
        "_embedding",
        "_events",
        "_every",
        "_factory",
        "_hidden",
        "_last_kept",
        "_logprobs",
        "_num_scored",
        "_num_tokens",
        "_parser",
        "_prompt_logprobs",
        "_reasoned",
        "_said",
        "_spec",
        "_stops",
        "_tokens",
        "_turns",
        "_unsent",
        "id",
        "verdict",
    )

    def __init__(self, began: Began, spec: TextSpec, factory: DecoderFactory) -> None:
        """Raises `BoughError` for parsers or tools that don't exist."""
        self.id = began.id
        self.verdict: Verdict | None = None
        self._spec = spec
        self._every = spec.every
        self._factory = factory
        self._parser = ResponseParser.of(spec) if spec.reasoning_parser or spec.tool_parser else None
        keep = frozenset(self._parser.markers) if self._parser is not None else frozenset[str]()
        self._last_kept = keep
        self._turns = frozenset(marker[-1] for marker in keep)
        """Characters with which the parser's markers end."""
        self._decoder: TokenDecoder = factory.make(
            skip_special=spec.skip_special_tokens,
            spaces=spec.spaces_between_special_tokens,
            keep=keep,
            tail=unpack_ids(spec.prompt_tail).tolist(),
        )
        self._stops = (
            Stops(spec.stop, spec.stop_regex, keep_match=spec.no_stop_trim) if spec.stop or spec.stop_regex else None
        )
        self._num_tokens = 0
        self._num_scored = 0
        self._reasoned = 0
        """Number of tokens up to the last one that belongs to the reasoning section."""
        self._unsent = 0
        self._said: list[str] = []
        self._tokens: list[bytes] = []
        self._events: list[ParsedEvent] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._hidden: list[list[float]] = []
        self._embedding = b""

    def begin_turn(self, turn: int) -> None:
        """Starts a new iteration of the loop, with a new budget of work for stop patterns."""
        if self._stops is not None:
            self._stops.begin_turn(turn)

    def advance(self, ids: Sequence[int], packed: bytes, row: RowOutput | None) -> Delta | None:
        """Adds a row's new tokens. Returns a delta if one is due; if the row has an end, the delta is the last one."""
        if row is None and self._stops is None and self._parser is None and self._every <= 1 and self.verdict is None:
            self._num_tokens += len(ids)
            return Delta(id=self.id, text=self._decoder.feed(ids), tokens=packed)
        undecided = self.verdict is None
        if undecided:
            self._take_tokens(ids, packed, row.end if row is not None else None)
        if row is not None:
            self._take_extras(row)
            if undecided and row.hidden_states is not None:  # with stops, hidden states arrive token by token
                self._hidden += row.hidden_states
        end = row.end if row is not None else None
        if end is None:
            due = self._unsent >= self._every or self.verdict is not None
            return self._delta(None) if due and self._tokens else None
        if self.verdict is None:
            self._finish_text(was_cut=end.reason in ("abort", "error"))
        return self._delta(self._final(end))

    def fail(self, error: BoughError) -> None:
        """Ends the answer with an error. Text that was already sent stays."""
        self.verdict = Verdict(self._num_tokens, "error", error=error)

    # -- text ------------------------------------------------------------------------------------------------------

    def _take_tokens(self, ids: Sequence[int], packed: bytes, end: End | None) -> None:
        spoken = ids[:-1] if self._ends_silently(ids, end) else ids
        if self._stops is None:
            self._say_all(spoken)
        else:
            for place, token_id in enumerate(spoken):
                found = self._stops.feed(self._decoder.feed((token_id,)))
                self._say(found.text)
                self._count(place + 1)
                if found.matched is not None:
                    self.verdict = Verdict(self._num_tokens + place + 1, "stop", found.matched)
                    ids, packed = ids[: place + 1], packed[: 4 * (place + 1)]
                    self._finish_parsing()
                    break
        if len(ids):
            self._num_tokens += len(ids)
            self._unsent += len(ids)
            self._tokens.append(packed)

    def _ends_silently(self, ids: Sequence[int], end: End | None) -> bool:
        """Whether the last token is the stop token itself, which is not part of the text."""
        if end is None or not len(ids) or self._spec.no_stop_trim or end.reason != "stop" or end.matched != ids[-1]:
            return False
        return self._parser is None or self._factory.token_text(ids[-1]) not in self._last_kept

    def _finish_text(self, *, was_cut: bool) -> None:
        rest = self._decoder.finish()
        if was_cut:  # an incomplete character at its end does not complete a stop
            self._say((self._stops.finish().text if self._stops is not None else "") + rest)
        elif self._stops is not None:
            found = self._stops.feed(rest) if rest else None
            if found is not None:
                self._say(found.text)
            if found is None or found.matched is None:
                found = self._stops.finish()
                self._say(found.text)
            if found.matched is not None:
                self.verdict = Verdict(self._num_tokens, "stop", found.matched)
        else:
            self._say(rest)
        self._finish_parsing()

    def _finish_parsing(self) -> None:
        if self._parser is not None:
            self._events += self._parser.finish()

    def _say_all(self, ids: Sequence[int]) -> None:
        """Decodes many tokens at once, except tokens that may begin or end the reasoning: those are decoded one by one,
        so that the tokens of the reasoning can be counted."""
        if self._spec.reasoning_parser is None:
            self._say(self._decoder.feed(ids))
            return
        texts: list[str] = []
        for place, token_id in enumerate(ids):
            text = self._decoder.feed((token_id,))
            if self._turns.isdisjoint(text):
                texts.append(text)
            else:
                self._say("".join(texts))
                self._count(place)
                self._say(text)
                self._count(place + 1)
                texts.clear()
        self._say("".join(texts))
        self._count(len(ids))

    def _say(self, text: str) -> None:
        if text:
            self._said.append(text)
            if self._parser is not None:
                self._events += self._parser.feed(text)

    def _count(self, new: int) -> None:
        """Records that `new` more tokens were decoded."""
        if self._parser is not None and self._parser.in_reasoning:
            self._reasoned = self._num_tokens + new

    # -- the rest --------------------------------------------------------------------------------------------------

    def _take_extras(self, row: RowOutput) -> None:
        if row.logprobs is not None:
            kept = row.logprobs
            if self.verdict is not None:
                kept = _cut(kept, max(0, self.verdict.num_tokens - self._num_scored))
            self._num_scored += len(row.logprobs.token_ids)
            if kept.token_ids:
                self._logprobs.append(self._with_text(kept))
        if row.prompt_logprobs is not None:
            self._prompt_logprobs.append(self._with_text(row.prompt_logprobs))
        self._embedding += row.embedding

    def _with_text(self, scores: TokenLogprobs) -> TokenLogprobs:
        if self._spec.logprob_text:
            text = self._factory.token_text
            scores.text = [text(token_id) for token_id in scores.token_ids]
            scores.top_text = [[text(token_id) for token_id, _ in row] for row in scores.top]
        return scores

    def _final(self, end: End) -> End:
        verdict = self.verdict
        if verdict is None:
            return msgspec.structs.replace(end, reasoning_tokens=self._reasoning_tokens(end, end.completion_tokens))
        error = verdict.error
        return msgspec.structs.replace(
            end,
            reason=verdict.reason,
            matched=verdict.matched,
            message=error.sentence() if error is not None else "",
            status=error.status if error is not None else 0,
            code=(error.code or error.type) if error is not None else "",
            param=(error.param or "") if error is not None else "",
            completion_tokens=verdict.num_tokens,
            reasoning_tokens=self._reasoning_tokens(end, verdict.num_tokens),
        )

    def _reasoning_tokens(self, end: End, num_tokens: int) -> int:
        """Number of reasoning tokens among the answer's remaining tokens. The engine's own count can be wrong: it may
        have computed past the end, it knows only the usual ids of the end marker, and it counts in answers without
        reasoning."""
        parser = self._parser if self._spec.reasoning_parser is not None else None
        if parser is not None and not parser.in_reasoning and not self._reasoned:
            return 0
        if end.reasoning_mark and end.reasoning_tokens + end.reasoning_mark <= num_tokens:
            return end.reasoning_tokens
        if parser is None:
            return num_tokens if end.reasoning_mark else min(end.reasoning_tokens, num_tokens)
        return num_tokens if parser.in_reasoning else min(self._reasoned, num_tokens)

    def _delta(self, end: End | None) -> Delta:
        delta = Delta(
            id=self.id,
            text="".join(self._said),
            tokens=b"".join(self._tokens),
            events=self._events,
            end=end,
            logprobs=_joined(self._logprobs),
            prompt_logprobs=_joined(self._prompt_logprobs),
            hidden_states=self._hidden or None,
            embedding=self._embedding,
        )
        self._said, self._tokens, self._events, self._hidden = [], [], [], []
        self._logprobs, self._prompt_logprobs = [], []
        self._embedding = b""
        self._unsent = 0
        return delta


def _cut(scores: TokenLogprobs, length: int) -> TokenLogprobs:
    return TokenLogprobs(
        scores.token_ids[:length],
        scores.logprobs[:length],
        scores.top[:length],
        scores.chosen[:length],
        scores.top_text[:length],
        scores.text[:length],
    )


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if len(parts) <= 1:
        return parts[0] if parts else None
    whole = TokenLogprobs([], [], [], [], [], [])
    for part in parts:
        whole.token_ids += part.token_ids
        whole.logprobs += part.logprobs
        whole.top += part.top
        whole.chosen += part.chosen
        whole.top_text += part.top_text
        whole.text += part.text
    return whole
