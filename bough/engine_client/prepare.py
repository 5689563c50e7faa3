"""Prepares requests for the engine: refuses what can't be served, tokenises texts, fits parameters to the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from bough.core.errors import Conflict, InvalidRequest
from bough.core.messages import Ids
from bough.core.sampling import SamplingParams
from bough.engine_client.joins import PREFIX as JOINED, Joins
from bough.engine_client.limits import RequestLimits
from bough.engine_client.prompted import Prompted, PromptMedia
from bough.engine_client.request import Request
from bough.engine_client.sessions import SessionParams, Sessions, SessionTurn
from bough.lora.registry import AdapterRegistry
from bough.multimodal.media import Lease, Media, shifted
from bough.multimodal.placing import Placed, Placer
from bough.multimodal.processor import Prepared
from bough.tokenizer import TokenizerPool

_NO_IDS: Ids = np.empty(0, np.int32)


class Preparer:
    """Everything here raises `InvalidRequest` or a kind of it, and sends nothing."""

    def __init__(
        self,
        limits: RequestLimits,
        tokenizers: TokenizerPool | None,
        sessions: Sessions,
        joins: Joins,
        *,
        pools: bool | None,
        processors: frozenset[str] | None,
        adapters: AdapterRegistry,
        media: Media | None = None,
    ) -> None:
        """`pools`: whether the model does; None: not known. `processors`: logit processors that may be named; None: any.
        `adapters`: those that may be named. `media`: None: the model takes text only."""
        self._media = media
        self._limits = limits
        self._tokenizers = tokenizers
        self._sessions = sessions
        self._joins = joins
        self._pools = pools
        self._processors = processors
        self._adapters = adapters

    def check(self, requests: Sequence[Request]) -> None:
        """Checks that need no tokenization."""
        for request in requests:
            self._check_kind(request)
            self._check_processor(request)
            self._adapters.number(request.adapter)
        _check_sessions(requests)

    async def prompts(self, requests: Sequence[Request]) -> list[Prompted]:
        """Each request's token ids, those of its session before its own, and its media, which are held."""
        leases: dict[int, Lease] = {}
        try:
            return await self._prompts(requests, leases)
        except BaseException:
            for lease in leases.values():
                lease.end()
            raise

    async def _prompts(self, requests: Sequence[Request], leases: dict[int, Lease]) -> list[Prompted]:
        before: dict[int, Ids] = {}
        texts: dict[bool, list[int]] = {True: [], False: []}
        prompts = [_NO_IDS] * len(requests)
        placed: dict[int, Placed] = {}
        taken: dict[int, str] = {}
        ordered: dict[int, list[Prepared]] = {}
        for at, request in enumerate(requests):
            if request.session is not None:
                before[at] = await self._before(request, request.session)
            if request.media:
                leases[at] = await self._prepared(request)
            if isinstance(request.prompt, str):
                text = self._limits.taken_of(request.prompt)
                if at in leases:
                    ordered[at] = self._placer.ordered(text, leases[at].prepared)
                    text = self._placer.spelled(text, leases[at].prepared)
                taken[at] = text
                texts[request.add_special_tokens and not len(before.get(at, ()))].append(at)
            else:
                prompts[at] = self._limits.ids_of(request.prompt)
                if at in leases:
                    placed[at] = self._placer.place_ids(prompts[at], leases[at].prepared)
        for special, places in texts.items():
            if places:
                assert self._tokenizers is not None, "texts are refused without a tokenizer"
                encoded = await self._tokenizers.encode_batch([taken[at] for at in places], special)
                for at, ids in zip(places, encoded, strict=True):
                    prompts[at] = np.asarray(ids, np.int32)
                    if at in leases:
                        placed[at] = self._placer.place_spelled(ids, ordered[at])
        return [self._joined(at, request, prompts[at], before, placed, leases) for at, request in enumerate(requests)]

    def _joined(
        self,
        at: int,
        request: Request,
        ids: Ids,
        before: Mapping[int, Ids],
        placed: Mapping[int, Placed],
        leases: dict[int, Lease],
    ) -> Prompted:
        """The prompt behind what its session has before it."""
        own = placed.get(at)
        ids = ids if own is None else own.ids
        prefix = before.get(at, _NO_IDS)
        items = shifted(own, len(prefix)) if own is not None else ()
        earlier = (
            self._sessions.media(request.session, len(prefix), request.caller.tenant)
            if len(prefix) and (request.session is not None and not goes_on_from_join(request))
            else None
        )
        if earlier is not None:
            leases[at] = self._held_again(earlier, leases.get(at))
            items = (*(item for item in earlier.items if item.stop <= len(prefix)), *items)
        ids = np.concatenate([prefix, ids]) if len(prefix) else ids
        if not items:
            return Prompted(ids if request.pool else self._limits.cut(ids))
        assert self._media is not None, "there are no items without it"
        self._limits.check_uncut(ids)
        items = self._media.together(items)
        return Prompted(ids, PromptMedia(items, leases[at], self._media.positions, self._media.adapter(items)))

    def _held_again(self, earlier: SessionTurn, own: Lease | None) -> Lease:
        """The media of an earlier request and a request's own, held together."""
        assert self._media is not None, "requests with media came before"
        again = self._media.again(earlier.prepared)
        if again is None:
            raise Conflict(
                what="the session's media are no longer kept",
                why="memory for prepared media was needed (--mm-processor-cache-size)",
                fix="send the whole prompt again, with its media",
                param="session_params",
            )
        return again if own is None else again.joined(own)

    async def _prepared(self, request: Request) -> Lease:
        if self._media is None:
            raise InvalidRequest(
                what=f"the request has {request.media[0].kind} input",
                why="the served model takes text only",
                fix="send text, or serve a model that takes media",
                param=request.media[0].param,
            )
        caller = request.caller
        return await self._media.prepare(request.media, caller.tenant if caller.isolated else "")

    @property
    def _placer(self) -> Placer:
        assert self._media is not None, "nothing is prepared without it"
        return self._media.placer

    async def samplings(self, requests: Sequence[Request], prompts: Sequence[Ids]) -> list[SamplingParams]:
        """Each request's parameters, with a length that fits and its bad words as tokens."""
        fitted = list(map(self._limits.fitted, requests, prompts))
        for at, request in enumerate(requests):
            if request.bad_words:
                fitted[at] = await self._with_bad_words(fitted[at], request.bad_words)
        return fitted

    async def _with_bad_words(self, params: SamplingParams, given: Sequence[str]) -> SamplingParams:
        if self._tokenizers is None:
            raise InvalidRequest(
                what="bad_words were given", why="the server has no tokenizer", fix="remove them", param="bad_words"
            )
        forms = [form for word in given for form in (word, " " + word.lstrip())]  # at a text's start, within
        encoded = await self._tokenizers.encode_batch(forms, add_special_tokens=False)
        words = dict.fromkeys([*params.bad_words, *(tuple(ids) for ids in encoded if ids)])
        return msgspec.structs.replace(params, bad_words=tuple(words))

    async def _before(self, request: Request, session: SessionParams) -> Ids:
        """What its session has before the request's own tokens."""
        if goes_on_from_join(request):
            return await self._joins.ids(request.namespace, session.id, request.caller)
        return self._sessions.prefix(session, request.caller.tenant)

    def _check_kind(self, request: Request) -> None:
        if self._pools is None or self._pools == bool(request.pool):
            return
        if self._pools:
            raise not_generative()
        raise InvalidRequest(
            what="the served model does not pool",
            why="it is served to generate",
            fix="serve an embedding, reranking or classification model, or start with --is-embedding",
        )

    def _check_processor(self, request: Request) -> None:
        name = request.sampling.logit_processor
        if name is not None and self._processors is not None and name not in self._processors:
            raise InvalidRequest(
                what=f"there is no logit processor {name[:60]!r}",
                why=f"the server has: {', '.join(sorted(self._processors)) or 'none'}",
                fix="name one of them, or start the server with --logit-processors name=module:attribute",
                param="logit_processor",
            )


def goes_on_from_join(request: Request) -> bool:
    return request.session is not None and request.session.id.startswith(JOINED)


def _check_sessions(requests: Sequence[Request]) -> None:
    """Raises InvalidRequest if several requests, or several answers of one, would continue the same session."""
    if any(each.session is not None and not goes_on_from_join(each) for each in requests) and (
        len(requests) > 1 or requests[0].sampling.n > 1
    ):
        raise InvalidRequest(
            what="a session goes on with one request at a time",
            why="several prompts, or n above 1, would have one name",
            fix="send them one by one",
            param="session_params",
        )


def not_generative() -> InvalidRequest:
    """The error for a request that a pooling model has no answer to."""
    return InvalidRequest(
        what="the served model does not generate",
        why="it makes embeddings or scores of whole texts",
        fix="use /v1/embeddings, /v1/classify or /v1/rerank",
    )
