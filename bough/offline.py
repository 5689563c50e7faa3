"""`Engine`: the runtime inside a Python program, without HTTP. Same settings as the server, same shapes as `/generate`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import bough
from bough.config.served_names import served_names, with_own_name
from bough.config.server_args import build_config, public_json
from bough.core.errors import BoughError, InvalidRequest, Unavailable
from bough.engine_client import DeltaStream, EngineClient, NativeAnswer, NativeBatch, Pooler, PoolOptions, native_batch
from bough.engine_client.driver import Driver, DriverClosed
from bough.engine_client.endings import as_error
from bough.engine_client.joins import parse_join
from bough.engine_client.media_fields import NATIVE_MEDIA
from bough.engine_client.pooled_native import labelled, native_inputs, native_pooled, pairs_of, ranked
from bough.engine_client.sampling import sampling_defaults
from bough.launch import Programs, ServerProcesses, start
from bough.multimodal.media import media_of
from bough.multimodal.own import own_media
from bough.platform.processor import can_wait_busily
from bough.tokenizer import Tokenizer, tokenizer_of

Json = dict[str, Any]
Answers = Json | list[Json]
T = TypeVar("T")

_BUSY_S = 0.05
"""A lone call waits busily for so long: the first token of a prompt of some thousand ids comes within. Being woken, and what
the processor has forgotten meanwhile, would add a few tenths of a millisecond. Longer calls pay with so much of a core."""


class Engine:
    """A model, ready to generate. Ends its processes on `shutdown`, at the end of `with`, or with the program."""

    def __init__(self, *, programs: Programs | None = None, **settings: Any) -> None:
        """Takes the server's settings by name (`model_path`, `tp_size`, `context_length`, ...). Returns once ready.

        Raises `ConfigError` for a wrong setting, and whatever start-up failed with.
        """
        settings.setdefault("log_level", "warning")
        self.config = build_config(**settings)
        self._closed = False
        self._closing = threading.Lock()
        self._owner_pid = os.getpid()
        self._running: ServerProcesses = start(self.config, num_api_workers=1, programs=programs)
        self.config = replace(self.config, parallel=self._running.config.parallel)
        try:
            self._checkpoint = self._running.checkpoint
            self.tokenizer: Tokenizer | None = tokenizer_of(self.config.model, self._checkpoint)
            self._defaults = sampling_defaults(self.config.server, self._checkpoint.recommended_sampling)
            self._running.wait_ready()
            self._driver = Driver("bough-engine", busy_s=_busy_s(self._running.facts))
            try:
                self._engine_client = self._call(self._open_engine_client())
            except BaseException:
                self._driver.close(wait_s=5)
                raise
        except BaseException:
            self._running.stop()
            raise
        self._running.on_failure(self._engine_failed)

    # -- generating ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        *,
        return_logprob: bool | Sequence[bool] | None = None,
        logprob_start_len: int | Sequence[int] | None = None,
        top_logprobs_num: int | Sequence[int] | None = None,
        token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None,
        processed_logprobs: bool | Sequence[bool] | None = None,
        return_text_in_logprobs: bool | None = None,
        return_hidden_states: bool | str | None = None,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        priority: int | str | None = None,
        cache_salt: str | None = None,
        extra_key: str | None = None,
        lora_path: str | Sequence[str | None] | None = None,
        session_params: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Answers | Iterator[Json]:
        """Generates for one prompt (a dict) or many (a list of dicts): `{"text", "output_ids", "meta_info"}`.

        `image_data`: the prompt's images, one or a list: PIL images, arrays (uint8, height x width x 3), bytes, paths, URLs;
        of several prompts a list with one such entry for each. `sampling_params`, `rid` and the logprob options may be lists
        with one entry a prompt. With `stream`, an iterator of such dicts, each with all text so far; in a batch they carry
        `index`. Leaving the iterator early ends the requests. `lora_path`: the name of an adapter (`Engine(lora_paths=...)`
        names them), or a list with a name or None for each prompt. `others`: SGLang's fields for what is not served here,
        taken while they are off.
        Raises `InvalidRequest`, and what a lone request failed with: `RequestFailed`, `DeadlineExceeded`, ...
        """
        batch = self._batch({
            "text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, "stream": stream,
            "image_data": image_data, "video_data": video_data, "audio_data": audio_data,
            "return_logprob": return_logprob, "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num, "token_ids_logprob": token_ids_logprob,
            "processed_logprobs": processed_logprobs, "return_text_in_logprobs": return_text_in_logprobs,
            "return_hidden_states": return_hidden_states, "rid": rid, "priority": priority,
            "cache_salt": cache_salt, "extra_key": extra_key, "lora_path": lora_path,
            "session_params": session_params, **others,
        })  # fmt: skip
        if stream:
            return self._iterate(batch)
        return self._call(self._whole(batch))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Answers | AsyncIterator[Json]:
        """Like `generate`, for a program with an event loop. With `stream`, await it for an async iterator."""
        given = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, "stream": stream}
        batch = self._batch({**given, **options})
        if stream:
            return self._async_iterate(batch)
        future = self._submit(self._whole(batch))
        return await asyncio.wrap_future(future)

    def concate_and_append(
        self, src_rids: Sequence[str], dst_rid: str, position_ids_offset: Sequence[int] | None = None
    ) -> Json:
        """Lines up the KV of branches behind their parent's, computing nothing. All have ended, with `max_new_tokens` 0.

        Returns `{"success": True, "session_id", ...}`: requests with `session_params={"id": session_id}` go on from there.
        Where it can't be done, `{"success": False, "message"}`.
        """
        return self._call(self._join(src_rids, dst_rid, position_ids_offset))

    async def async_concate_and_append(
        self, src_rids: Sequence[str], dst_rid: str, position_ids_offset: Sequence[int] | None = None
    ) -> Json:
        return await asyncio.wrap_future(self._submit(self._join(src_rids, dst_rid, position_ids_offset)))

    # -- pooling and scoring -----------------------------------------------------------------------------------------

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Answers:
        """What a pooling model makes of one text or many: `{"embedding", "meta_info"}`. Rewards and labels' logits come
        the same way. Options: `dimensions`, `truncate` (tokens; -1: to the context), `prompt_name`, `add_special_tokens`;
        with models that see, `image_data` (and so on) as in `generate`, one entry for each text, or alone."""
        return self._call(self._encode(prompt, input_ids, **options))

    async def async_encode(
        self,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Answers:
        return await asyncio.wrap_future(self._submit(self._encode(prompt, input_ids, **options)))

    def classify(
        self,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Answers:
        """Labels by a classification model: `{"label", "probs", "num_classes"}`."""
        return self._call(self._classify(prompt, input_ids, **options))

    async def async_classify(
        self,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Answers:
        return await asyncio.wrap_future(self._submit(self._classify(prompt, input_ids, **options)))

    def rerank(
        self,
        query: str | Sequence[Sequence[str]],
        documents: Sequence[str] | None = None,
        *,
        top_n: int | None = None,
        instruct: str = "",
        **options: Any,
    ) -> list[Json]:
        """Documents by relevance: `{"index", "score", "document"}`, best first. With `[query, document]` pairs instead
        of a query: `{"embedding": score, "score"}` for each, in their order."""
        return self._call(self._rerank(query, documents, top_n, instruct, **options))

    async def async_rerank(
        self,
        query: str | Sequence[Sequence[str]],
        documents: Sequence[str] | None = None,
        *,
        top_n: int | None = None,
        instruct: str = "",
        **options: Any,
    ) -> list[Json]:
        return await asyncio.wrap_future(self._submit(self._rerank(query, documents, top_n, instruct, **options)))

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        multi_item_scoring_delimiter: int | None = None,
    ) -> list[list[float]]:
        """For each item, appended to the query: the probabilities of the label tokens coming next (normalised over the
        labels with `apply_softmax`). A classification model scores its own labels.
        `multi_item_scoring_delimiter`: a token between the query and each item."""
        return self._call(
            self._score(query, items, label_token_ids, apply_softmax, item_first, multi_item_scoring_delimiter)
        )

    async def async_score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        multi_item_scoring_delimiter: int | None = None,
    ) -> list[list[float]]:
        work = self._score(query, items, label_token_ids, apply_softmax, item_first, multi_item_scoring_delimiter)
        return await asyncio.wrap_future(self._submit(work))

    # -- control ---------------------------------------------------------------------------------------------------

    def open_session(self, capacity_of_str_len: int = 2**31 - 1, session_id: str = "", timeout: float = 3600.0) -> str:
        """Opens a session, whose requests go on from one another (`session_params` of `generate`); returns its id.

        `capacity_of_str_len`: tokens that a request may have with what came before it. `timeout`: idle seconds.
        """

        async def run() -> str:
            return self._engine_client.sessions.open(session_id, capacity=capacity_of_str_len, timeout_s=timeout)

        return self._call(run())

    def close_session(self, session_id: str) -> None:
        """Closes a session and ends its requests."""

        async def run() -> None:
            self._engine_client.sessions.close(session_id)

        self._call(run())

    def flush_cache(self) -> Json:
        """Empties the prefix cache. Raises `Conflict` while requests run."""
        return self._call(self._engine_client.flush_cache())

    def get_server_info(self) -> Json:
        """Settings, what was decided at start-up, and the engine's numbers right now."""
        internal = self._call(self._engine_client.info())
        settings = public_json(self.config)
        return {"version": bough.__version__, **settings, **self._running.facts, "internal_states": [internal]}

    def get_model_info(self) -> Json:
        """The model as a program must know it; `role_affixes` are the marks around a chat's messages."""
        model = self.config.model
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        affixes = None
        if template is not None:
            with contextlib.suppress(InvalidRequest):  # a template that refuses the probes has none to tell
                affixes = template.role_affixes()
        return {
            "model_path": str(self._checkpoint.path),
            "tokenizer_path": model.tokenizer or str(self._checkpoint.tokenizer),
            "has_chat_template": template is not None,
            "role_affixes": affixes,
            "max_model_len": self._running.facts["context_length"],
            "served_model_name": served_names(with_own_name(model.served_model_name, self._checkpoint.name))[0][0],
            "is_generation": self._pooler.pooling is None,
            "context_length": self._running.facts["context_length"],
            "vocab_size": self._running.facts["vocab_size"],
            "architectures": self._checkpoint.config.get("architectures", []),
            "preferred_sampling_params": dict(self._defaults),
            "weight_version": self.config.server.weight_version,
        }

    def abort(self, rid: str = "") -> int:
        """Ends requests by name, or all of them; they end with finish reason `abort`. Returns how many."""

        async def run() -> int:
            return self._engine_client.abort(rid)

        return self._call(run())

    def pause(self, mode: str = "abort") -> Json:
        """Stops computing: `abort` ends all requests, `retract` frees their memory, `in_place` freezes them."""
        return self._call(self._engine_client.pause(mode))

    def resume(self) -> Json:
        return self._call(self._engine_client.resume())

    def start_profile(self, output_dir: str = "", num_steps: int = 0) -> Json:
        return self._call(self._engine_client.profile(start=True, output_dir=output_dir, num_steps=num_steps))

    def stop_profile(self) -> Json:
        return self._call(self._engine_client.profile(start=False))

    def get_all_child_pids(self) -> list[int]:
        return list(self._running.pids.values())

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Ends the engine's processes; requests under way get `drain_s`. May be called twice."""
        if os.getpid() != self._owner_pid or not self._closing.acquire(blocking=False):
            return
        self._closed = True
        if drain_s == 0:
            self._close_engine_client()
        self._running.stop(drain_s)
        if drain_s > 0:
            self._close_engine_client()
        self._driver.close(wait_s=5)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _open_engine_client(self) -> EngineClient:
        facts = self._running.facts
        media = media_of(
            self.config, self._checkpoint, self.tokenizer,
            kinds=facts.get("media", ()), context_length=facts["context_length"], width=facts.get("media_width", 0),
        )  # fmt: skip
        engine_client = EngineClient.from_facts(
            self._running.endpoints, facts, self.tokenizer,
            truncate=self.config.server.allow_auto_truncate, parallel=self._running.config.parallel, media=media,
        )  # fmt: skip
        self._pooler = Pooler(
            engine_client,
            self._running.facts,
            model=self._checkpoint.name,
            rerank_template=self.config.server.rerank_template,
            embedding_template=self.config.server.embedding_template,
            delimiter=self.config.server.multi_item_scoring_delimiter,
        )
        await engine_client.start()
        return engine_client

    def _engine_failed(self, error: BoughError) -> None:
        gone = Unavailable(what="the engine has stopped", why=error.what, fix=error.fix)
        self._driver.call_soon(self._engine_client.fail_all, gone)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        self._check_open(work)
        return self._driver.submit(work)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        self._check_open(work)
        return self._driver.run(work)

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            work.close()
            raise DriverClosed
        if os.getpid() != self._owner_pid:
            work.close()
            raise Unavailable(
                what="this engine belongs to another process",
                why="this one was forked from it, and would take its answers",
                fix="make an Engine in this process, or send requests to a server",
            )

    def _close_engine_client(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._driver.submit(self._engine_client.close()).result(5)

    def _batch(self, fields: Json) -> NativeBatch:
        own = {
            name: own_media(fields[name], self.config.media) for name in NATIVE_MEDIA if fields.get(name) is not None
        }
        return native_batch(
            {**fields, **own},
            defaults=self._defaults,
            want_text=self.tokenizer is not None,
            every=self.config.scheduler.stream_interval,
        )

    async def _encode(self, prompt: Any, input_ids: Any, *, dimensions: int | None = None, **options: Any) -> Answers:
        facts = self._pooler.needs("embed", "sparse", "classify")
        given = {name: options.pop(name, None) for name in (*NATIVE_MEDIA, "mm_processor_kwargs")}
        media = {
            name: own_media(value, self.config.media) if name in NATIVE_MEDIA else value
            for name, value in given.items()
            if value is not None
        }
        inputs, single = native_inputs(prompt, input_ids, media)
        if dimensions is None:
            found = await self._pooler.pool(inputs, PoolOptions(**options))
        else:
            found = await self._pooler.embed(inputs, PoolOptions(**options), dimensions=dimensions)
        answers = [native_pooled(each, facts) for each in found]
        return answers[0] if single else answers

    async def _classify(self, prompt: Any, input_ids: Any, **options: Any) -> Answers:
        facts = self._pooler.needs("classify")
        inputs, single = native_inputs(prompt, input_ids)
        found = await self._pooler.classify(inputs, PoolOptions(**options))
        answers = [labelled(each.values.tolist(), facts) for each in found]
        return answers[0] if single else answers

    async def _rerank(
        self, query: Any, documents: Sequence[str] | None, top_n: int | None, instruct: str, **options: Any
    ) -> list[Json]:
        chosen = PoolOptions(**options)
        if documents is None:
            found = await self._pooler.relevance(pairs_of(query), chosen, instruct=instruct)
            return [{"embedding": row[0], "score": row[0]} for row in found.scores]
        pairs = pairs_of([(query, document) for document in documents])
        found = await self._pooler.relevance(pairs, chosen, instruct=instruct)
        return ranked([row[0] for row in found.scores], documents, top_n)

    async def _score(
        self,
        query: Any,
        items: Any,
        labels: Sequence[int] | None,
        softmax: bool,
        item_first: bool,
        delimiter: int | None,
    ) -> list[list[float]]:
        listed = [items] if isinstance(items, str) else list(items)
        found = await self._pooler.label_scores(
            query, listed, label_ids=labels, softmax=softmax, item_first=item_first, delimiter=delimiter
        )
        return found.scores

    async def _join(self, src_rids: Sequence[str], dst_rid: str, offsets: Sequence[int] | None) -> Json:
        fields = {"src_rids": src_rids, "dst_rid": dst_rid, "position_ids_offset": offsets}
        return await self._engine_client.joins.join(parse_join(fields))

    async def _answers(self, batch: NativeBatch) -> list[tuple[DeltaStream, NativeAnswer]]:
        groups = await self._engine_client.submit_batch(batch.requests)
        incremental = self.config.server.incremental_streaming_output and batch.stream
        text, version = self.tokenizer is not None, self.config.server.weight_version
        return [
            (stream, NativeAnswer(stream, request, incremental=incremental, text=text, weight_version=version))
            for request, group in zip(batch.requests, groups, strict=True)
            for stream in group
        ]

    async def _whole(self, batch: NativeBatch) -> Answers:
        pairs = await self._answers(batch)
        try:
            rendered = []
            for stream, answer in pairs:
                delta = await stream.collect()
                if batch.one_answer and delta.end is not None and delta.end.reason == "error":
                    raise as_error(delta.end)
                rendered.append(answer.add(delta))
        finally:
            for stream, _ in pairs:
                stream.abort()
        return rendered[0] if batch.one_answer else rendered

    async def _stream(self, batch: NativeBatch, put: Any) -> None:
        """Puts every answer's news, then None; on failure the error."""
        pairs = await self._answers(batch)

        async def follow(index: int, stream: DeltaStream, answer: NativeAnswer) -> None:
            async with stream:
                async for delta in stream:
                    if batch.one_answer and delta.end is not None and delta.end.reason == "error":
                        raise as_error(delta.end)
                    news = answer.add(delta)
                    put(news if batch.one_answer else {**news, "index": index})

        tasks = [asyncio.create_task(follow(i, stream, answer)) for i, (stream, answer) in enumerate(pairs)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _iterate(self, batch: NativeBatch) -> Iterator[Json]:
        arrived: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        work = self._submit(self._stream(batch, arrived.put))
        work.add_done_callback(lambda _: arrived.put(None))
        try:
            while (news := arrived.get()) is not None:
                yield news
            work.result()
        finally:
            work.cancel()

    async def _async_iterate(self, batch: NativeBatch) -> AsyncIterator[Json]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Json | None] = asyncio.Queue()

        def put(news: Json | None) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, news)

        work = self._submit(self._stream(batch, put))
        work.add_done_callback(lambda _: put(None))
        try:
            while (news := await arrived.get()) is not None:
                yield news
            work.result()
        finally:
            work.cancel()


def _busy_s(facts: Mapping[str, Any]) -> float:
    """How long a caller's wait is busy. Never where the cores compute, or are few."""
    computes_elsewhere = facts.get("device", "cpu") != "cpu"
    return _BUSY_S if computes_elsewhere and can_wait_busily() else 0.0
