"""Beam search: the most likely whole answers instead of sampled ones. The engine does not know about beams. Each step
asks for the best next tokens of every beam, which the prefix cache makes a step of one token, and keeps the likeliest
continuations. Endings, scores and the final ranking are those of transformers' `generate` with `num_beams`, a length
penalty of 1 and no early stopping.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from bough.core.errors import BoughError, InvalidRequest, RequestFailed
from bough.core.messages import Delta, End, Ids, ParsedEvent, TextSpec, TokenLogprobs, pack_ids, unpack_ids
from bough.core.reasoning import reasoning_of
from bough.core.sampling import SamplingParams
from bough.engine_client.compose import TAIL_IDS
from bough.engine_client.endings import GIVEN_UP
from bough.engine_client.request import Request
from bough.engine_client.stream import DeltaStream
from bough.parsers import ResponseParser
from bough.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

MAX_CANDIDATES: Final = 1024
"""Best next tokens asked of each beam."""

Scored = list[tuple[int, float]]
"""Tokens and their log-probabilities, the best first."""
Ask = Callable[[Sequence[Ids]], Awaitable[list[Delta]]]
"""Of each prompt: one new token, with the best alternatives."""


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer so far."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Scored, ...] = ()
    total: float = 0.0

    def extended(self, token: int, logprob: float, top: Scored) -> Beam:
        return Beam((*self.tokens, token), (*self.logprobs, logprob), (*self.tops, top), self.total + logprob)

    @property
    def score(self) -> float:
        """Mean log-probability."""
        return self.total / max(1, len(self.tokens))


class BeamSearch:
    """The search itself, without I/O. Call `advance` with the best next tokens of each live beam until `done`."""

    def __init__(self, *, width: int, max_new_tokens: int, min_new_tokens: int = 0, stops: frozenset[int]) -> None:
        self._width = width
        self._max = max_new_tokens
        self._min = min_new_tokens
        self._stops = stops
        self.live: list[Beam] = [Beam()]
        self.ended: list[Beam] = []
        """The best that have ended, the best first."""
        self.done = False

    @property
    def num_candidates(self) -> int:
        """How many of each beam's best next tokens `advance` needs."""
        forbidden = len(self._stops) if self._min else 0
        return self._num_kept + forbidden

    @property
    def _num_kept(self) -> int:
        return max(2, 1 + len(self._stops)) * self._width

    def advance(self, rows: Sequence[Scored]) -> None:
        """Extends all beams by one token. `rows[i]` belongs to `live[i]`."""
        length = len(self.live[0].tokens) + 1
        found = [
            (beam.total + logprob, -at, -token, beam, logprob, row)
            for at, (beam, row) in enumerate(zip(self.live, rows, strict=True))
            for token, logprob in row
            if logprob > -math.inf and (length > self._min or token not in self._stops)
        ]
        found.sort(key=lambda each: each[:3], reverse=True)
        going: list[Beam] = []
        for rank, (_, _, negative, beam, logprob, row) in enumerate(found[: self._num_kept]):
            token = -negative
            longer = beam.extended(token, logprob, row)
            if token not in self._stops and length < self._max:
                going.append(longer)
            elif rank < self._width:
                self.ended.append(longer)
        self.ended.sort(key=lambda each: each.score, reverse=True)
        del self.ended[self._width :]
        self.live = going[: self._width]
        full = len(self.ended) == self._width
        self.done = not self.live or (full and self.live[0].score <= self.ended[-1].score)

    def is_stop(self, token: int) -> bool:
        return token in self._stops

    def best(self, count: int) -> list[Beam]:
        """The answers, the best first."""
        return (self.ended or self.live)[:count]


def check(request: Request, sampling: SamplingParams, num_stops: int) -> None:
    """Raises `InvalidRequest` for parameters that a beam search does not support."""
    refused = [
        ("penalties", sampling.penalised),
        ("stop strings", bool(sampling.stop or sampling.stop_regex)),
        ("logit_bias", sampling.logit_bias is not None),
        ("allowed_token_ids", sampling.allowed_token_ids is not None),
        ("bad_words", bool(sampling.bad_words or request.bad_words)),
        ("a grammar", sampling.grammar is not None),
        ("a logit processor", sampling.logit_processor is not None),
        ("prompt log-probabilities", request.logprobs is not None and request.logprobs.start >= 0),
        ("hidden states", bool(request.hidden_states)),
        ("a session", request.session is not None),
    ]
    for what, given in refused:
        if given:
            raise InvalidRequest(
                what=f"beam search goes without {what}",
                why="beams are ranked by the model's own probabilities",
                fix="leave out one of the two",
                param="beam_width",
            )
    width = sampling.beam_width
    if sampling.n > width:
        raise InvalidRequest(
            what=f"n is {sampling.n}, beam_width is {width}",
            why="a search has as many answers as beams",
            fix=f"send n of at most {width}",
            param="n",
        )
    if sampling.max_new_tokens < 1:
        raise InvalidRequest(
            what=f"max_new_tokens is {sampling.max_new_tokens}, beam_width is {width}",
            why="there are no answers to choose from",
            fix="ask for at least one token, or leave beam_width out",
            param="max_new_tokens",
        )
    if max(2, 1 + num_stops) * width + num_stops > MAX_CANDIDATES:
        raise InvalidRequest(
            what=f"{width} beams with {num_stops} stop tokens are too many",
            why=f"a step looks at {MAX_CANDIDATES} tokens a beam",
            fix="send fewer beams or stop tokens",
            param="beam_width",
        )


