"""llguidance as a backend: grammars in Lark, followed by its lexer and parser without compiling masks ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import llguidance
import llguidance.numpy

from bough.core.sampling import GrammarKind
from bough.core.step import I32, Mask
from bough.grammar.backend import Program
from bough.grammar.errors import BadGrammar, shorten
from bough.grammar.lark_tags import lark_tag
from bough.grammar.notation import to_lark
from bough.grammar.rules import Grammar
from bough.grammar.sources import grammar_of
from bough.grammar.vocabulary import WorkerVocabulary

_SPECIAL = b"\xff"
"""Prefix of names of special tokens, which llguidance does not treat as text."""


class _Words:
    """A vocabulary in llguidance's form. It splits text greedily; forced text is tokenised elsewhere."""

    def __init__(self, tokens: WorkerVocabulary, visible: tuple[int, ...]) -> None:
        spelled = tokens.spelled(visible)
        self.tokens = [name or _SPECIAL + b"[%d]" % i for i, name in enumerate(spelled)]
        self.special_token_ids = [i for i, name in enumerate(spelled) if not name]
        self.eos_token_id = tokens.stop_ids[0] if tokens.stop_ids else 0
        self.bos_token_id = None
        self._ids = {name: i for i, name in reversed(list(enumerate(spelled))) if name}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        ids = []
        while rest:
            for length in range(min(self._longest, len(rest)), 0, -1):
                if rest[:length] in self._ids:
                    ids.append(self._ids[rest[:length]])
                    break
            rest = rest[length:]
        return ids


class LlguidanceMatcher:
    """A `NativeMatcher`. llguidance never leaves an error state, so tokens are validated before they are accepted."""

    __slots__ = ("_stop_ids", "native")

    def __init__(self, native: Any, stop_ids: tuple[int, ...]) -> None:
        self.native = native
        self._stop_ids = stop_ids

    def accept(self, token: int) -> bool:
        if self.native.is_stopped():
            return False
        return bool(self.native.try_consume_tokens([token]) == 1)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self.native.rollback(num_tokens):
            raise ValueError(f"llguidance can't go back {num_tokens} tokens: {self.native.get_error()}")

    def fill(self, out: I32) -> None:
        llguidance.numpy.fill_next_token_bitmask(self.native, out.reshape(1, -1), 0)
        self.end(out)

    def end(self, mask: I32) -> None:
        """Allows all end tokens if one is allowed, otherwise none."""
        allowed = self.is_complete()
        words = mask.view("uint32")
        for token in self._stop_ids:
            bit = 1 << (token & 31)
            words[token >> 5] = (int(words[token >> 5]) | bit) if allowed else int(words[token >> 5]) & ~bit

    def is_complete(self) -> bool:
        if self.native.is_error():
            raise ValueError(f"llguidance gave up: {shorten(self.native.get_error(), 200)}")
        return bool(self.native.is_accepting())

    def certain_text(self) -> str:
        try:
            return bytes(self.native.compute_ff_bytes()).decode()
        except UnicodeDecodeError:
            return ""


class LlguidanceAutomaton:
    """An `Automaton`: a matcher in its initial state, copied for each request."""

    def __init__(self, native: Any, program: Program, stop_ids: tuple[int, ...]) -> None:
        self._native = native
        self._stop_ids = stop_ids
        self.num_bytes = 64 * 1024 + 16 * len(program.text)

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._native.deep_copy(), self._stop_ids)


class LlguidanceBackend:
    """A `GrammarBackend`."""

    def __init__(self, tokens: WorkerVocabulary, max_whitespace: int) -> None:
        self._tokens = tokens
        self._max_whitespace = max_whitespace
        self._executor = llguidance.LLExecutor()
        self._tokenizer = lru_cache(maxsize=4)(self._make_tokenizer)

    def _make_tokenizer(self, visible: tuple[int, ...]) -> Any:
        words = llguidance.TokenizerWrapper(_Words(self._tokens, visible))
        return llguidance.LLTokenizer(words, n_vocab=self._tokens.size, eos_token=list(self._tokens.stop_ids))

    def translate(self, kind: GrammarKind, source: str) -> Program:
        if kind == "structural_tag":
            text, spelled = lark_tag(source, self._max_whitespace)
            return Program("lark", text, self._tokens.named_in(spelled))
        grammar = grammar_of(kind, source, self._max_whitespace)
        lines = ["%llguidance {}", f"start: r_{grammar.root}", *to_lark(grammar)]
        return Program("lark", "\n".join(lines) + "\n")

    def compile(self, program: Program) -> LlguidanceAutomaton:
        grammar = llguidance.LLMatcher.grammar_from_lark(program.text)
        native = llguidance.LLMatcher(self._tokenizer(program.visible), grammar, log_level=0)
        if native.is_error():
            raise BadGrammar(f"the grammar can't be compiled: {shorten(native.get_error().splitlines()[0], 300)}")
        return LlguidanceAutomaton(native, program, self._tokens.stop_ids)

    def tree(self, kind: GrammarKind, source: str, program: Program) -> Grammar | None:
        return grammar_of(kind, source, self._max_whitespace) if kind != "structural_tag" else None

    def fill_all(self, matchers: Sequence[LlguidanceMatcher], masks: Mask) -> None:
        pairs = [(each.native, row) for row, each in enumerate(matchers)]
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, pairs, masks)
        for each, mask in zip(matchers, masks, strict=True):
            each.end(mask)
