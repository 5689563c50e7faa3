"""Log-probabilities of chosen positions: the token's own, the best few, and those of given tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.core.messages import LogprobSpec
from bough.core.step import I32, LogprobArrays
from bough.memory.transfer import download, upload


@dataclass(slots=True)
class Scores:
    """Scored positions, on the device or (after `download`) on their way to the host."""

    row: I32
    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    chosen: Tensor

    def download(self) -> Scores:
        """Queues the copies to the host; `arrays` may be called once the device got there."""
        return Scores(
            row=self.row,
            token_ids=download(self.token_ids),
            logprobs=download(self.logprobs),
            top_ids=download(self.top_ids),
            top_logprobs=download(self.top_logprobs),
            chosen=download(self.chosen),
        )

    def arrays(self) -> LogprobArrays:
        return LogprobArrays(
            row=self.row,
            token_ids=self.token_ids.numpy().astype(np.int32),
            logprobs=self.logprobs.numpy(),
            top_ids=self.top_ids.numpy().astype(np.int32),
            top_logprobs=self.top_logprobs.numpy(),
            chosen_logprobs=self.chosen.numpy(),
        )


def score(logits: Tensor, tokens: Tensor, row: I32, specs: list[LogprobSpec]) -> Scores:
    """Scores `tokens[i]` under `logits[i]`, which belongs to row `row[i]` with `specs[i]`."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, tokens[:, None].long()).squeeze(1)
    k = min(max((spec.top for spec in specs), default=0), logits.shape[1])
    if k:
        top_logprobs, top_ids = logprobs.topk(k, dim=-1)
    else:
        top_logprobs, top_ids = _nothing(logprobs), _nothing(tokens)
    width = max((len(spec.token_ids) for spec in specs), default=0)
    if width:
        wanted = np.zeros((len(specs), width), np.int64)
        for i, spec in enumerate(specs):
            wanted[i, : len(spec.token_ids)] = spec.token_ids
        chosen = logprobs.gather(1, upload(wanted, logits.device))
    else:
        chosen = _nothing(logprobs)
    return Scores(row=row, token_ids=tokens, logprobs=own, top_ids=top_ids, top_logprobs=top_logprobs, chosen=chosen)


def _nothing(like: Tensor) -> Tensor:
    """[rows, 0]: no view, which would keep alive what it looks at."""
    return like.new_empty((len(like), 0))


def join_scores(parts: list[Scores]) -> Scores:
    """Pieces of one step (large prompts are scored in pieces), padded to a common width."""
    if len(parts) == 1:
        return parts[0]
    return Scores(
        row=np.concatenate([p.row for p in parts]),
        token_ids=torch.cat([p.token_ids for p in parts]),
        logprobs=torch.cat([p.logprobs for p in parts]),
        top_ids=_stack([p.top_ids for p in parts], -1),
        top_logprobs=_stack([p.top_logprobs for p in parts], 0.0),
        chosen=_stack([p.chosen for p in parts], 0.0),
    )


def _stack(tensors: list[Tensor], fill: float) -> Tensor:
    width = max(t.shape[1] for t in tensors)
    return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1]), value=fill) for t in tensors])
