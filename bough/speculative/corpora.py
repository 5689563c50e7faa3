"""Texts that an operator has brought to draft from. Every request may draft from them, whatever its namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bough.core.errors import InvalidRequest
from bough.core.messages import Corpus, unpack_ids
from bough.speculative.store import TokenStore


class Corpora:
    """Corpora by name, `most_tokens` in all. A corpus that comes in parts is used when the last of them is there."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._stores: dict[str, TokenStore] = {}
        self._coming: dict[str, TokenStore] = {}

    def __iter__(self) -> Iterator[TokenStore]:
        return iter(self._stores.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of all corpora, those that are still coming included."""
        return sum(store.num_tokens for stores in (self._stores, self._coming) for store in stores.values())

    def handle(self, message: Corpus) -> dict[str, Any]:
        """Does what the message says, and returns what to answer. Raises `InvalidRequest`."""
        match message.action:
            case "add":
                return self._add(message)
            case "remove":
                self._coming.pop(message.corpus_id, None)
                if self._stores.pop(message.corpus_id, None) is None:
                    raise InvalidRequest(
                        what=f"there is no corpus {message.corpus_id[:60]!r}",
                        why=f"there are: {', '.join(sorted(self._stores)) or 'none'}",
                        fix="send the name of one of them",
                        param="corpus_id",
                    )
                return {}
            case "list":
                return {"corpora": [[name, store.num_tokens] for name, store in self._stores.items()]}

    def _add(self, message: Corpus) -> dict[str, Any]:
        name, tokens = message.corpus_id, unpack_ids(message.tokens)
        if name in self._stores:
            raise InvalidRequest(
                what=f"there is a corpus {name[:60]!r} already",
                why="a corpus does not change",
                fix="remove it first with /remove_external_corpus, or choose another corpus_id",
                param="corpus_id",
            )
        if self.num_tokens + len(tokens) > self._most_tokens:
            self._coming.pop(name, None)
            raise InvalidRequest(
                what=f"corpus {name[:60]!r} is too large",
                why=f"all corpora together may have {self._most_tokens:,} tokens",
                fix="remove another one, or start the server with more --speculative-ngram-external-corpus-max-tokens",
                param="corpus_id",
            )
        if message.is_first:
            self._coming[name] = TokenStore()
        store = self._coming.setdefault(name, TokenStore())
        store.add(tokens.astype(np.int32))
        if message.goes_on:
            return {}
        self._stores[name] = self._coming.pop(name)
        return {"corpora": [[name, self._stores[name].num_tokens]]}
