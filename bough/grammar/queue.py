"""The queue of requests whose grammar is being compiled: threads let worker processes try the sources, and compile
those that passed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from bough.core.grammar import Compiled, CompileFailed, Matcher
from bough.core.sampling import GrammarKind, GrammarSpec
from bough.grammar.backend import Automaton, GrammarBackend, Settings, make_backend
from bough.grammar.cache import ByteCache
from bough.grammar.errors import BadGrammar
from bough.grammar.matcher import TokenMatcher, prepare
from bough.grammar.sandbox import Broken, Overrun, Sandbox
from bough.grammar.sights import Sights
from bough.grammar.states import States, states_of
from bough.grammar.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

Key = tuple[GrammarKind, str]
MAX_WAITING = 1024
"""Maximum number of sources that wait to be compiled; further requests are refused."""
_IDLE_S = 300.0
"""Seconds after which an idle worker process ends."""
_FAILURE_BYTES = 4 * 2**20
_OVERRUN_TTL_S = 60.0
"""Seconds for which a source that exceeded its limits is refused without another attempt."""


class _Failure(Struct, frozen=True):
    message: str
    status: int = 400
    until_s: float = 0.0
    """0: for good."""


class _Ready(Struct, frozen=True):
    """A compiled grammar, and names for the places in it, if there are any."""

    automaton: Automaton
    states: States | None

    @property
    def num_bytes(self) -> int:
        """Memory of the grammar; grows with the number of places that were visited."""
        return self.automaton.num_bytes + (self.states.num_bytes if self.states is not None else 0)


class _Tools(Struct, frozen=True):
    """Loaded for the first grammar: the vocabulary and a backend in this process."""

    vocabulary: Vocabulary
    backend: GrammarBackend
    sights: Sights


class Grammars:
    """A `core.grammar.GrammarQueue`. `load_vocabulary` is called once, in a thread, for the first grammar."""

    def __init__(self, settings: Settings, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self.settings = settings
        self._load_vocabulary = load_vocabulary
        self._tools: _Tools | None = None
        self._tools_lock = threading.Lock()
        self._compiled: ByteCache[Key, _Ready] = ByteCache(settings.cache_bytes)
        self._failures: ByteCache[Key, _Failure] = ByteCache(_FAILURE_BYTES)
        self._waiting: dict[Key, list[int]] = {}
        self._answers: list[Compiled | CompileFailed] = []
        self._work: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Key, _Ready | _Failure]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    # -- the loop's side --------------------------------------------------------------------------

    def submit(self, request_id: int, spec: GrammarSpec) -> None:
        key = (spec.kind, spec.source)
        known = self._known(key)
        if known is not None:
            self._answers.append(self._answer(request_id, known))
        elif key in self._waiting:
            self._waiting[key].append(request_id)
        elif len(self._waiting) >= MAX_WAITING:
            self._answers.append(CompileFailed(request_id, "too many grammars are waiting to be compiled", 503))
        else:
            self._waiting[key] = [request_id]
            self._start_thread()
            self._work.put(key)

    def poll(self) -> list[Compiled | CompileFailed]:
        while True:
            try:
                key, result = self._results.get_nowait()
            except queue.Empty:
                break
            if isinstance(result, _Failure):
                self._failures.put(key, result, len(key[1]) + len(result.message) + 256)
            else:
                self._compiled.put(key, result, result.num_bytes + len(key[1]))
            self._answers += [self._answer(request_id, result) for request_id in self._waiting.pop(key, ())]
        answers, self._answers = self._answers, []
        return answers

    def cancel(self, request_id: int) -> None:
        self._answers = [answer for answer in self._answers if answer.id != request_id]
        for waiting in self._waiting.values():
            if request_id in waiting:
                waiting.remove(request_id)

    def look(self, matchers: Sequence[Matcher]) -> None:
        if self._tools is not None:
            prepare([each for each in matchers if isinstance(each, TokenMatcher)], self._tools.backend)

    def close(self) -> None:
        """Ends the workers."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout=self.settings.time_limit_s + 1.0)
        self._threads.clear()

    def _known(self, key: Key) -> _Ready | _Failure | None:
        failure = self._failures.get(key)
        if failure is not None and failure.until_s and failure.until_s < time.monotonic():
            self._failures.drop(key)
            failure = None
        ready = self._compiled.get(key)
        if ready is not None:
            self._compiled.put(key, ready, ready.num_bytes + len(key[1]))
        return failure or ready

    def _answer(self, request_id: int, result: _Ready | _Failure) -> Compiled | CompileFailed:
        if isinstance(result, _Failure):
            return CompileFailed(request_id, result.message, result.status)
        assert self._tools is not None, "something was compiled"
        tools = self._tools
        matcher = TokenMatcher(result.automaton.matcher(), tools.vocabulary, result.states, tools.sights)
        return Compiled(request_id, matcher)

    def _start_thread(self) -> None:
        """Starts another thread while sources wait, up to the number of workers."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < min(self.settings.num_workers, len(self._waiting)):
            thread = threading.Thread(target=self._run, name=f"grammar-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    # -- a thread's side --------------------------------------------------------------------------

    def _run(self) -> None:
        sandbox: Sandbox | None = None
        try:
            while True:
                try:
                    key = self._work.get(timeout=_IDLE_S)
                except queue.Empty:
                    if sandbox is not None:
                        sandbox.stop()
                    continue
                if key is None:
                    return
                try:
                    sandbox = sandbox or self._make_sandbox()
                    result = self._compile(sandbox, key)
                except Exception as error:
                    _log.exception("grammars can't be compiled")
                    result = _Failure(f"constrained output is not available: {error}", 500, time.monotonic() + 5.0)
                self._results.put((key, result))
                if sandbox is not None and sandbox.pid is None:
                    self._start_quietly(sandbox)
        finally:
            if sandbox is not None:
                sandbox.stop()

    def _make_sandbox(self) -> Sandbox:
        with self._tools_lock:
            if self._tools is None:
                vocabulary = self._load_vocabulary()
                self._tools = _Tools(vocabulary, make_backend(self.settings, vocabulary.tokens), Sights())
            return Sandbox(self.settings, self._tools.vocabulary.tokens)

    def _start_quietly(self, sandbox: Sandbox) -> None:
        """Restarts a worker that was killed, before the next source arrives."""
        try:
            sandbox.start()
        except Broken as error:
            _log.warning("%s", error)

    def _compile(self, sandbox: Sandbox, key: Key) -> _Ready | _Failure:
        """Tries a source in the sandbox and, if it passes, compiles it in this process."""
        assert self._tools is not None, "the sandbox was made with them"
        kind, source = key
        try:
            program = sandbox.compile(kind, source)
            automaton = self._tools.backend.compile(program)
            tree = self._tools.backend.tree(kind, source, program)
            longest = self._tools.vocabulary.longest
            return _Ready(automaton, states_of(tree, longest) if tree is not None else None)
        except Overrun as error:
            return _Failure(_sentence(kind, error), until_s=time.monotonic() + _OVERRUN_TTL_S)
        except BadGrammar as error:
            return _Failure(_sentence(kind, error))
        except Broken as error:
            _log.warning("%s", error)
            return _Failure(f"constrained output is not available: {error}", 500, time.monotonic() + 5.0)


def _sentence(kind: GrammarKind, error: BadGrammar) -> str:
    return f"{kind} {error}" if str(error).startswith("at ") else f"{kind}: {error}"
