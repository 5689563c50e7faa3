"""The way into the engine, for one API process: requests in, deltas out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import msgspec
import numpy as np

from bough.core.errors import BoughError, Conflict, DeadlineExceeded, InvalidRequest, Unavailable
from bough.core.messages import (
    WORKER_SHIFT,
    Abort,
    AbortByName,
    Delta,
    Deltas,
    FlushCache,
    Generate,
    GetInfo,
    Ids,
    LogprobSpec,
    Pause,
    Profile,
    Reply,
    Resume,
    TextSpec,
    ToApi,
    ToEngine,
    Tokens,
    joined_namespace,
    pack_ids,
    plain_deltas,
)
from bough.core.sampling import SamplingParams
from bough.intake import beams
from bough.intake.beams import Search
from bough.intake.gate import Gate, IntakeStats, Place
from bough.intake.joins import PREFIX as JOINED, Joins
from bough.intake.limits import Limits
from bough.intake.request import Request, pieces
from bough.intake.sessions import SessionParams, Sessions, Turn
from bough.intake.stream import Stream
from bough.ipc import AsyncInbox, Endpoints, Outbox, read_status
from bough.observability.requests import RequestMeter
from bough.observability.trace import CURRENT
from bough.tokenizer import Tokenizer, TokenizerPool

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
_NEVER = 2**31 - 1
"""As `TextSpec.every`: only at the end."""
_TAIL_IDS = 8
_WATCH_EVERY_S = 0.25


class Intake:
    """Submits requests and hands out their news. Everything runs in the event loop that `start` was called in."""

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        tokenizer: Tokenizer | None,
        context_length: int,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        worker: int = 0,
        gate: Gate | None = None,
        pools: bool | None = None,
        processors: frozenset[str] | None = None,
    ) -> None:
        """`eos_ids`: ids that end an answer besides the tokenizer's. `tokenizer` None: token ids only, both ways.
        `pools`: whether the model pools; requests of the other kind are refused. `processors`: the logit processors
        that requests may name. None: any are sent."""
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.stats = IntakeStats()
        self.meter: RequestMeter | None = None
        """Hears of every request, where somebody counts."""
        self._endpoints = endpoints
        self._worker = worker
        self._gate = gate
        self._pool = TokenizerPool(tokenizer) if tokenizer is not None else None
        self._eos_ids = tuple(dict.fromkeys([*(tokenizer.eos_ids if tokenizer else ()), *eos_ids]))
        # Not from 1: the engine may still hold requests of a predecessor in this place.
        self._numbers = itertools.count(secrets.randbits(WORKER_SHIFT - 2))
        self._streams: dict[int, Stream] = {}
        self._places: dict[int, Place] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._gone: BoughError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._limits = Limits(context_length, vocab_size, tokenizer)
        self.pools = pools
        self._processors = processors
        self.sessions = Sessions(self.abort)
        self.joins = Joins(self.call, tokenizer)
        self._searches: set[Search] = set()
        self._turns: dict[int, tuple[SessionParams, Turn]] = {}

    @classmethod
    def from_facts(
        cls,
        endpoints: Endpoints,
        facts: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        *,
        worker: int = 0,
        gate: Gate | None = None,
    ) -> Intake:
        """From what the engine said when it was ready."""
        return cls(
            endpoints,
            tokenizer=tokenizer,
            context_length=facts["context_length"],
            vocab_size=facts["vocab_size"],
            eos_ids=facts["eos_ids"],
            worker=worker,
            gate=gate,
            pools=bool(facts["pooling"]) if "pooling" in facts else None,
            processors=frozenset(facts["logit_processors"]) if "logit_processors" in facts else None,
        )

    async def start(self) -> None:
        """Opens the channels. Call once, in the loop that will use the intake."""
        self._inbox: AsyncInbox[ToApi] = AsyncInbox(self._endpoints.api(self._worker), ToApi)
        self._outbox = Outbox(self._endpoints.engine)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Gives up what is left and closes the channels."""
        self.fail_all(Unavailable(what="the server is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._inbox.close()
        self._outbox.close()
        if self._pool is not None:
            self._pool.close()

    # -- requests --------------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> list[Stream]:
        """Tokenises, checks and sends a request; one stream for each of its `n` answers.

        Raises `InvalidRequest`, `PromptTooLong`, `Overloaded` or `Unavailable` before anything was sent.
        """
        return (await self.submit_batch([request]))[0]

    async def submit_batch(self, requests: Sequence[Request]) -> list[list[Stream]]:
        """Like `submit`, for many at once: all of them, or an error and none.

        Many token ids are checked and sent piece by piece, so that the engine begins with the first while the last are
        still read; those that were sent before one is refused are given up.
        """
        self._check_alive()
        self._check_kind(requests)
        self._check_sessions(requests)
        self._check_processors(requests)
        places = self._admit(requests)
        streams: list[list[Stream]] = []
        try:
            for piece in pieces(requests):
                await self._submit_piece(piece, places, streams)
        except BaseException:
            for stream in itertools.chain.from_iterable(streams):
                stream.abort("a request of the same batch was refused")
            raise
        finally:
            for place in places:
                place.end()
        return streams

    async def _submit_piece(
        self, requests: Sequence[Request], places: list[Place], streams: list[list[Stream]]
    ) -> None:
        prompts = await self._prompts(requests)
        ready = [self._limits.fitted(request, prompt) for request, prompt in zip(requests, prompts, strict=True)]
        bad_words = [await self._bad_words(request) for request in requests]
        self._check_alive()
        outgoing: list[Generate] = []
        for request, prompt, sampling, words in zip(requests, prompts, ready, bad_words, strict=True):
            if words:
                sampling = msgspec.structs.replace(sampling, bad_words=words)
            if sampling.beam_width == 1:
                streams.append(self._begin(request, prompt, sampling, places, outgoing))
            else:
                streams.append(self._search(request, prompt, sampling, places))
        self._outbox.send_all(outgoing)

    async def collect(self, request: Request) -> list[Delta]:
        """Submits and awaits whole answers, one delta each."""
        streams = await self.submit(request)
        try:
            return [await stream.collect() for stream in streams]
        finally:
            for stream in streams:
                stream.abort()

    def abort(self, rid: str = "", *, reason: str = "aborted by request") -> int:
        """Ends the requests of that name (all, if empty); their streams end with reason `abort`. Returns how many."""
        searches = [search for search in self._searches if not rid or search.rid == rid]
        for search in searches:
            search.abort(reason)
        inner = {search.rid for search in searches}
        found = [each for each in self._streams.values() if (not rid or each.rid == rid) and each.rid not in inner]
        for stream in found:
            self._outbox.send(Abort(stream.id, reason))
        return len(found) + len(searches)

    async def abort_everywhere(self, rid: str = "", *, reason: str = "aborted by request") -> int:
        """Like `abort`, for requests of every API worker. Returns how many."""
        if rid and any(search.rid == rid for search in self._searches):
            return self.abort(rid, reason=reason)  # between two steps of a search the engine knows nothing of it
        told = await self.call(lambda call: AbortByName(call, rid, reason))
        return int(told["aborted"])

    @property
    def num_live(self) -> int:
        return len(self._streams)

    def fail_all(self, error: BoughError) -> None:
        """Every waiting request and call gets `Unavailable`, and so does whoever comes later.

        An error of another kind is the launcher's cause: it is for the log, not for clients.
        """
        if not isinstance(error, Unavailable):
            error = Unavailable(what="the engine has stopped", fix="the server's log says why")
        self._gone = error
        for stream in list(self._streams.values()):
            self._forget(stream.id, "error")
            stream.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._calls.clear()

    # -- control ---------------------------------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        return await self.call(FlushCache, timeout_s)

    async def info(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        return await self.call(GetInfo, timeout_s)

    async def pause(self, mode: str = "abort", timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        if mode not in ("abort", "retract", "in_place"):
            raise InvalidRequest(
                what=f"mode is {mode[:40]!r}", why="it must be abort, retract or in_place", fix="send a valid mode"
            )
        return await self.call(lambda call: Pause(call, mode), timeout_s)  # type: ignore[arg-type]

    async def resume(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        return await self.call(Resume, timeout_s)

    async def profile(
        self, *, start: bool, output_dir: str = "", num_steps: int = 0, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        message: Callable[[int], ToEngine] = lambda call: Profile(
            call=call, start=start, output_dir=output_dir, num_steps=num_steps
        )
        return await self.call(message, timeout_s)

    async def call(self, message: Callable[[int], ToEngine], timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Sends a control message made with its call's id and awaits the answer.

        Raises `Conflict` with the engine's reason, `DeadlineExceeded` or `Unavailable`.
        """
        self._check_alive()
        number = self._new_id()
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._outbox.send(message(number))
        try:
            reply = await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                what=f"the engine did not answer within {timeout_s:g} s",
                why="it is busy with a long step, or stuck",
                fix="try again",
            ) from None
        finally:
            self._calls.pop(number, None)
        if reply.error:
            raise Conflict(what=reply.error)
        return reply.body

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _check_kind(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self.pools is not None and self.pools != bool(request.pool):
                raise InvalidRequest(
                    what="the served model does not generate" if self.pools else "the served model does not pool",
                    why="it makes embeddings or scores of whole texts" if self.pools else "it is served to generate",
                    fix="use /v1/embeddings, /v1/classify or /v1/rerank"
                    if self.pools
                    else "serve an embedding, reranking or classification model, or start with --is-embedding",
                )

    def _check_processors(self, requests: Sequence[Request]) -> None:
        for request in requests:
            name = request.sampling.logit_processor
            if name is not None and self._processors is not None and name not in self._processors:
                raise InvalidRequest(
                    what=f"there is no logit processor {name[:60]!r}",
                    why=f"the server has: {', '.join(sorted(self._processors)) or 'none'}",
                    fix="name one of them, or start the server with --logit-processors name=module:attribute",
                    param="logit_processor",
                )

    def _check_sessions(self, requests: Sequence[Request]) -> None:
        """Whoever goes on from a request is one request itself."""
        if any(each.session is not None and not _joined(each) for each in requests) and (
            len(requests) > 1 or requests[0].sampling.n > 1
        ):
            raise InvalidRequest(
                what="a session goes on with one request at a time",
                why="several prompts, or n above 1, would have one name",
                fix="send them one by one",
                param="session_params",
            )

    def _new_id(self) -> int:
        return (self._worker << WORKER_SHIFT) | next(self._numbers)

    def _admit(self, requests: Sequence[Request]) -> list[Place]:
        if self._gate is None:
            return []
        places: list[Place] = []
        try:
            for request in requests:
                tokens = len(request.prompt) if not isinstance(request.prompt, str) else len(request.prompt) // 3 + 1
                for _ in range(max(1, min(max(request.sampling.n, request.sampling.beam_width), 64))):
                    places.append(self._gate.admit(requests=1, tokens=tokens))
        except BaseException:
            for place in places:
                place.end()
            raise
        return places

    async def _prompts(self, requests: Sequence[Request]) -> list[Ids]:
        texts: dict[bool, list[int]] = {True: [], False: []}
        prompts: list[Ids | None] = [None] * len(requests)
        before = [await self._before(each) for each in requests]
        for at, request in enumerate(requests):
            if isinstance(request.prompt, str):
                self._limits.check_text(request.prompt)
                texts[request.add_special_tokens and not _some(before[at])].append(at)
            else:
                prompts[at] = self._limits.ids_of(request.prompt)
        for special, places in texts.items():
            if places:
                assert self._pool is not None
                encoded = await self._pool.encode_batch([str(requests[at].prompt) for at in places], special)
                for at, ids in zip(places, encoded, strict=True):
                    prompts[at] = np.asarray(ids, np.int32)
        return [
            prompt if not _some(prefix) else np.concatenate([prefix, prompt])
            for prefix, prompt in zip(before, prompts, strict=True)
            if prompt is not None
        ]

    async def _before(self, request: Request) -> Ids | None:
        """What a session has before the request's own tokens."""
        if _joined(request):
            assert request.session is not None
            return await self.joins.ids(request.namespace, request.session.id)
        return None if request.session is None else self.sessions.prefix(request.session)

    async def _bad_words(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the bad words, each at a text's start and after a space."""
        if not request.bad_words:
            return request.sampling.bad_words
        if self._pool is None:
            raise InvalidRequest(
                what="bad_words were given", why="the server has no tokenizer", fix="remove them", param="bad_words"
            )
        variants = [form for word in request.bad_words for form in (word, " " + word.lstrip())]
        encoded = await self._pool.encode_batch(variants, add_special_tokens=False)
        found = [tuple(ids) for ids in encoded if ids]
        return tuple(dict.fromkeys([*request.sampling.bad_words, *found]))

    def _search(self, request: Request, prompt: Ids, sampling: SamplingParams, places: list[Place]) -> list[Stream]:
        """Begins a beam search: its steps are requests of their own, its answers come all at once."""
        stops = frozenset([*(() if sampling.ignore_eos else self._eos_ids), *sampling.stop_token_ids])
        beams.check(request, sampling, len(stops))
        rid = request.rid or secrets.token_hex(16)
        held = [places.pop(0) for _ in range(min(len(places), sampling.beam_width))]
        search = beams.BeamSearch(
            width=sampling.beam_width,
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens,
            stops=stops,
        )
        inner = replace(
            request,
            rid=rid,
            stream=False,
            want_text=False,
            logprobs=LogprobSpec(top=min(search.num_candidates, self.vocab_size)),
            reasoning_end=(),
        )
        one = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)

        async def ask(prompts: Sequence[Ids]) -> list[Delta]:
            outgoing: list[Generate] = []
            asked = [self._begin(inner, each, one, [], outgoing, metered=False)[0] for each in prompts]
            self._outbox.send_all(outgoing)
            try:
                return [await stream.collect() for stream in asked]
            finally:
                for stream in asked:
                    stream.abort()

        def finished(at: int, delta: Delta) -> None:
            self._searches.discard(running)
            for place in held:
                place.end()
            if self.meter is not None:
                self.meter.news(delta.id, len(delta.tokens) // 4, delta.end)
            text = self._text_spec(request, sampling, prompt)
            streams[at].deliver(beams.spoken(delta, request, prompt, self.tokenizer, text))

        def give_up(request_id: int, reason: str) -> None:
            if self.meter is not None:
                self.meter.given_up(request_id, "given_up")
            running.give_up()
            if all(stream.ended for stream in streams):
                self._searches.discard(running)
                for place in held:
                    place.end()

        streams = [Stream(self._new_id(), rid, index, prompt, give_up) for index in range(sampling.n)]
        if self.meter is not None:
            for stream in streams:
                self.meter.submitted(stream.id, len(prompt))
        running = Search(search, streams, prompt, ask, finished)
        self._searches.add(running)
        return streams

    def _begin(
        self,
        request: Request,
        prompt: Ids,
        sampling: SamplingParams,
        places: list[Place],
        outgoing: list[Generate],
        *,
        metered: bool = True,
    ) -> list[Stream]:
        """The request's streams; what is to be sent for them is put to `outgoing`."""
        rid = request.rid or secrets.token_hex(16)
        turn = None
        namespace = request.namespace
        if request.session is not None and _joined(request):
            namespace = joined_namespace(namespace, request.session.id)
        elif request.session is not None:
            turn = self.sessions.begin(request.session, rid, prompt)
        packed = pack_ids(prompt)
        text = self._text_spec(request, sampling, prompt)
        now = time.time()
        trace = CURRENT.get()
        streams: list[Stream] = []
        for index in range(sampling.n):
            stream = Stream(self._new_id(), rid, index, prompt, self._give_up)
            if trace is not None and trace.submitted(stream.id, rid, len(prompt)):
                stream.trace = trace
            seed = None if sampling.seed is None else (sampling.seed + index + 2**63) % 2**64 - 2**63
            each = sampling if sampling.n == 1 else msgspec.structs.replace(sampling, n=1, seed=seed)
            message = Generate(
                id=stream.id,
                rid=rid,
                prompt=packed,
                sampling=each,
                text=text,
                stream=request.stream or bool(text is not None and (sampling.stop or sampling.stop_regex)),
                logprobs=request.logprobs,
                hidden_states=request.hidden_states,
                namespace=namespace,
                priority=request.priority,
                deadline_s=request.deadline_s,
                arrived_s=now,
                eos_ids=() if sampling.ignore_eos else self._eos_ids,
                follows=request.follows,
                pool=request.pool,
                second_at=request.second_at,
                reasoning_end=request.reasoning_end,
                reasoning_open=request.reasoning_forced,
                thinking_budget=request.thinking_budget,
                trace=stream.trace is not None,
                keep=bool(request.rid) and sampling.n == 1 and sampling.max_new_tokens == 0 and not request.pool,
            )
            outgoing.append(message)
            self._streams[stream.id] = stream
            if turn is not None and request.session is not None:
                self._turns[stream.id] = (request.session, turn)
            if places:
                self._places[stream.id] = places.pop(0)
            if self.meter is not None and metered:
                self.meter.submitted(stream.id, len(prompt))
            self.stats.submitted += 1
            self.stats.prompt_tokens += len(prompt)
            self.stats.live = len(self._streams)
            streams.append(stream)
        return streams

    def _text_spec(self, request: Request, sampling: SamplingParams, prompt: Ids) -> TextSpec | None:
        tokenizer = self.tokenizer
        if tokenizer is None or request.pool:
            return None
        if not request.want_text and not (sampling.stop or sampling.stop_regex):
            return None
        tail = prompt[-_TAIL_IDS:] if tokenizer.codebook.form == "other" else prompt[:0]
        return TextSpec(
            stop=sampling.stop,
            stop_regex=sampling.stop_regex,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            logprob_text=request.logprob_text,
            reasoning_parser=request.reasoning_parser,
            reasoning_forced=request.reasoning_forced,
            stream_reasoning=request.stream_reasoning,
            tool_parser=request.tool_parser,
            tools=request.tools,
            every=request.every if request.stream else _NEVER,
            prompt_tail=pack_ids(tail),
        )

    def _give_up(self, request_id: int, reason: str) -> None:
        if request_id in self._streams:
            self._forget(request_id, "given_up")
            self._outbox.send(Abort(request_id, reason))

    def _forget(self, request_id: int, how: str) -> None:
        del self._streams[request_id]
        if request_id in self._turns:
            params, turn = self._turns.pop(request_id)
            self.sessions.end(params, turn, failed=how == "error")
        place = self._places.pop(request_id, None)
        if place is not None:
            place.end()
        if self.meter is not None:
            self.meter.given_up(request_id, how)  # unless its end has been heard of
        self.stats.ended[how] += 1
        self.stats.live = len(self._streams)

    async def _read(self) -> None:
        while not self._inbox.closed:
            for message in await self._inbox.drain():
                match message:
                    case Deltas(deltas):
                        self._hear(deltas)
                    case Tokens():
                        self._hear(plain_deltas(message))
                    case Reply(call=call):
                        answer = self._calls.get(call)
                        if answer is not None and not answer.done():
                            answer.set_result(message)

    def _hear(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.id)
            if stream is not None:
                self._deliver(stream, delta)

    def _deliver(self, stream: Stream, delta: Delta) -> None:
        end = delta.end
        if stream.id in self._turns:
            self._turns[stream.id][1].add(delta.tokens)
        if end is not None and stream.trace is not None:
            stream.trace.ended(stream.id, end)
        if self.meter is not None:
            self.meter.news(stream.id, len(delta.tokens) // 4, end)
        if end is not None:
            self._forget(stream.id, end.reason)
            self.stats.completion_tokens += end.completion_tokens
            self.stats.cached_tokens += end.cached_tokens
        elif not stream.first_s and stream.id in self._places:
            self._places[stream.id].began()
        stream.deliver(delta)

    async def _watch(self) -> None:
        """Notices that the launcher has declared the server dead."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                status = read_status(self._endpoints)
                if status.phase == "failed" and self._gone is None:
                    self.fail_all(BoughError(what=status.error))


def _joined(request: Request) -> bool:
    """Does it go on from a joined context?"""
    return request.session is not None and request.session.id.startswith(JOINED)


def _some(ids: Ids | None) -> TypeGuard[Ids]:
    return ids is not None and len(ids) > 0
