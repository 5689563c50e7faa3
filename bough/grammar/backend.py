"""The interface of a grammar engine; `TokenMatcher` builds everything else on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from bough.core.sampling import GrammarKind
from bough.core.step import I32, Mask
from bough.grammar.rules import Grammar
from bough.grammar.vocabulary import WorkerVocabulary


class Program(Struct, frozen=True):
    """A grammar in a backend's own notation. It is checked in a worker process and compiled again where it is used."""

    form: str
    """The kind of the text, by the backend's own names."""
    text: str
    visible: tuple[int, ...] = ()
    """Special tokens that the grammar spells out."""


class NativeMatcher(Protocol):
    """One request's state in a compiled grammar."""

    def accept(self, token: int) -> bool:
        """Accepts a token. False: it is not allowed, and nothing changed."""
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill(self, out: I32) -> None:
        """Overwrites `out` with the mask of allowed next tokens, including end tokens if the answer is complete."""
        ...

    def is_complete(self) -> bool:
        """Whether the text accepted so far is a complete answer."""
        ...

    def certain_text(self) -> str:
        """Text that must come next; empty if there is a choice, or if it does not consist of whole characters."""
        ...


class Automaton(Protocol):
    """A compiled grammar, shared by all requests that use it."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes."""
        ...

    def matcher(self) -> NativeMatcher: ...


class GrammarBackend(Protocol):
    """A grammar engine with a vocabulary."""

    def translate(self, kind: GrammarKind, source: str) -> Program:
        """Checks a source and translates it to the backend's notation. Raises `BadGrammar`."""
        ...

    def compile(self, program: Program) -> Automaton:
        """Compiles a program. May take long, and as much memory as the limits of the process allow. Raises
        `BadGrammar`."""
        ...

    def tree(self, kind: GrammarKind, source: str, program: Program) -> Grammar | None:
        """The grammar tree of a program, if matchers follow it exactly."""
        ...

    def fill_all(self, matchers: Sequence[Any], masks: Mask) -> None:
        """Fills row i of the masks for matcher i, several at once."""
        ...


class Settings(Struct, frozen=True, kw_only=True):
    """How grammars are compiled."""

    backend: str = "auto"
    """xgrammar, llguidance, or auto: the one that suits the grammar."""
    max_whitespace: int = 8
    """Maximum number of consecutive white space characters between the parts of a JSON answer; 0: none."""
    time_limit_s: float = 2.0
    memory_limit_bytes: int = 256 * 2**20
    """Memory limit of a worker, in addition to what it needs when idle."""
    cache_bytes: int = 256 * 2**20
    num_workers: int = 2


def make_backend(settings: Settings, tokens: WorkerVocabulary, *, lean: bool = False) -> GrammarBackend:
    """The backend by name. `lean`: for a worker process, without what it does not need."""
    if settings.backend == "llguidance":
        from bough.grammar.llguidance_backend import LlguidanceBackend

        guidance: GrammarBackend = LlguidanceBackend(tokens, settings.max_whitespace)
        return guidance
    if settings.backend == "xgrammar":
        from bough.grammar.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(tokens, settings.max_whitespace, lean=lean)
    from bough.grammar.both_backends import BothBackends

    return BothBackends(tokens, settings.max_whitespace, lean=lean)
