"""The engine client of one API process: requests in, deltas out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from bough.config.concerns import ParallelConfig
from bough.core.errors import BoughError, Conflict, DeadlineExceeded, InvalidRequest, Unavailable
from bough.core.messages import (
    REPLICA_SHIFT,
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
    ToApi,
    ToEngine,
    Tokens,
    home_replica,
    plain_deltas,
)
from bough.core.sampling import SamplingParams
from bough.engine_client import beams
from bough.engine_client.beams import Search
from bough.engine_client.compose import compose, for_answer, text_spec
from bough.engine_client.gate import EngineClientStats, Quota, WorkGate, WorkHold, num_tokens
from bough.engine_client.joins import Joins, session_namespace
from bough.engine_client.limits import RequestLimits
from bough.engine_client.names import random_name
from bough.engine_client.prepare import Preparer, goes_on_from_join
from bough.engine_client.prompted import Prompted
from bough.engine_client.replicas import Replicas, merged
from bough.engine_client.request import Request, pieces
from bough.engine_client.sessions import SessionParams, Sessions, SessionTurn
from bough.engine_client.stream import DeltaStream
from bough.ipc import AsyncInbox, Endpoints, read_status
from bough.lora.registry import AdapterRegistry
from bough.multimodal.media import Lease, Media
from bough.observability.requests import RequestMeter
from bough.observability.trace import CURRENT
from bough.tokenizer import Tokenizer, TokenizerPool

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
_WATCH_EVERY_S = 0.25


class EngineClient:
    """Submits requests and returns their delta streams. Everything runs in the event loop in which `start` was
    called."""

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        tokenizer: Tokenizer | None,
        context_length: int,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        worker: int = 0,
        gate: WorkGate | None = None,
        pools: bool | None = None,
        processors: frozenset[str] | None = None,
        adapters: Sequence[str] = (),
        truncate: bool = False,
        parallel: ParallelConfig | None = None,
        media: Media | None = None,
    ) -> None:
        """`eos_ids`: ids that end an answer besides the tokenizer's. `tokenizer` None: token ids only, both ways.
        `pools`: whether the model pools; requests of the other kind are refused. `processors`: the logit processors
        that requests may name. None: any are sent. `adapters`: names that requests may use, in the order of their numbers.
        `truncate`: prompts that are too long are truncated instead of refused. `parallel`: how many engines there are, and
        how requests are spread over them; None: there is one. `media`: prepares images, video and audio; None: the model
        takes text only."""
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.stats = EngineClientStats()
        self.meter: RequestMeter | None = None
        """Called with every request, for metrics."""
        self.quota: Quota | None = None
        """Checks the limits of tenants before a request is accepted."""
        self._endpoints = endpoints
        self._worker = worker
        self._parallel = parallel or ParallelConfig()
        self._gate = gate
        self.tokenizers = TokenizerPool(tokenizer) if tokenizer is not None else None
        self._eos_ids = tuple(dict.fromkeys([*(tokenizer.eos_ids if tokenizer else ()), *eos_ids]))
        # Not from 1: the engine may still hold requests of a predecessor in this place.
        self._numbers = itertools.count(secrets.randbits(REPLICA_SHIFT - 2))
        self._streams: dict[int, DeltaStream] = {}
        self._places: dict[int, WorkHold] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._gone: BoughError | None = None
        self.pools = pools
        self.sessions = Sessions(self.abort)
        self.joins = Joins(self.call, tokenizer, self._parallel.num_schedulers)
        self._adapters = AdapterRegistry(adapters)
        limits = RequestLimits(context_length, vocab_size, tokenizer, truncate=truncate)
        self._preparer = Preparer(
            limits, self.tokenizers, self.sessions, self.joins,
            pools=pools, processors=processors, adapters=self._adapters, media=media,
        )  # fmt: skip
        self.media = media
        self._leases: dict[int, Lease] = {}
        """By stream: the media that it uses."""
        self._searches: set[Search] = set()
        self._names: Counter[tuple[str, str]] = Counter()
        """How many streams each name has, by tenant."""
        self._unpaid: dict[int, str] = {}
        """Aborted requests whose end has not arrived yet, with their tenants: the end contains their usage."""
        self._turns: dict[int, tuple[SessionParams, SessionTurn]] = {}

    @classmethod
    def from_facts(
        cls,
        endpoints: Endpoints,
        facts: Mapping[str, Any],
        tokenizer: Tokenizer | None,
        *,
        worker: int = 0,
        gate: WorkGate | None = None,
        truncate: bool = False,
        parallel: ParallelConfig | None = None,
        media: Media | None = None,
    ) -> EngineClient:
        """Makes a client from the facts that the engine reported when it was ready."""
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
            adapters=facts.get("adapters", ()),
            truncate=truncate,
            parallel=parallel,
            media=media,
        )

    async def start(self) -> None:
        """Opens the channels. Call once, in the loop that will use the engine client."""
        self._inbox: AsyncInbox[ToApi] = AsyncInbox(self._endpoints.api(self._worker), ToApi, self._take)
        self._engines = self._endpoints.replicas(self._parallel.num_schedulers)
        self._replicas = Replicas.connect(self._engines, self._parallel.load_balance_method)
        if self._worker:  # an earlier process in this place may have died and left requests behind
            for number in range(len(self._replicas)):
                ended = AbortByName(self._new_id(number), "", "its API worker has ended", worker=self._worker)
                self._replicas.send(ended, number)
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Aborts the remaining requests and closes the channels."""
        self.fail_all(Unavailable(what="the server is shutting down"))
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self._inbox.close()
        self._replicas.close()
        if self.tokenizers is not None:
            self.tokenizers.close()
        if self.media is not None:
            self.media.close()

    # -- requests --------------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> list[DeltaStream]:
        """Tokenises, checks and sends a request; one stream for each of its `n` answers.

        Raises `InvalidRequest`, `PromptTooLong`, `Overloaded` or `Unavailable` before anything was sent.
        """
        return (await self.submit_batch([request]))[0]

    async def submit_batch(self, requests: Sequence[Request]) -> list[list[DeltaStream]]:
        """Like `submit`, for many requests: submits all of them, or none and raises. Large batches of token ids are
        checked and sent in pieces, so that the engine can begin with the first; if a later one is refused, those
        already sent are aborted.
        """
        self._check_alive()
        self._preparer.check(requests)
        streams: list[list[DeltaStream]] = []
        places = self._admit(requests)
        with self._charged(requests, places, streams), self._named(requests):
            try:
                for piece in pieces(requests):
                    await self._submit_piece(piece, places, streams)
            except BaseException:
                for stream in itertools.chain.from_iterable(streams):
                    stream.abort("a request of the same batch was refused")
                streams.clear()
                raise
        return streams

    async def _submit_piece(
        self, requests: Sequence[Request], places: list[WorkHold], streams: list[list[DeltaStream]]
    ) -> None:
        prompts = await self._preparer.prompts(requests)
        begun = 0
        try:
            samplings = await self._preparer.samplings(requests, [prompt.ids for prompt in prompts])
            self._check_alive()
            outgoing: list[Generate] = []
            for request, prompt, sampling in zip(requests, prompts, samplings, strict=True):
                if sampling.beam_width == 1:
                    streams.append(self._begin(request, prompt, sampling, places, outgoing))
                else:
                    streams.append(self._search(request, prompt, sampling, places))
                begun += 1
        except BaseException:
            for prompt in prompts[begun:]:
                prompt.let_go()
            raise
        self._replicas.send_all(outgoing)

    async def collect(self, request: Request) -> list[Delta]:
        """Submits and awaits complete answers, one delta each."""
        streams = await self.submit(request)
        try:
            return [await stream.collect() for stream in streams]
        finally:
            for stream in streams:
                stream.abort()

    def abort(self, rid: str = "", tenant: str | None = None, *, reason: str = "aborted by request") -> int:
        """Ends the requests of that name (all, if empty) and tenant (all, if None); their streams end with reason `abort`.
        Returns how many."""

        def meant(each: DeltaStream | Search) -> bool:
            return (not rid or each.rid == rid) and (tenant is None or each.tenant == tenant)

        searches = [search for search in self._searches if meant(search)]
        for search in searches:
            search.abort(reason)
        inner = {(search.tenant, search.rid) for search in searches}
        found = [each for each in self._streams.values() if meant(each) and (each.tenant, each.rid) not in inner]
        for stream in found:
            self._replicas.send(Abort(stream.id, reason), home_replica(stream.id))
        return len(found) + len(searches)

    async def abort_everywhere(
        self, rid: str = "", tenant: str | None = None, *, reason: str = "aborted by request"
    ) -> int:
        """Like `abort`, for requests of every API worker. Returns how many."""
        if rid and any(each.rid == rid and tenant in (None, each.tenant) for each in self._searches):
            return self.abort(
                rid, tenant, reason=reason
            )  # between two steps of a search the engine knows nothing of it
        outcome = await self.call(lambda call: AbortByName(call, rid, reason, tenant))
        return int(outcome["aborted"])

    @property
    def num_live(self) -> int:
        return len(self._streams)

    def fail_all(self, error: BoughError) -> None:
        """Makes every waiting and later request and call raise `Unavailable`. An error of another kind is the
        launcher's reason, which is logged and not shown to clients.
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

    async def infos(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[int, dict[str, Any]]:
        """The report of each engine, by its index."""
        alive = self._replicas.alive
        bodies = await asyncio.gather(*(self.call(GetInfo, timeout_s, replica=each) for each in alive))
        return dict(zip(alive, bodies, strict=True))

    async def pause(self, mode: str = "abort", timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        if mode not in ("abort", "retract", "in_place"):
            raise InvalidRequest(
                what=f"mode is {mode[:40]!r}",
                why="it must be abort, retract or in_place",
                fix="send a valid mode",
                param="mode",
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

    async def call(
        self, message: Callable[[int], ToEngine], timeout_s: float = CALL_TIMEOUT_S, *, replica: int | None = None
    ) -> dict[str, Any]:
        """Sends a control message made with its call's id and awaits the answer. Without `replica` all engines get it, and
        their answers come as one (`replicas.merged`).

        Raises `Conflict` with the engine's reason, `DeadlineExceeded` or `Unavailable`.
        """
        self._check_alive()
        if replica is None:
            alive = self._replicas.alive
            if len(alive) > 1:
                return merged(await asyncio.gather(*(self.call(message, timeout_s, replica=each) for each in alive)))
            replica = alive[0] if alive else 0
        number = self._new_id(replica)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._replicas.send(message(number), replica)
        try:
            async with asyncio.timeout(timeout_s):  # `wait_for` may swallow a cancellation that comes with the answer
                reply = await answer
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
            raise self._gone.with_traceback(
                None
            )  # a traceback would grow with every caller, and keep their requests alive

    def _new_id(self, replica: int = 0) -> int:
        counter = next(self._numbers) % (1 << REPLICA_SHIFT)
        return (self._worker << WORKER_SHIFT) | (replica << REPLICA_SHIFT) | counter

    def _admit(self, requests: Sequence[Request]) -> list[WorkHold]:
        if self._gate is None:
            return []
        places: list[WorkHold] = []
        try:
            for request in requests:
                tokens = num_tokens(request.prompt)
                for _ in range(max(1, min(max(request.sampling.n, request.sampling.beam_width), 64))):
                    places.append(self._gate.admit(requests=1, tokens=tokens))
        except BaseException:
            for place in places:
                place.end()
            raise
        return places

    @contextlib.contextmanager
    def _named(self, requests: Sequence[Request]) -> Iterator[None]:
        """Reserves the `rid`s that clients chose, until their requests are registered. Raises `InvalidRequest` if a
        request of the same tenant already uses one."""
        names = list(dict.fromkeys((each.caller.tenant, each.rid) for each in requests if each.rid))
        taken = [rid for tenant, rid in names if self._names[tenant, rid]]
        if taken:
            raise InvalidRequest(
                what=f"a request with the rid {taken[0][:80]!r} is under way",
                why="a name stands for one request at a time",
                fix="choose another rid, or wait until that request has ended",
                param="rid",
            )
        for name in names:
            self._names[name] += 1
        try:
            yield
        finally:
            for name in names:
                self._drop_name(*name)

    @contextlib.contextmanager
    def _charged(
        self, requests: Sequence[Request], places: list[WorkHold], streams: list[list[DeltaStream]]
    ) -> Iterator[None]:
        """Charges the tenant for the estimated size of the prompts, and afterwards for the exact size of those that
        were sent. Releases unused admissions. Raises `Overloaded`."""
        quota, tenant = self.quota, requests[0].caller.tenant if requests else ""
        charged = 0
        try:
            if quota is not None:
                estimate = sum(num_tokens(request.prompt) for request in requests)
                quota.charge(tenant, estimate)
                charged = estimate
            yield
        finally:
            for place in places:
                place.end()
            if quota is not None:
                prompt = sum(len(group[0].prompt) for group in streams)
                quota.used(tenant, requests=sum(map(len, streams)), prompt=prompt, charged=charged)

    def _search(
        self, request: Request, prompted: Prompted, sampling: SamplingParams, places: list[WorkHold]
    ) -> list[DeltaStream]:
        """Starts a beam search: its steps are separate requests, and its answers arrive together."""
        prompt, media = prompted
        stops = frozenset([*(() if sampling.ignore_eos else self._eos_ids), *sampling.stop_token_ids])
        beams.check(request, sampling, len(stops))
        rid = request.rid or random_name()
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
            self._check_alive()
            outgoing: list[Generate] = []
            asked = [self._begin(inner, Prompted(each, media), one, [], outgoing, metered=False)[0] for each in prompts]
            try:
                self._replicas.send_all(outgoing)
                return [await stream.collect() for stream in asked]
            finally:
                for stream in asked:
                    stream.abort()

        text = text_spec(request, prompt, sampling, self.tokenizer)

        def answered(at: int, delta: Delta) -> None:
            if self.meter is not None:
                self.meter.news(delta.id, len(delta.tokens) // 4, delta.end)
            streams[at].deliver(beams.spoken(delta, request, prompt, self.tokenizer, text))

        def ended() -> None:
            self._searches.discard(running)
            self._drop_name(tenant, rid)
            for place in held:
                place.end()
            if media is not None:
                media.lease.end()
            if self.meter is not None:
                for stream in streams:
                    self.meter.given_up(stream.id, "error")  # unless its end has been heard of

        def give_up(request_id: int, reason: str) -> None:
            if self.meter is not None:
                self.meter.given_up(request_id, "given_up")
            running.give_up()

        tenant = request.caller.tenant
        if media is not None:
            media.lease.use()
        streams = [
            DeltaStream(self._new_id(), rid, index, prompt, give_up, tenant=tenant) for index in range(sampling.n)
        ]
        if self.meter is not None:
            for stream in streams:
                self.meter.submitted(stream.id, len(prompt))
        running = Search(search, streams, prompt, ask, answered, ended)
        self._searches.add(running)
        self._names[tenant, rid] += 1
        return streams

    def _begin(
        self,
        request: Request,
        prompted: Prompted,
        sampling: SamplingParams,
        places: list[WorkHold],
        outgoing: list[Generate],
        *,
        metered: bool = True,
    ) -> list[DeltaStream]:
        """The request's streams; what is to be sent for them is put to `outgoing`."""
        prompt, media = prompted
        rid = request.rid or random_name()
        tenant, turn = request.caller.tenant, None
        namespace = request.caller.namespace(request.namespace)
        if request.session is not None and goes_on_from_join(request):
            namespace = session_namespace(request.namespace, request.session.id, request.caller)
        common = compose(
            request, prompt, sampling,
            rid=rid, namespace=namespace, eos_ids=self._eos_ids, tokenizer=self.tokenizer,
            adapter=self._adapters.number(request.adapter), media=media,
        )  # fmt: skip
        if request.session is not None and not goes_on_from_join(request):
            turn = self.sessions.begin(request.session, rid, prompt, tenant)
            if media is not None:
                turn.items, turn.prepared = media.items, media.prepared
        trace = CURRENT.get()
        replica = self._replicas.choose(
            prompted.routed,
            namespace,
            wanted=request.data_parallel_rank,
            sticky=_together(request, prompt, keep=common.keep),
        )
        streams: list[DeltaStream] = []
        for index in range(sampling.n):
            stream = DeltaStream(self._new_id(replica), rid, index, prompt, self._give_up, tenant=tenant)
            if media is not None:
                media.lease.use()
                self._leases[stream.id] = media.lease
            if trace is not None and trace.submitted(stream.id, rid, len(prompt)):
                stream.trace = trace
            outgoing.append(for_answer(common, index, stream.id, trace=stream.trace is not None))
            self._streams[stream.id] = stream
            self._replicas.began(replica, len(prompt))
            self._names[tenant, rid] += 1
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

    def _give_up(self, request_id: int, reason: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(request_id, "given_up")
            if self.quota is not None:
                self._unpaid[request_id] = stream.tenant
            self._replicas.send(Abort(request_id, reason), home_replica(request_id))

    def _forget(self, request_id: int, how: str) -> None:
        stream = self._streams.pop(request_id)
        self._drop_name(stream.tenant, stream.rid)
        self._replicas.ended(home_replica(request_id), len(stream.prompt))
        if request_id in self._turns:
            params, turn = self._turns.pop(request_id)
            self.sessions.end(params, turn, failed=how == "error", tenant=stream.tenant)
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            lease.end()
        place = self._places.pop(request_id, None)
        if place is not None:
            place.end()
        if self.meter is not None:
            self.meter.given_up(request_id, how)  # unless its end has been heard of
        self.stats.ended[how] += 1
        self.stats.live = len(self._streams)

    def _drop_name(self, tenant: str, rid: str) -> None:
        self._names[tenant, rid] -= 1
        if not self._names[tenant, rid]:
            del self._names[tenant, rid]

    def _take(self, messages: Iterable[ToApi]) -> None:
        for message in messages:
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
            elif delta.end is not None and delta.id in self._unpaid and self.quota is not None:
                self.quota.used(self._unpaid.pop(delta.id), generated=delta.end.completion_tokens)

    def _deliver(self, stream: DeltaStream, delta: Delta) -> None:
        end = delta.end
        if stream.id in self._turns:
            self._turns[stream.id][1].add(delta.tokens)
        if end is not None and stream.trace is not None:
            stream.trace.ended(stream.id, end)
        if self.meter is not None:
            self.meter.news(stream.id, len(delta.tokens) // 4, end)
        if end is not None:
            self._forget(stream.id, end.reason)
            if self.quota is not None:
                self.quota.used(stream.tenant, generated=end.completion_tokens)
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
                if len(self._engines) > 1:
                    self._watch_replicas()

    def _watch_replicas(self) -> None:
        """Notices that the launcher has declared an engine dead, or started another in its place."""
        for number, endpoints in enumerate(self._engines):
            phase, was_alive = read_status(endpoints).phase, number in self._replicas.alive
            if phase == "failed" and was_alive:
                self._replicas.set_alive(number, False)
                lost = Unavailable(what=f"replica {number} has stopped", fix="send the request again")
                for stream in [each for each in self._streams.values() if home_replica(each.id) == number]:
                    self._forget(stream.id, "error")
                    stream.fail(lost)
                for call, answer in list(self._calls.items()):
                    if home_replica(call) == number and not answer.done():
                        answer.set_exception(lost)
            elif phase == "ready" and not was_alive:
                self._replicas.set_alive(number, True)


_HEAD_IDS = 8
"""Number of first prompt tokens that identify requests which continue one another."""


def _together(request: Request, prompt: Ids, *, keep: bool) -> str:
    """Routing key of requests that must go to the same engine; empty: any engine. Requests of a session use its name.
    Requests that are kept for a join, and those that follow one, use the beginning of their prompts.
    """
    if request.session is not None:
        return request.session.id
    return prompt[:_HEAD_IDS].tobytes().hex() if keep or request.follows else ""
