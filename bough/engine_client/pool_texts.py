"""Inputs of pooling models: options for truncation and prompts, and tokenization."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from bough.config.pooling_facts import Spelling
from bough.core.errors import InvalidRequest, no_such_token, overflow
from bough.core.messages import Ids
from bough.engine_client.caller import ANYBODY, Caller
from bough.multimodal.desk import MediaInput
from bough.tokenizer import TokenizerPool

Text: TypeAlias = str | Sequence[int]
"""A text, or token ids."""
PlainInput: TypeAlias = Text | tuple[str, str]
"""A text, token ids, or a pair of texts."""


@dataclass(frozen=True, slots=True)
class MediaText:
    """An input with media and a text, which may be empty."""

    text: str
    media: tuple[MediaInput, ...]
    is_prompt: bool = False
    """A chat template has written it: no other template is put around it. It may be without media."""


Input: TypeAlias = PlainInput | MediaText
Side: TypeAlias = str | MediaText
"""A query or a document."""

WHOLE = -1
"""As `PoolOptions.truncate`: to the context's length."""
_SHORT_IDS = 4096
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """Options of a client for its inputs."""

    truncate: int | None = None
    """Cut texts to this many tokens (`WHOLE`: to what fits); None: refuse those that don't fit."""
    cut_by: str = "truncate=-1"
    """The client's field that requests truncation, for errors; empty: its API has none."""
    add_special_tokens: bool = True
    prompt_name: str | None = None
    """Which of the model's prompts goes before each text; None: its default one, if it has any."""
    instruct: str = ""
    """The instruction (purpose of the embeddings), for models whose template has one."""
    rid: str = ""
    priority: int = 0
    caller: Caller = ANYBODY
    deadline_s: float = 0.0


PLAIN = PoolOptions()


class TextEncoder:
    """Token ids of texts, pairs of texts, and ids; within the context and the vocabulary, or refused."""

    def __init__(
        self,
        tokenizers: TokenizerPool | None,
        *,
        context_length: int,
        vocab_size: int,
        append_eos: bool,
        spelling: Spelling = "own",
    ) -> None:
        self._tokenizer = tokenizers.tokenizer if tokenizers is not None else None
        self._tokenizers = tokenizers
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._append_eos = append_eos
        self._spelling = spelling

    async def encode(self, inputs: Sequence[PlainInput], options: PoolOptions, prefix: str) -> list[tuple[Ids, int]]:
        """Ids of each input and where its second text begins. Raises if one doesn't fit."""
        size = sum(map(_size, inputs)) + len(prefix) * len(inputs)
        return await self.beside_the_loop(lambda: self._encode(inputs, options, prefix), size)

    async def beside_the_loop(self, work: Callable[[], T], size: int) -> T:
        """Runs work on texts of `size` characters (or ids) in total; in a thread, unless it is short."""
        if self._tokenizers is not None:
            return await self._tokenizers.run(work, size)
        return work() if size <= _SHORT_IDS else await asyncio.to_thread(work)

    def _encode(self, inputs: Sequence[PlainInput], options: PoolOptions, prefix: str) -> list[tuple[Ids, int]]:
        most = self.limit(options)
        texts = [respelled(text, self._spelling) for each in inputs if (text := as_text(each, prefix)) is not None]
        encoded = iter(self._tokenise(texts, options, most))
        found: list[tuple[Ids, int]] = []
        for each in inputs:
            ids, second_at = next(encoded) if as_text(each, "") is not None else (self._checked(each, most), 0)
            if len(ids) > self._context_length:
                raise overflow(
                    self._context_length,
                    f"the input has at least {len(ids)} tokens, at most {self._context_length} fit",
                    fix=f"shorten it, or send {options.cut_by} to have it cut" if options.cut_by else "shorten it",
                    param="input",
                )
            found.append((np.asarray(ids, np.int32), second_at))
        return found

    def limit(self, options: PoolOptions) -> int | None:
        """Tokens that a text is cut to; None: texts are not cut."""
        limit = self._context_length
        if options.truncate is None:
            return None
        if options.truncate == WHOLE:
            return limit
        if not 1 <= options.truncate <= limit:
            raise bad_field("truncate_prompt_tokens", f"texts have 1 to {limit} tokens", f"send -1, or 1 to {limit}")
        return options.truncate

    def _tokenise(
        self, texts: Sequence[str | tuple[str, str]], options: PoolOptions, most: int | None
    ) -> list[tuple[list[int], int]]:
        tokenizer = self._tokenizer
        if not texts:
            return []
        if tokenizer is None:
            raise InvalidRequest(
                what="the input is text",
                why="the server has no tokenizer (--skip-tokenizer-init)",
                fix="send token ids",
                param="input",
            )
        special = options.add_special_tokens
        closing = tokenizer.eos_id if self._append_eos and special else None
        room = most if closing is None or most is None else most - 1

        found = tokenizer.encode_whole(texts, add_special_tokens=special, most=room, enough=self._context_length)
        return [
            (ids if closing is None or ids[-1:] == [closing] else [*ids, closing], second_at)
            for ids, second_at in found
        ]

    def _checked(self, ids: PlainInput, most: int | None) -> list[int]:
        vocab = self._vocab_size
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int | np.integer) or not 0 <= each < vocab:
                raise no_such_token(f"the input has token id {str(each)[:40]}", vocab, param="input")
        return [int(each) for each in ids][:most]


def respelled(text: str | tuple[str, str], spelling: Spelling) -> str | tuple[str, str]:
    """A text (or pair) as the model's tokenizer takes it."""
    if spelling == "own":
        return text
    if isinstance(text, tuple):
        return _respelled(text[0], spelling), _respelled(text[1], spelling)
    return _respelled(text, spelling)


def _respelled(text: str, spelling: Spelling) -> str:
    lower = text.lower()
    return lower if spelling == "lower" else " ".join(lower.translate(_NO_PUNCTUATION).split())


def _size(given: PlainInput) -> int:
    """Characters, or ids."""
    text = as_text(given, "")
    return sum(map(len, text)) if isinstance(text, tuple) else len(given)


def as_text(given: PlainInput, prefix: str) -> str | tuple[str, str] | None:
    """The text to tokenise, with its prefix; None: the input already consists of token ids."""
    if isinstance(given, str):
        return prefix + given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        return given[0], str(given[1])
    return None


def bad_field(param: str, why: str, fix: str) -> InvalidRequest:
    return InvalidRequest(what=f"{param} is missing or wrong", why=why, fix=fix, param=param)
