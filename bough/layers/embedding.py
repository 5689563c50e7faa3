"""The vocabulary at both ends of a model, its rows spread over the ranks. T tokens, D width, L rows with logits."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.norm import fill
from bough.quantization.scheme import Matrix, Part
from bough.weights.slots import Slot
from bough.weights.stored import Stored


class LaterRows(NamedTuple):
    """Vectors of tokens from an id on, in place of a table's rows."""

    first: int
    rows_VD: Tensor

    def put(self, ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """`x_TD`: the rows of the table."""
        at_T = ids_T - self.first
        return torch.where((at_T >= 0)[:, None], F.embedding(at_T.clamp(0, len(self.rows_VD) - 1), self.rows_VD), x_TD)


class VocabEmbedding(nn.Module):
    """Token ids -> vectors."""

    def __init__(self, vocab: int, hidden: int, build: Build, *, scale: float | None = None) -> None:
        """`scale` multiplies the vectors, rounded to their dtype first (Gemma)."""
        super().__init__()
        self.axis = build.mesh.heads
        self.shape = (vocab, hidden)
        self.rows = vocab_rows(vocab, build)
        self.build = build
        self.matrix: Matrix
        self.scale = None if scale is None else torch.tensor(scale, dtype=build.dtype).item()
        self.later: LaterRows | None = None
        """Where the last tokens have vectors of another part of the model (Gemma 3n)."""

    def place(self, name: str) -> None:
        self.matrix = self.build.matrix(name, (Part("", self.shape, self.rows, slice(None)),), "embedding")

    def slots(self) -> dict[str, Slot]:
        return self.matrix.weight_slots()

    def forward(self, batch: Batch) -> Tensor:
        x_TD, media = self.of(batch.ids_T), batch.media
        if media is not None:
            x_TD.index_copy_(0, media.at_M, media.values_MW[:, : x_TD.shape[1]])
        return x_TD

    def of(self, ids_T: Tensor) -> Tensor:
        """The vectors of tokens -> [T, D]."""
        x_TD = self._lookup(ids_T)
        if self.scale is not None:
            x_TD = x_TD * self.scale
        return x_TD if self.later is None else self.later.put(ids_T, x_TD)

    def vectors(self, ids_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """A table and the row of it that is each token's vector, for what looks them up itself; or [T, D] and None."""
        plain = self.axis.size == 1 and self.scale is None and self.later is None
        table = self.matrix.table() if plain else None
        return (self.of(ids_T), None) if table is None else (table, ids_T)

    def _lookup(self, ids_T: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self.matrix.lookup(ids_T)
        local_T = ids_T - self.rows.start
        elsewhere_T = (local_T < 0) | (local_T >= self.rows.stop - self.rows.start)
        x_TD = self.matrix.lookup(local_T.masked_fill(elsewhere_T, 0))
        return self.axis.talk.all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0))


class Table(nn.Module):
    """Learned vectors by number: positions, segments. Every rank holds all of them."""

    def __init__(self, rows: int, dim: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(tuple(self.weight.shape), partial(fill, self.weight))}

    def forward(self, at_T: Tensor) -> Tensor:
        return F.embedding(at_T, self.weight)


class Head(nn.Module):
    """Hidden states -> logits of the whole vocabulary, on every rank."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        build: Build,
        *,
        tied_to: VocabEmbedding | None = None,
        bias: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        unspoken: int = 0,
    ) -> None:
        """`scale` multiplies the logits, before `softcap`. `unspoken`: tokens behind those of `vocab`, whose logits are the
        least there is."""
        super().__init__()
        self.scale = scale
        self.unspoken = unspoken
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(vocab, dtype=build.dtype, device=build.device), requires_grad=False)
        self.vocab = vocab
        self.axis = build.mesh.heads
        self.softcap = softcap
        self.share = -(-vocab // self.axis.size)
        self.is_tied = tied_to is not None
        self.shape = (vocab, hidden)
        self.build = build
        self.matrix: Matrix
        self._tied_to = (tied_to,)  # in a tuple: not a module of this one

    def place(self, name: str) -> None:
        """Comes after the embedding's, whose matrix a tied head shares."""
        (tied_to,) = self._tied_to
        if tied_to is not None:
            self.matrix = tied_to.matrix
        else:
            self.matrix = self.build.matrix(
                name, (Part("", self.shape, vocab_rows(self.vocab, self.build), slice(None)),), "head"
            )

    def slots(self) -> dict[str, Slot]:
        slots = {} if self.bias is None else {"bias": Slot(tuple(self.bias.shape), partial(fill, self.bias))}
        if self.is_tied:  # some checkpoints hold the embedding a second time
            return {**slots, "weight": Slot(self.shape, _discard, optional=True)}
        return {**slots, **self.matrix.weight_slots()}

    def forward(self, hidden_LD: Tensor) -> Tensor:
        logits = self.matrix.forward(hidden_LD)
        if self.axis.size > 1:
            short = self.share - logits.shape[1]  # the last rank may hold fewer rows
            logits = nn.functional.pad(logits, (0, short)) if short else logits
            every_RLV = self.axis.talk.all_gather(logits)
            logits = every_RLV.transpose(0, 1).reshape(len(logits), -1)[:, : self.vocab]
        return self.shaped(logits if self.bias is None else logits + self.bias)

    def shaped(self, logits: Tensor) -> Tensor:
        """Scaled, soft-capped, and of the whole vocabulary."""
        if self.scale is not None:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.unspoken:
            logits = F.pad(logits, (0, self.unspoken), value=torch.finfo(logits.dtype).min)
        return logits


def vocab_rows(vocab: int, build: Build) -> slice:
    """This rank's rows: all ranks hold equally many but the last."""
    axis = build.mesh.heads
    share = -(-vocab // axis.size)
    return slice(min(axis.rank * share, vocab), min((axis.rank + 1) * share, vocab))


def _discard(stored: Stored) -> None:
    pass
