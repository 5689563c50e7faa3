"""xgrammar, and llguidance for grammars that count characters: each is used where it is fast. xgrammar precomputes most
masks, which then take microseconds, except inside strings with a maximum length: there it tries tokens one by one,
which takes milliseconds per mask. llguidance counts at no extra cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bough.core.sampling import GrammarKind
from bough.core.step import Mask
from bough.grammar.backend import Automaton, GrammarBackend, Program
from bough.grammar.errors import BadGrammar
from bough.grammar.notation import counts_far
from bough.grammar.rules import Grammar
from bough.grammar.sources import grammar_of
from bough.grammar.tags import grammars_in
from bough.grammar.vocabulary import WorkerVocabulary
from bough.grammar.xgrammar_backend import XgrammarBackend, XgrammarMatcher


class BothBackends:
    """A `GrammarBackend`. Without llguidance, xgrammar does everything."""

    def __init__(self, tokens: WorkerVocabulary, max_whitespace: int, *, lean: bool = False) -> None:
        self._max_whitespace = max_whitespace
        self._first = XgrammarBackend(tokens, max_whitespace, lean=lean)
        self._second: GrammarBackend | None = None
        try:
            from bough.grammar.llguidance_backend import LlguidanceBackend
        except ImportError:
            return
        self._second = LlguidanceBackend(tokens, max_whitespace)

    def translate(self, kind: GrammarKind, source: str) -> Program:
        if self._second is not None and self._counts_far(kind, source):
            try:
                return self._second.translate(kind, source)
            except BadGrammar:
                pass  # a tag that only xgrammar knows
        return self._first.translate(kind, source)

    def _counts_far(self, kind: GrammarKind, source: str) -> bool:
        if kind == "structural_tag":
            return any(counts_far(each) for each in grammars_in(source, self._max_whitespace))
        return counts_far(grammar_of(kind, source, self._max_whitespace))

    def compile(self, program: Program) -> Automaton:
        if program.form == "lark" and self._second is not None:
            return self._second.compile(program)
        return self._first.compile(program)

    def tree(self, kind: GrammarKind, source: str, program: Program) -> Grammar | None:
        if program.form == "lark" and self._second is not None:
            return self._second.tree(kind, source, program)
        return self._first.tree(kind, source, program)

    def fill_all(self, matchers: Sequence[Any], masks: Mask) -> None:
        firsts = np.array([isinstance(each, XgrammarMatcher) for each in matchers])
        if firsts.all():
            self._first.fill_all(matchers, masks)
        elif self._second is not None and not firsts.any():
            self._second.fill_all(matchers, masks)
        else:
            for backend, mine in ((self._first, firsts), (self._second, ~firsts)):
                part = np.empty((int(mine.sum()), masks.shape[1]), np.int32)
                assert backend is not None, "its matchers came from somewhere"
                backend.fill_all([each for each, own in zip(matchers, mine, strict=True) if own], part)
                masks[mine] = part
