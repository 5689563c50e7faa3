"""The vocabulary at both ends of a model, its rows spread over the mesh. T tokens, D width, L rows with logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bough.distributed.collectives import all_gather, all_reduce
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.quantization.scheme import Matrix, Part
from bough.weights.slots import Slot
from bough.weights.stored import Stored


class VocabEmbedding(nn.Module):
    """Token ids -> vectors."""

    def __init__(self, vocab: int, hidden: int, build: Build, *, scale: float | None = None) -> None:
        """`scale` multiplies the vectors, rounded to their dtype first (Gemma)."""
        super().__init__()
        self.mesh = build.mesh
        self.shape = (vocab, hidden)
        self.rows = vocab_rows(vocab, build)
        self.matrix = build.scheme.matrix(
            (Part("", (vocab, hidden), self.rows, slice(None)),), dtype=build.dtype, device=build.device
        )
        self.scale = None if scale is None else torch.tensor(scale, dtype=build.dtype).item()

    def slots(self) -> dict[str, Slot]:
        return self.matrix.weight_slots()

    def forward(self, batch: Batch) -> Tensor:
        if batch.embeds_TD is not None:
            return batch.embeds_TD.clone()  # what follows may be added to it in place
        return self.of(batch.ids_T)

    def of(self, ids_T: Tensor) -> Tensor:
        """The vectors of tokens -> [T, D]."""
        x_TD = self._lookup(ids_T)
        return x_TD if self.scale is None else x_TD * self.scale

    def _lookup(self, ids_T: Tensor) -> Tensor:
        if self.mesh.size == 1:
            return self.matrix.lookup(ids_T)
        local_T = ids_T - self.rows.start
        elsewhere_T = (local_T < 0) | (local_T >= self.rows.stop - self.rows.start)
        x_TD = self.matrix.lookup(local_T.masked_fill(elsewhere_T, 0))
        return all_reduce(x_TD.masked_fill(elsewhere_T[:, None], 0), self.mesh)


class Head(nn.Module):
    """Hidden states -> logits of the whole vocabulary, on every rank."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        build: Build,
        *,
        tied_to: VocabEmbedding | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.mesh = build.mesh
        self.softcap = softcap
        self.share = -(-vocab // build.mesh.size)
        self.is_tied = tied_to is not None
        self.shape = (vocab, hidden)
        self.matrix: Matrix
        if tied_to is not None:
            self.matrix = tied_to.matrix
        else:
            part = Part("", (vocab, hidden), vocab_rows(vocab, build), slice(None))
            self.matrix = build.scheme.matrix((part,), dtype=build.dtype, device=build.device)

    def slots(self) -> dict[str, Slot]:
        if self.is_tied:  # some checkpoints hold the embedding a second time
            return {"weight": Slot(self.shape, _discard, optional=True)}
        return self.matrix.weight_slots()

    def forward(self, hidden_LD: Tensor) -> Tensor:
        logits = self.matrix.forward(hidden_LD)
        if self.mesh.size > 1:
            short = self.share - logits.shape[1]  # the last rank may hold fewer rows
            logits = nn.functional.pad(logits, (0, short)) if short else logits
            logits = all_gather(logits, self.mesh)[:, : self.vocab]
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def vocab_rows(vocab: int, build: Build) -> slice:
    """This rank's rows: all ranks hold equally many but the last."""
    share = -(-vocab // build.mesh.size)
    return slice(min(build.mesh.rank * share, vocab), min((build.mesh.rank + 1) * share, vocab))


def _discard(stored: Stored) -> None:
    pass
