"""The default model's vocabulary with both backends, in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from bough.config.default_model import default_model_path
from bough.core.sampling import GrammarKind
from bough.grammar import Settings, Vocabulary
from bough.grammar.backend import Automaton, GrammarBackend, make_backend
from bough.grammar.matcher import TokenMatcher
from bough.tokenizer import Tokenizer, load_tokenizer

BACKENDS = ("xgrammar", "llguidance")


@cache
def load() -> tuple[Tokenizer, Vocabulary]:
    tokenizer = load_tokenizer(str(default_model_path()))
    return tokenizer, Vocabulary(tokenizer, 49_152, tokenizer.eos_ids)


@cache
def backend_of(name: str, max_whitespace: int = 8) -> GrammarBackend:
    return make_backend(Settings(backend=name, max_whitespace=max_whitespace), load()[1].tokens)


@cache
def compiled(name: str, kind: GrammarKind, source: str) -> Automaton:
    backend = backend_of(name)
    return backend.compile(backend.translate(kind, source))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load()[0]


@pytest.fixture
def vocabulary() -> Vocabulary:
    return load()[1]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "llguidance":
        pytest.importorskip("llguidance")
    return str(request.param)


@pytest.fixture
def matcher(backend: str) -> Callable[[GrammarKind, str], TokenMatcher]:
    return lambda kind, source: TokenMatcher(compiled(backend, kind, source).matcher(), load()[1])


@pytest.fixture
def fits(backend: str) -> Callable[..., bool]:
    """Does a text fit a source, token by token? Not `whole`: it only has to begin right."""

    def check(kind: GrammarKind, source: str, text: str, *, whole: bool = True) -> bool:
        native = compiled(backend, kind, source).matcher()
        tokens = load()[0].encode(text, add_special_tokens=False)
        return all(native.accept(token) for token in tokens) and (not whole or native.is_complete())

    return check
