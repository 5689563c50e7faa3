"""`@function`: a Python function over a state, which can be run, batched, bound, traced and cached."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from bough.lang.backends.base import Backend
from bough.lang.backends.resolve import as_backend, default_backend
from bough.lang.batch import BatchProgress, in_order, thread_count
from bough.lang.config import global_config
from bough.lang.errors import LangError
from bough.lang.executor import ProgramRun
from bough.lang.loop import run_sync, shared_loop
from bough.lang.sampling import SamplingParams, normalise
from bough.lang.state import ProgramState
from bough.lang.tracer import ProgramTrace, common_prefix, trace_program
from bough.lang.transcript import text_prompt

SAMPLING_DEFAULTS = frozenset(
    ("max_new_tokens", "min_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k",
     "min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "return_logprob", "logprob_start_len",
     "top_logprobs_num", "return_text_in_logprobs")
)  # fmt: skip


class Function:
    """A program. Every way to run it also takes default sampling parameters (`temperature=0`, `max_new_tokens=64`, ...)."""

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        parameters = inspect.signature(func).parameters
        names = list(parameters)
        if not names or names[0] != "s":
            raise LangError(
                what=f"the first parameter of {func.__name__} is {names[0] if names else 'missing'}, not s",
                why="a program writes to its state, which is called s",
                fix=f"write def {func.__name__}(s, ...)",
            )
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
            raise LangError(
                what=f"{func.__name__} takes *args or **kwargs",
                why="a program's arguments are known by name, so that batches can be traced",
                fix="name every parameter",
            )
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.is_async = inspect.iscoroutinefunction(func)
        self._bound = dict(bound or {})
        self._signature = inspect.signature(func)
        functools.update_wrapper(self, func)

    def bind(self, **arguments: Any) -> Function:
        """The same program with some of its arguments given."""
        self._check_names(arguments)
        return Function(self.func, self.num_api_spec_tokens, {**self._bound, **arguments})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`f(s, ...)` inside a program continues on its state; `f(...)` is `f.run(...)`."""
        if args and isinstance(args[0], ProgramState):
            return self.func(args[0], **self._arguments(args[1:], kwargs))
        return self.run(*args, **kwargs)

    # -- running once

    def run(
        self, *args: Any, backend: Any = None, stream: bool = False, use_thread: bool = True, **kwargs: Any
    ) -> ProgramState:
        """Run the program and return its state; an error of the program is raised here.

        `stream=True` returns at once, while the program runs on: follow it with `text_iter`. `use_thread=False`
        executes each expression before the next line of the program runs.
        """
        defaults, kwargs = self._split(kwargs)
        arguments = self._arguments(args, kwargs)
        run = self._new_run(as_backend(backend or default_backend()), shared_loop(), defaults, stream)
        state = ProgramState(run.root)
        if self.is_async:
            if not use_thread:
                raise LangError(
                    what="use_thread=False with an async def program",
                    why="such a program decides itself when to wait",
                    fix="await s after each append, or leave use_thread out",
                )
            if stream:
                asyncio.run_coroutine_threadsafe(self._execute_async(run, state, arguments), run.loop)
            else:
                run_sync(self._execute_async(run, state, arguments))
        else:
            run.step_by_step = not use_thread
            if stream:
                work = threading.Thread(target=self._execute, args=(run, state, arguments), name="bough-program")
                work.daemon = True
                work.start()
            else:
                self._execute(run, state, arguments)
        if not stream:
            run.root.raise_if_failed()
        return state

    async def arun(self, *args: Any, backend: Any = None, stream: bool = False, **kwargs: Any) -> ProgramState:
        """`run` for callers on an event loop: an `async def` program runs on the caller's loop."""
        if not self.is_async:
            return await asyncio.to_thread(self.run, *args, backend=backend, stream=stream, **kwargs)
        defaults, kwargs = self._split(kwargs)
        arguments = self._arguments(args, kwargs)
        run = self._new_run(as_backend(backend or default_backend()), asyncio.get_running_loop(), defaults, stream)
        state = ProgramState(run.root)
        work = self._execute_async(run, state, arguments)
        if stream:
            task = run.loop.create_task(work)
            _background.add(task)
            task.add_done_callback(_background.discard)
        else:
            await work
            run.root.raise_if_failed()
        return state

    # -- running many

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the program once for each member (a dict of arguments, or a tuple of them) and return the states in order.

        A member that fails has its error in `state.error()`; the others are not touched. `generator_style=True`
        returns an iterator that yields each state as soon as it and those before it are finished. `num_threads`
        bounds how many run at a time (for `async def` programs "auto" means all of them).
        """
        defaults, members, target = self._batch(batch_kwargs, kwargs, backend)
        width = thread_count(num_threads, len(members), auto=len(members) if self.is_async else None)
        progress = BatchProgress(len(members)) if progress_bar else None
        states = self._iterate(members, defaults, target, width, generator_style, progress)
        return states if generator_style else list(states)

    async def arun_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> list[ProgramState]:
        """`run_batch` for callers on an event loop."""
        if not self.is_async:
            return await asyncio.to_thread(
                self.run_batch, batch_kwargs, backend=backend, num_threads=num_threads, progress_bar=progress_bar,
                **kwargs,
            )  # fmt: skip
        defaults, members, target = self._batch(batch_kwargs, kwargs, backend)
        return await self._gather(members, defaults, target, num_threads, progress_bar)

    def _batch(
        self, batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]], kwargs: dict[str, Any], backend: Any
    ) -> tuple[SamplingParams, list[dict[str, Any]], Backend]:
        defaults, rest = self._split(kwargs)
        if rest:
            raise LangError(
                what=f"run_batch got {', '.join(rest)}",
                why="arguments of the program belong to the members of the batch",
                fix="put them into each member, or bind(...) them",
            )
        members = []
        for member in batch_kwargs:
            positional, named = ((), dict(member)) if isinstance(member, Mapping) else (tuple(member), {})
            members.append(self._arguments(positional, named))
        return defaults, members, as_backend(backend or default_backend())

    def _iterate(
        self, members: list[dict[str, Any]], defaults: SamplingParams, backend: Backend, width: int, lazy: bool,
        progress: BatchProgress | None,
    ) -> Iterator[ProgramState]:  # fmt: skip
        """The states in order; `lazy` starts only a few members ahead of the one that the caller takes next."""
        precached = self._precache(members, backend)
        loop = shared_loop()
        window = 4 * width if lazy else len(members)

        def prepare(member: dict[str, Any]) -> tuple[ProgramRun, ProgramState, dict[str, Any]]:
            run = self._new_run(backend, loop, defaults, stream=False, precached_chars=precached)
            return run, ProgramState(run.root), member

        if self.is_async:
            slots = asyncio.Semaphore(width)

            async def one(member: dict[str, Any]) -> ProgramState:
                async with slots:
                    return await self._execute_async(*prepare(member))

            yield from in_order(lambda m: asyncio.run_coroutine_threadsafe(one(m), loop), members, window, progress)
            return
        pool = ThreadPoolExecutor(max_workers=width, thread_name_prefix="bough-program")
        try:
            yield from in_order(lambda m: pool.submit(self._execute, *prepare(m)), members, window, progress)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _gather(
        self,
        members: list[dict[str, Any]],
        defaults: SamplingParams,
        backend: Backend,
        num_threads: int | str,
        progress_bar: bool,
    ) -> list[ProgramState]:
        loop = asyncio.get_running_loop()
        precached = await asyncio.to_thread(self._precache, members, backend)
        progress = BatchProgress(len(members)) if progress_bar else None
        slots = asyncio.Semaphore(thread_count(num_threads, len(members), auto=len(members)))

        async def one(member: dict[str, Any]) -> ProgramState:
            async with slots:
                run = self._new_run(backend, loop, defaults, stream=False, precached_chars=precached)
                state = await self._execute_async(run, ProgramState(run.root), member)
            if progress is not None:
                progress.step()
            return state

        return list(await asyncio.gather(*(one(member) for member in members)))

    # -- looking ahead

    def trace(self, *, backend: Any = None, **arguments: Any) -> ProgramTrace:
        """What the program appends, without running a model; arguments not given are placeholders."""
        self._check_names(arguments)
        known = {**self._bound, **arguments}
        if backend is None:
            return trace_program(self.func, known)
        return trace_program(self.func, known, as_backend(backend).get_chat_template)

    def cache(self, backend: Any = None) -> str:
        """Put the program's constant prefix into the server's cache; returns the prefix."""
        target = as_backend(backend or default_backend())
        prefix = trace_program(self.func, self._bound, target.get_chat_template, only_prefix=True).prefix
        if prefix:
            target.cache_prefix(prefix)
        return prefix

    def _precache(self, members: list[dict[str, Any]], backend: Backend) -> int:
        """Have the common prefix of a batch computed if that is worth a request; returns its length in characters.

        If the server shares prefixes that are being computed, the first member computes it. If the server refuses the
        prefix, each member gets its own error.
        """
        if len(members) < 2 or not backend.has_prefix_cache or not global_config.enable_precache_with_tracing:
            return 0
        prefix = common_prefix(self.func, members, backend.get_chat_template)
        if len(prefix) < global_config.precache_min_chars:
            return 0
        if not run_sync(backend.async_shares_in_flight()):
            wait([asyncio.run_coroutine_threadsafe(backend.async_cache_prefix(text_prompt(prefix)), shared_loop())])
        return len(prefix)

    # -- one execution

    def _new_run(
        self,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        defaults: SamplingParams,
        stream: bool,
        precached_chars: int = 0,
    ) -> ProgramRun:
        run = ProgramRun(backend, loop, defaults, stream, False, self.num_api_spec_tokens, precached_chars)
        run.spawn()
        return run

    def _execute(self, run: ProgramRun, state: ProgramState, arguments: dict[str, Any]) -> ProgramState:
        """Run a `def` program on this thread to its end. Exceptions stay in the state; only interrupts are raised."""
        try:
            with run.inside():
                state.ret_value = self.func(state, **arguments)
            run.close()
            run.wait()
        except BaseException as error:
            run.give_up(error)
            if not isinstance(error, Exception):
                raise
        _say(run)
        return state

    async def _execute_async(self, run: ProgramRun, state: ProgramState, arguments: dict[str, Any]) -> ProgramState:
        """Run an `async def` program on this loop to its end. Exceptions stay in the state; only cancelling is raised."""
        try:
            with run.inside():
                state.ret_value = await self.func(state, **arguments)
            run.close()
            await run.async_wait()
        except BaseException as error:
            run.give_up(error)
            if not isinstance(error, Exception):
                raise
        _say(run)
        return state

    # -- arguments

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The program's arguments by name; what is missing or unknown is refused before anything runs."""
        self._check_names(kwargs)
        try:
            bound = self._signature.bind(None, *args, **{**self._bound, **kwargs})
        except TypeError as error:
            raise LangError(
                what=f"{self.func.__name__} can't be called like this: {error}",
                why=f"its parameters are {self._signature}",
                fix="give every parameter but s a value, once",
            ) from error
        arguments = dict(bound.arguments)
        del arguments["s"]
        return arguments

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
        """Default sampling parameters, and the program's arguments: a name that is both is the program's."""
        own = self._signature.parameters
        sampling = {name: value for name, value in kwargs.items() if name in SAMPLING_DEFAULTS and name not in own}
        rest = {name: value for name, value in kwargs.items() if name not in sampling}
        return SamplingParams().merged(normalise(sampling)), rest

    def _check_names(self, arguments: Mapping[str, Any]) -> None:
        unknown = [name for name in arguments if name not in self._signature.parameters or name == "s"]
        if unknown:
            raise LangError(
                what=f"{self.func.__name__} has no parameter {unknown[0]!r}",
                why=f"its parameters are {self._signature}",
                fix="check the spelling",
            )


_background: set[asyncio.Task[ProgramState]] = set()
"""Streamed programs on callers' loops; a loop keeps only weak references to its tasks."""


def _say(run: ProgramRun) -> None:
    if global_config.verbosity >= 2:
        sys.stdout.write(run.root.memory.transcript.text + "\n")
