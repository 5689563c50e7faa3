"""Attention without pages: every row keeps its keys and values in plain tensors. Slow, and simple enough to be believed."""

from __future__ import annotations

import torch
from torch import Tensor

from bough.layers.batch import AttentionSpec, Batch, IndexQueries


class DenseAttention:
    """An AttentionBackend for rows that grow step by step."""

    def __init__(self, num_rows: int) -> None:
        self.lengths = [0] * num_rows
        self.queries: list[tuple[int, int]] = []
        self.kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.index: dict[tuple[int, int], Tensor] = {}
        self.chosen: list[Tensor] = []
        """By row of the step: bool [queries, keys], which ones were chosen last."""

    def step(self, queries: list[tuple[int, list[int]]], *, all_logits: bool = False, device: str = "cpu") -> Batch:
        """A batch in which each (row, new tokens) continues its row; logits are wanted at each row's last token."""
        self.queries = [(row, len(ids)) for row, ids in queries]
        positions: list[int] = []
        for row, ids in queries:
            positions += range(self.lengths[row], self.lengths[row] + len(ids))
            self.lengths[row] += len(ids)
        ends = torch.tensor([len(ids) for _, ids in queries]).cumsum(0) - 1
        tokens = [token for _, ids in queries for token in ids]
        return Batch(
            ids_T=torch.tensor(tokens, device=device),
            positions_T=torch.tensor(positions, device=device),
            attention=self,
            logits_at=None if all_logits else ends.to(device),
            num_tokens=len(tokens),
        )

    def choose(self, spec: AttentionSpec, index: IndexQueries) -> None:
        self.chosen, start = [], 0
        for row, num_query in self.queries:
            part = slice(start, start + num_query)
            start += num_query
            before = self.index.get((spec.layer, row), index.k_TD[:0])
            k_SD = self.index[spec.layer, row] = torch.cat((before, index.k_TD[part]))
            heads_TIS = torch.einsum("tid,sd->tis", index.q_TID[part].float(), k_SD.float()).relu()
            scores_TS = torch.einsum("ti,tis->ts", index.weights_TI[part], heads_TIS)
            chosen_TS = torch.zeros_like(scores_TS, dtype=torch.bool)
            for query in range(num_query):
                seen = len(before) + query + 1
                best = sorted(range(seen), key=lambda key, at=query: (scores_TS[at, key].item(), key))[-spec.topk :]
                chosen_TS[query, best] = True
            self.chosen.append(chosen_TS)

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        start = 0
        for row, num_query in self.queries:
            part = slice(start, start + num_query)
            start += num_query
            k_SKH, v_SKH = k_TKH[part], v_TKH[part]
            if (spec.layer, row) in self.kv:
                old_k, old_v = self.kv[spec.layer, row]
                k_SKH, v_SKH = torch.cat((old_k, k_SKH)), torch.cat((old_v, v_SKH))
            self.kv[spec.layer, row] = (k_SKH, v_SKH)
        return self.attend(spec, q_TNH)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        outputs, start = [], 0
        for number, (row, num_query) in enumerate(self.queries):
            part = slice(start, start + num_query)
            start += num_query
            chosen_TS = self.chosen[number] if spec.topk else None
            outputs.append(_attend(spec, q_TNH[part], *self.kv[spec.layer, row], chosen_TS))
        return torch.cat(outputs)


def _attend(
    spec: AttentionSpec, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, chosen_TS: Tensor | None = None
) -> Tensor:
    group = spec.num_heads // spec.num_kv_heads
    k_SNH, v_SNH = k_SKH.repeat_interleave(group, dim=1), v_SKH.repeat_interleave(group, dim=1)
    scores_NTS = torch.einsum("tnh,snh->nts", q_TNH.float(), k_SNH.float()) * spec.scale
    if spec.softcap is not None:
        scores_NTS = torch.tanh(scores_NTS / spec.softcap) * spec.softcap
    num_query, num_keys = q_TNH.shape[0], k_SKH.shape[0]
    at_T1, keys_S = torch.arange(num_keys - num_query, num_keys)[:, None], torch.arange(num_keys)
    distance_TS = (at_T1 - keys_S).to(q_TNH.device)
    hidden_TS = distance_TS < 0
    if spec.window is not None:
        hidden_TS = hidden_TS | (distance_TS >= spec.window)
    if spec.chunk is not None:
        hidden_TS = hidden_TS | (keys_S < at_T1 // spec.chunk * spec.chunk).to(q_TNH.device)
    if spec.slopes is not None:
        scores_NTS = scores_NTS - spec.slopes[:, None, None] * distance_TS
    if chosen_TS is not None:
        hidden_TS = hidden_TS | ~chosen_TS
    scores_NTS = scores_NTS.masked_fill(hidden_TS, float("-inf"))
    if spec.sinks is not None:
        beside_NT1 = spec.sinks[:, None, None].expand(-1, num_query, 1)
        scores_NTS = torch.cat((scores_NTS, beside_NT1), -1)
    weights_NTS = scores_NTS.softmax(-1)[..., :num_keys]
    return torch.einsum("nts,snh->tnh", weights_NTS, v_SNH.float()).to(q_TNH.dtype).reshape(num_query, -1)
