"""xgrammar as a backend: its native library alone, without the Python around it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from bough.core.sampling import GrammarKind
from bough.core.step import I32, Mask
from bough.grammar.backend import Program
from bough.grammar.errors import BadGrammar, shorten
from bough.grammar.notation import counts_far, to_ebnf
from bough.grammar.rules import Grammar
from bough.grammar.sources import grammar_of
from bough.grammar.tags import native_tag
from bough.grammar.vocabulary import WorkerVocabulary

_RAW = 0
"""xgrammar's number for vocabularies given as bytes."""


def _load(*, without_torch: bool) -> Any:
    """The module of native classes. The package's own __init__ imports transformers for what a compiler does not use, so
    it is passed by; its native library would import torch, which a worker process does not need either."""
    if "xgrammar" in sys.modules:
        return _loaded(sys.modules["xgrammar"])
    spec = importlib.util.find_spec("xgrammar")
    if spec is None:
        raise ImportError("xgrammar is not installed")
    if without_torch:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["xgrammar"] = package
    try:
        importlib.import_module("xgrammar.load_binding")
        return _loaded(package)
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
        return importlib.import_module("xgrammar.base")._core


def _loaded(package: types.ModuleType) -> Any:
    return importlib.import_module(f"{package.__name__}.tvm_ffi_binding._ffi_api")


class XgrammarMatcher:
    """A `NativeMatcher`."""

    __slots__ = ("native",)

    def __init__(self, native: Any) -> None:
        self.native = native

    def accept(self, token: int) -> bool:
        return bool(self.native.accept_token(token, False))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.native.rollback(num_tokens)

    def fill(self, out: I32) -> None:
        out[:] = -1
        self.native.fill_next_token_bitmask(out.reshape(1, -1), 0, False)

    def is_complete(self) -> bool:
        return bool(self.native.is_completed())

    def certain_text(self) -> str:
        try:
            return str(self.native.find_jump_forward_string())
        except UnicodeDecodeError:
            return ""


class XgrammarAutomaton:
    """An `Automaton`."""

    def __init__(self, core: Any, native: Any) -> None:
        self._core = core
        self._native = native
        self.num_bytes = int(native.memory_size_bytes())

    def matcher(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._core.GrammarMatcher(self._native, None, False, -1, None))


class XgrammarBackend:
    """A `GrammarBackend`."""

    def __init__(self, tokens: WorkerVocabulary, max_whitespace: int, *, lean: bool = False) -> None:
        self._core = _load(without_torch=lean)
        self._tokens = tokens
        self._max_whitespace = max_whitespace
        self._compiler = lru_cache(maxsize=4)(self._make_compiler)
        self._batch = self._core.BatchGrammarMatcher("auto")

    def _make_compiler(self, visible: tuple[int, ...]) -> Any:
        tokens = self._tokens
        info = self._core.TokenizerInfo(tokens.spelled(visible), _RAW, tokens.size, list(tokens.stop_ids), False)
        return self._core.GrammarCompiler(info, 1, False, -1)

    def translate(self, kind: GrammarKind, source: str) -> Program:
        if kind == "structural_tag":
            text, spelled = native_tag(source, self._max_whitespace)
            return Program("tag", text, self._tokens.named_in(spelled))
        return Program("ebnf", to_ebnf(grammar_of(kind, source, self._max_whitespace)))

    def compile(self, program: Program) -> XgrammarAutomaton:
        compiler = self._compiler(program.visible)
        try:
            if program.form == "tag":
                native = compiler.compile_structural_tag(program.text)
            else:
                native = compiler.compile_grammar_from_strings(program.text, "root")
        except MemoryError:
            raise
        except Exception as error:
            raise BadGrammar(f"the grammar can't be compiled: {_reason(error)}") from None
        return XgrammarAutomaton(self._core, native)

    def tree(self, kind: GrammarKind, source: str, program: Program) -> Grammar | None:
        """None if the matcher counts characters, because it counts an escape by its written length."""
        grammar = grammar_of(kind, source, self._max_whitespace) if program.form == "ebnf" else None
        return None if grammar is None or counts_far(grammar) else grammar

    def fill_all(self, matchers: Sequence[XgrammarMatcher], masks: Mask) -> None:
        masks[:] = -1
        if len(matchers) == 1:
            matchers[0].native.fill_next_token_bitmask(masks, 0, False)
        else:
            self._batch.batch_fill_next_token_bitmask([each.native for each in matchers], masks, None, False)


def _reason(error: Exception) -> str:
    """The library's sentence without its time stamp and source line."""
    message = " ".join(str(error).split())
    _, bracket, rest = message.partition("] ")
    if bracket and message.startswith("["):
        place, colon, sentence = rest.partition(": ")
        message = sentence if colon and ".cc" in place else rest
    return shorten(message, 300)