class Search:
    """A search under way, and the streams that wait for its answers."""

    def __init__(
        self,
        search: BeamSearch,
        streams: Sequence[DeltaStream],
        prompt: Ids,
        ask: Ask,
        answered: Callable[[int, Delta], None],
        ended: Callable[[], None],
    ) -> None:
        """`answered` is called with every answer and the index of its stream; `ended` is called once, after the last
        answer."""
        self.rid = streams[0].rid
        self.tenant = streams[0].tenant
        self._search = search
        self._streams = streams
        self._prompt = prompt
        self._ask = ask
        self._answered = answered
        self._ended = ended
        self._cached = 0
        self._aborted = ""
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._done)

    def abort(self, reason: str) -> None:
        """Ends it; its streams end with `abort`."""
        self._aborted = reason
        self._task.cancel()

    def give_up(self) -> None:
        """Ends the search if no stream is waiting any more."""
        if all(stream.ended for stream in self._streams):
            self._task.cancel()

    async def _run(self) -> None:
        while not self._search.done:
            problem = await self._step()
            if problem is not None:
                self._end_all(problem)
                return
        wanted = len(self._streams)
        best = self._search.best(wanted)
        if len(best) < wanted:
            raise InvalidRequest(
                what=f"n is {wanted}, the search found {len(best)} answers",
                why="there are no more of that length in the model's vocabulary",
                fix="send a smaller n, or let the answers be longer",
                param="n",
            )
        for at, beam in enumerate(best):
            self._answered(at, self._delta(at, beam))

    def _done(self, task: asyncio.Future[None]) -> None:
        """Called when the search has ended for any reason, perhaps before it began."""
        if task.cancelled():
            if self._aborted:
                self._end_all(End(reason="abort", message=self._aborted, status=GIVEN_UP, code="aborted"))
        elif (error := task.exception()) is not None:
            if not isinstance(error, BoughError):
                _log.error("a beam search failed", exc_info=error)
                error = RequestFailed(what="the beam search failed", fix="the server's log says why")
            for stream in self._streams:
                stream.fail(error)
        self._ended()

    async def _step(self) -> End | None:
        """Extends every beam by one token. Returns the end of a request that failed, if one did."""
        beams = self._search.live
        prompts = [np.concatenate([self._prompt, np.asarray(beam.tokens, np.int32)]) for beam in beams]
        deltas = await self._ask(prompts)
        rows: list[Scored] = []
        for delta in deltas:
            end = delta.end
            if end is None or end.reason in ("abort", "error") or delta.logprobs is None:
                return end or End(reason="error", message="the search was cut off", status=500)
            if not self._cached:
                self._cached = end.cached_tokens
            rows.append([(int(token), float(score)) for token, score in delta.logprobs.top[0]])
        self._search.advance(rows)
        return None

    def _end_all(self, end: End) -> None:
        for at, stream in enumerate(self._streams):
            self._answered(at, Delta(id=stream.id, end=end))

    def _delta(self, at: int, beam: Beam) -> Delta:
        last = beam.tokens[-1]
        stopped = self._search.is_stop(last)
        end = End(
            reason="stop" if stopped else "length",
            matched=last if stopped else None,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(beam.tokens),
            cached_tokens=min(self._cached, len(self._prompt)),
        )
        scores = TokenLogprobs(token_ids=list(beam.tokens), logprobs=list(beam.logprobs), top=list(beam.tops))
        return Delta(id=self._streams[at].id, tokens=pack_ids(beam.tokens), end=end, logprobs=scores)


def spoken(delta: Delta, request: Request, prompt: Ids, tokenizer: Tokenizer | None, text: TextSpec | None) -> Delta:
    """A beam's answer with its text, as the detokenizer would send it. `text` None: tokens only."""
    scores, spec = delta.logprobs, request.logprobs
    if scores is not None:
        top = [row[: spec.top] for row in scores.top] if spec is not None and spec.top else []
        scores = None if spec is None else TokenLogprobs(scores.token_ids, scores.logprobs, top=top)
    if tokenizer is None or text is None or delta.end is None:
        return msgspec.structs.replace(delta, logprobs=scores)
    if scores is not None and text.logprob_text:
        scores.text = [tokenizer.token_text(each) for each in scores.token_ids]
        scores.top_text = [[tokenizer.token_text(token) for token, _ in row] for row in scores.top]
    parser = ResponseParser.of(text) if text.reasoning_parser or text.tool_parser else None
    ids = unpack_ids(delta.tokens)
    said = _text(ids.tolist(), delta.end, prompt, tokenizer, text, parser)
    events: list[ParsedEvent] = [*parser.feed(said), *parser.finish()] if parser is not None else []
    inside = request.reasoning_forced if parser is None else parser.in_reasoning
    reasoning, _ = reasoning_of(ids, request.reasoning_end, opened=inside)
    end = msgspec.structs.replace(delta.end, reasoning_tokens=reasoning)
    return msgspec.structs.replace(delta, text=said, events=events, logprobs=scores, end=end)


def _text(
    ids: list[int], end: End, prompt: Ids, tokenizer: Tokenizer, spec: TextSpec, parser: ResponseParser | None
) -> str:
    """The text of the tokens, without the stop token and with the special tokens that the parser reads."""
    markers = parser.markers if parser is not None else ()
    if end.reason == "stop" and not spec.no_stop_trim and tokenizer.token_text(ids[-1]) not in markers:
        ids = ids[:-1]
    silent = tokenizer.silent_ids(spec.skip_special_tokens, tokenizer.special_among(markers))
    tail, answer = ([each for each in part if each not in silent] for part in (prompt[-TAIL_IDS:].tolist(), ids))
    flags = (False, spec.spaces_between_special_tokens)
    return tokenizer.decode([*tail, *answer], *flags).removeprefix(tokenizer.decode(tail, *flags))
