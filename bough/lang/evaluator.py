"""Evaluates expressions: how each changes a state's memory, and which requests it sends to the backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bough.lang import ir
from bough.lang.backends.base import Generation
from bough.lang.config import global_config
from bough.lang.deferred import DeferredMessage
from bough.lang.errors import LangError, Origin
from bough.lang.media import data_url
from bough.lang.reasoning import REASONING_FORMATS
from bough.lang.sampling import SamplingParams
from bough.lang.typed_output import parse_into

if TYPE_CHECKING:
    from bough.lang.chat_template import ChatTemplate
    from bough.lang.executor import Executor
    from bough.lang.memory import Memory


class Evaluator:
    """Evaluates one expression at a time for its executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._run = executor.run
        self._message: DeferredMessage | None = None

    @property
    def _memory(self) -> Memory:
        return self._executor.memory

    def _template(self) -> ChatTemplate:
        template = self._run.backend.known_chat_template()
        assert template is not None
        return template

    def needs_nobody(self, expr: ir.Expr) -> bool:
        """Whether `apply` suffices because no request to the backend is needed."""
        if self._message is not None:
            return False
        match expr:
            case ir.Text() | ir.ScopeBegin() | ir.ScopeEnd():
                return True
            case ir.RoleBegin() | ir.RoleEnd():
                return self._run.num_api_spec_tokens is None and self._run.backend.known_chat_template() is not None
            case ir.Fork():
                return not self._worth_caching(expr)
            case _:
                return False

    def deferring(self, expr: ir.Expr) -> bool:
        """Whether the expression's variables are set later, with the whole message."""
        return self._message is not None and isinstance(expr, ir.Gen)

    def apply(self, expr: ir.Expr) -> None:
        """Evaluate an expression that changes only this process's memory."""
        memory = self._memory
        match expr:
            case ir.Text(value):
                memory.speculation.advance(value)
                memory.transcript.append(value)
            case ir.RoleBegin(role):
                memory.transcript.begin_role(role, self._template())
            case ir.RoleEnd(role):
                memory.transcript.end_role(role, self._template())
            case ir.ScopeBegin(name):
                memory.scopes[name] = len(memory.transcript.text)
            case ir.ScopeEnd(name):
                memory.set_variable(name, memory.transcript.text[memory.scopes.pop(name) :], {})
            case ir.Fork(branches):
                for number in branches:
                    self._run.executors[number].begin_from(memory)
            case _:
                raise LangError(what=f"can't run {expr.describe()}", why="it has a meaning only in a trace")

    async def evaluate(self, expr: ir.Expr, origin: Origin) -> None:
        """Evaluate any expression to its end."""
        match expr:
            case ir.Gen() | ir.Text() if self._message is not None:
                self._message.items.append(expr)
            case ir.Gen():
                await self._gen(expr, None)
            case ir.Select():
                await self._select(expr)
            case ir.SeparateReasoning(inner, model_type):
                for item in ir.flatten((inner,)):
                    if isinstance(item, ir.Gen) and self._message is None:
                        await self._gen(item, model_type)
                    else:
                        await self.evaluate(item, origin)
            case ir.RoleBegin() | ir.RoleEnd():
                await self._role(expr)
            case ir.Image() | ir.Video():
                await self._media(expr)
            case ir.Fork():
                if self._worth_caching(expr):
                    if not await self._run.backend.async_shares_in_flight():
                        await self._run.backend.async_cache_prefix(self._memory.transcript.snapshot())
                    self._memory.cached_chars = len(self._memory.transcript.text)
                self.apply(expr)
            case ir.Join():
                await self._join(expr)
            case _:
                self.apply(expr)

    async def _role(self, expr: ir.RoleBegin | ir.RoleEnd) -> None:
        backend = self._run.backend
        await backend.async_chat_template()
        if self._message is not None:
            message, self._message = self._message, None
            gens = await message.run(self._memory, backend, [await self._params(gen) for gen in message.gens])
            for gen in gens:
                self._executor.defined(gen.defines)
        self.apply(expr)
        speculates = self._run.num_api_spec_tokens is not None and backend.is_chat
        if speculates and isinstance(expr, ir.RoleBegin) and expr.role == "assistant":
            self._message = DeferredMessage(self._run.num_api_spec_tokens or 0)

    async def _media(self, expr: ir.Image | ir.Video) -> None:
        template = await self._run.backend.async_chat_template()
        transcript = self._memory.transcript
        if isinstance(expr, ir.Image):
            url = await asyncio.to_thread(data_url, expr.source, "image/jpeg")
            transcript.append_media("image", url, template.image_token)
        else:
            url = await asyncio.to_thread(data_url, expr.source, "video/mp4")
            transcript.append_media("video", url, template.video_token, expr.num_frames)

    # -- generating ----------------------------------------------------------------------------------------------

    async def _params(self, expr: ir.Gen) -> SamplingParams:
        params = self._run.defaults.merged(expr.overrides)
        if self._memory.transcript.role is not None and not self._run.backend.is_chat:
            params = params.with_stops((await self._run.backend.async_chat_template()).stop_str)
        return params

    async def _gen(self, expr: ir.Gen, model_type: str | None) -> None:
        params = await self._params(expr)
        memory = self._memory
        start = len(memory.transcript.text)
        generation = Generation("")
        async for generation in self._generations(params):
            if model_type is None:
                self._show(expr.name, start, first_text(generation), generation.meta_info)
            elif model_type in REASONING_FORMATS:
                answer = REASONING_FORMATS[model_type].split(first_text(generation), final=False)[1]
                self._show(expr.name, start, answer, generation.meta_info)
        value: Any = generation.text
        if model_type is not None:
            reasoning, value = await self._split_reasoning(generation, model_type)
            self._show(expr.name, start, value, generation.meta_info)
            if expr.name is not None:
                memory.set_variable(f"{expr.name}_reasoning_content", reasoning, {})
        if expr.schema is not None:
            objects = [parse_into(expr.schema, text) for text in (value if isinstance(value, list) else [value])]
            value = objects if isinstance(value, list) else objects[0]
        memory.cached_chars = len(memory.transcript.text)
        memory.set_variable(expr.name, value, self._with_join(generation.meta_info))

    async def _generations(self, params: SamplingParams) -> AsyncIterator[Generation]:
        backend, prompt = self._run.backend, self._memory.transcript.snapshot()
        speculates = self._run.num_api_spec_tokens is not None and params.stop
        if speculates and params.n == 1 and params.constraint() is None:
            yield await self._speculate(params)
            return
        self._memory.speculation.ahead = ""
        if self._run.stream and params.n == 1:
            async for generation in backend.async_stream(prompt, params):
                yield generation
        else:
            yield await backend.async_generate(prompt, params)

    async def _speculate(self, params: SamplingParams) -> Generation:
        """Answers a `gen` from text that was generated in advance; if there is none, requests more text than this `gen`
        needs."""
        ahead, backend = self._memory.speculation, self._run.backend
        value = ahead.take(params.stop)
        if value is not None:
            return Generation(value, {"speculated": True, "finish_reason": {"type": "stop"}})
        prompt = self._memory.transcript.snapshot()
        num_tokens = max(params.max_new_tokens, self._run.num_api_spec_tokens or 0)
        generation = await backend.async_generate(prompt, replace(params, max_new_tokens=num_tokens, stop=()))
        ahead.ahead = first_text(generation)
        value = ahead.take(params.stop)
        if value is not None:
            return Generation(value, generation.meta_info)
        ahead.ahead = ""
        meta = generation.meta_info
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if isinstance(reason, dict) and reason.get("type") == "stop":
            return generation
        return await backend.async_generate(prompt, params)

    def _show(self, name: str | None, start: int, text: str, meta: Any) -> None:
        """Write the text generated so far into the state, for streaming readers."""
        self._memory.transcript.replace_tail(start, text)
        if name is not None:
            self._memory.shown[name] = text
            self._memory.meta_info[name] = meta
        self._executor.publish()

    def _with_join(self, meta: Any) -> Any:
        join = self._memory.meta_info.get("join")
        return meta | {"join": join} if join is not None and isinstance(meta, dict) else meta

    async def _split_reasoning(self, generation: Generation, model_type: str) -> tuple[str, str]:
        text, meta = first_text(generation), generation.meta_info
        if isinstance(meta, dict) and "reasoning_content" in meta:
            return str(meta["reasoning_content"]), text
        if model_type in REASONING_FORMATS:
            return REASONING_FORMATS[model_type].split(text, final=True)
        return await self._run.backend.async_separate_reasoning(text, model_type)

    async def _select(self, expr: ir.Select) -> None:
        memory, backend = self._memory, self._run.backend
        if self._message is not None:
            raise backend.unsupported("select with num_api_spec_tokens", "the whole message is one call to the API")
        prompt = memory.transcript.snapshot()
        decision = await backend.async_select(prompt, expr.choices, expr.temperature, expr.method)
        memory.speculation.ahead = ""
        memory.transcript.append(decision.decision)
        memory.cached_chars = len(memory.transcript.text)
        memory.set_variable(expr.name, decision.decision, self._with_join(decision.meta_info))

    # -- forking and joining -------------------------------------------------------------------------------------

    def _worth_caching(self, fork: ir.Fork) -> bool:
        """Whether to prefill new text before a fork, so that the branches do not each compute it."""
        new_chars = len(self._memory.transcript.text) - self._memory.cached_chars
        several = len(fork.branches) > 1
        return several and self._run.backend.has_prefix_cache and new_chars >= global_config.precache_min_chars

    async def _join(self, expr: ir.Join) -> None:
        branches = [self._run.executors[number] for number in expr.branches]
        for branch in branches:
            await branch.async_wait_idle()
        for branch in branches:
            if branch.failure is not None:
                branch.failure_seen = True
                raise branch.failure
        if expr.mode == "concate_and_append":
            await self._concatenate([branch.memory for branch in branches], expr.position_ids_offset)
            return
        before = set(self._memory.variables)
        for branch in branches:
            for name, value in branch.memory.variables.items():
                if name not in before:
                    self._memory.variables.setdefault(name, []).append(value)

    async def _concatenate(self, branches: list[Memory], position_ids_offset: tuple[int, ...] | None) -> None:
        memory = self._memory
        context, info = None, {"kind": "text", "why": "the state was appended to between fork and join"}
        if len(memory.transcript.text) == branches[0].fork_position:
            result = await self._run.backend.async_concatenate_and_append(
                memory.transcript.snapshot(), [b.transcript.snapshot() for b in branches], position_ids_offset
            )
            context = result.context
            info = {"kind": "text", "why": result.why} if context is None else {"kind": "kv", **result.info}
        for branch in branches:
            memory.transcript.append_branch(branch.transcript, branch.fork_position, branch.fork_messages)
        if context is not None:
            memory.transcript.context = replace(context, position=len(memory.transcript.text))
            memory.cached_chars = len(memory.transcript.text)
        memory.meta_info["join"] = info


def first_text(generation: Generation) -> str:
    return generation.text[0] if isinstance(generation.text, list) else generation.text
