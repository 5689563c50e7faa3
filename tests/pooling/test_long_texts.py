"""Many or long texts are tokenised, cut and checked beside the event loop, not in it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_pooler import generative, pooler, tokenizer

from bough.core.messages import Delta, End, TokenLogprobs
from bough.engine_client import PoolOptions
from bough.engine_client.pool_texts import WHOLE, TextEncoder
from bough.engine_client.rerank_prompt import Renderer
from bough.tokenizer import Tokenizer, TokenizerPool
from bough.tokenizer.tokenizer import Encoded, FastCodebook

__all__ = ["tokenizer"]

LONG = ["the quick brown fox jumps over the lazy dog " * 200, "and runs far away " * 300]
CUT = PoolOptions(truncate=WHOLE)


class Watched(FastCodebook):
    """Notes the threads in which it is given much to do."""

    def __init__(self, inner: FastCodebook) -> None:
        super().__init__(inner._tokenizer)
        self.threads: set[int] = set()

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self._note(sum(map(len, texts)))
        return super().encode_batch(texts, add_special_tokens)

    def encode_whole(
        self,
        inputs: Sequence[str | tuple[str, str]],
        add_special_tokens: bool,
        most: int | None,
        enough: int | None = None,
    ) -> list[Encoded]:
        self._note(sum(len("".join(given)) for given in inputs))
        return super().encode_whole(inputs, add_special_tokens, most, enough)

    def _note(self, num_chars: int) -> None:
        if num_chars > 1000:
            self.threads.add(threading.get_ident())


def answer(request: Any) -> Delta:
    labels = request.logprobs.token_ids if request.logprobs is not None else ()
    scores = TokenLogprobs([1], [0.0], chosen=[[(label, -1.0) for label in labels]])
    return Delta(id=1, embedding=np.ones(1, "<f4").tobytes(), end=End(reason="stop"), logprobs=scores)


@pytest.mark.parametrize("kind", ["embed", "classify", "pairs", "cut by a template", "rerank", "rerank cut", "labels"])
async def test_long_texts_are_not_the_loops(tokenizer: Tokenizer, kind: str) -> None:
    watched = Watched(tokenizer.codebook)  # type: ignore[arg-type]
    with_watch = Tokenizer(codebook=watched)
    pairs = [("why?", text) for text in LONG]
    if kind in ("rerank", "rerank cut", "labels"):
        made, _ = generative(with_watch, answer, "plain", context_length=20_000 if kind == "rerank" else 64)
        if kind == "labels":
            await made.label_scores("why?", LONG, label_ids=[5], options=CUT)
        else:
            await made.relevance(pairs, CUT if kind == "rerank cut" else PoolOptions())
    else:
        task = "embed" if kind == "embed" else "classify"
        template = "plain" if kind == "cut by a template" else "auto"
        made, _ = pooler(with_watch, answer, template, task=task, width=1)
        made._texts._context_length = 64
        if kind == "embed":
            await made.embed(LONG, CUT)
        elif kind == "classify":
            await made.classify(LONG, CUT)
        else:
            await made.relevance(pairs, CUT)
    assert watched.threads
    assert threading.get_ident() not in watched.threads


@pytest.mark.parametrize("with_tokenizer", [True, False])
async def test_many_ids_are_not_checked_in_the_loop(
    tokenizer: Tokenizer, with_tokenizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    inner = TextEncoder._checked

    def checked(self: TextEncoder, ids: Any, most: int | None) -> list[int]:
        threads.append(threading.get_ident())
        return inner(self, ids, most)

    monkeypatch.setattr(TextEncoder, "_checked", checked)
    pool = TokenizerPool(tokenizer) if with_tokenizer else None
    encoder = TextEncoder(pool, context_length=64, vocab_size=tokenizer.vocab_size, append_eos=False)
    found = await encoder.encode([list(range(60))] * 100, PoolOptions(), "")
    assert len(found) == len(threads) == 100
    assert threading.get_ident() not in threads


async def test_many_short_pairs_are_not_rendered_in_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    inner = Renderer.render

    def render(self: Renderer, query: str, document: str, instruct: str) -> str:
        threads.add(threading.get_ident())
        return inner(self, query, document, instruct)

    made, _ = generative(tokenizer, answer, "plain", context_length=200)  # tries its template once
    monkeypatch.setattr(Renderer, "render", render)
    await made.relevance([("a", "b")] * 500, CUT)
    assert threads
    assert threading.get_ident() not in threads


def test_cutting_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """The library encodes a batch without holding the interpreter, but holds it for a single text."""

    class Library:
        def __getattr__(self, name: str) -> Any:
            assert name != "encode", "it holds the interpreter"
            return getattr(inner, name)

    codebook = FastCodebook(tokenizer.codebook._tokenizer)  # type: ignore[attr-defined]
    inner = codebook._tokenizer
    codebook._tokenizer = Library()  # type: ignore[assignment]
    found = codebook.encode_whole([LONG[0], (LONG[0], LONG[1])], True, 20)
    assert [len(each.ids) for each in found] == [20, 20]
    assert found == tokenizer.encode_whole([LONG[0], (LONG[0], LONG[1])], most=20)


async def test_ids_come_in_any_sequence() -> None:
    encoder = TextEncoder(None, context_length=64, vocab_size=100, append_eos=False)
    found = await encoder.encode([(), (1,), (2, 3), [4], np.array([5])], PoolOptions(), "")
    assert [ids.tolist() for ids, _ in found] == [[], [1], [2, 3], [4], [5]]
