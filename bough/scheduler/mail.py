"""Outgoing messages: collects tokens and ends of many requests into few messages, in order."""

from __future__ import annotations

import numpy as np

from bough.core.messages import Began, Reply, RowOutput, ToDetokenizer, Tokens, pack_ids
from bough.core.step import I32, I64

_NO_TOKENS = np.empty(0, np.int32)


class Mail:
    """Collects messages until `take`. Tokens of one iteration of the loop share one message."""

    def __init__(self) -> None:
        self._messages: list[ToDetokenizer] = []
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[I32] = []
        self._rows: dict[int, RowOutput] = {}

    def put(self, message: Began | Reply) -> None:
        """Adds a separate message; what was collected before is sent first."""
        self._close()
        self._messages.append(message)

    def add(self, request_id: int, tokens: I32 = _NO_TOKENS, row: RowOutput | None = None) -> None:
        """Adds tokens or the end of one request."""
        if row is not None:
            self._rows[len(self._ids)] = row
        self._ids.append(request_id)
        self._counts.append(len(tokens))
        self._tokens.append(tokens)

    def add_rows(self, ids: I64, counts: I32, tokens: I32) -> int:
        """Adds tokens of many requests. Returns the row of the first, for `say`."""
        first = len(self._ids)
        self._ids.extend(ids.tolist())
        self._counts.extend(counts.tolist())
        self._tokens.append(tokens)
        return first

    def say(self, row: int, output: RowOutput) -> None:
        """Adds further fields to a row."""
        self._rows[row] = output

    def _close(self) -> None:
        if self._ids:
            tokens = self._tokens[0] if len(self._tokens) == 1 else np.concatenate(self._tokens)
            self._messages.append(Tokens(ids=self._ids, counts=self._counts, tokens=pack_ids(tokens), rows=self._rows))
            self._ids, self._counts, self._tokens, self._rows = [], [], [], {}

    def take(self) -> list[ToDetokenizer]:
        """Everything gathered so far."""
        self._close()
        messages, self._messages = self._messages, []
        return messages
