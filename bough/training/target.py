"""The model that heads are trained for: what it computes for whole texts, and its output head as a product that can be
differentiated. B texts, T tokens of the longest, E the model's width, M places, V tokens that a head can draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError
from bough.kernels.attention.whole import WholeAttention, whole_inputs
from bough.layers.batch import Batch, Taps
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.models.registry import facts_of


@dataclass(frozen=True, slots=True)
class Watched:
    """What a model has computed for texts, padded at their ends."""

    ids_BT: Tensor
    states: list[Tensor]
    """[B, T, E] at each of the places that were asked for."""
    hidden_BTE: Tensor
    """After the final norm."""


class TrainingTarget:
    """A model that stays as it is."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, context_length: int) -> None:
        """Raises `ConfigError` for models whose states can't be seen, or are not what their head reads."""
        facts = facts_of(checkpoint.config, "auto")
        if facts.through_transformers or facts.embed_dim is not None:
            raise ConfigError(
                what=f"no head can be trained for {checkpoint.name}",
                why="it runs through transformers' own modules"
                if facts.through_transformers
                else "its output head is narrower than its hidden states",
                fix="use --speculative-algorithm NGRAM, SUFFIX or STANDALONE with it",
                param="model",
            )
        self.facts = facts
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = build_model(
            checkpoint, dtype=self.dtype, device=device, quantization="none", context_length=context_length
        )
        assert isinstance(model, Decoder), "others run through transformers"
        self.model = model
        with torch.no_grad():
            columns = model.head.matrix.forward(torch.eye(facts.hidden, dtype=self.dtype, device=device))
            self.head_VE = columns.T.contiguous()

    @torch.no_grad()
    def watch(self, texts: Sequence[Sequence[int]], taps: Sequence[int]) -> Watched:
        """`taps`: as in `DraftFacts`."""
        lengths = np.array([len(text) for text in texts], dtype=np.int32)
        ids_T = torch.tensor([token for text in texts for token in text], device=self.device)
        start = torch.from_numpy(np.cumsum(lengths) - lengths).to(self.device)
        step = torch.arange(int(lengths.max()), device=self.device)
        length_B = torch.from_numpy(lengths).to(self.device).long()
        positions_T = torch.cat([step[:length] for length in lengths.tolist()])
        read = Taps(tuple(sorted(set(taps))))
        batch = Batch(
            ids_T,
            positions_T,
            WholeAttention(whole_inputs(lengths, self.device)),
            num_tokens=len(ids_T),
            taps=read if read.layers else None,
        )
        hidden_TE = self.model.forward(batch)
        at_BT = start[:, None] + torch.minimum(step, length_B[:, None] - 1)
        states = [read.states[read.layers.index(layer)][at_BT] for layer in taps]
        ids_BT = torch.where(step < length_B[:, None], ids_T[at_BT], 0)
        return Watched(ids_BT, states, hidden_TE[at_BT])

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed.tokens.of(ids.flatten()).view(*ids.shape, -1)

    @torch.no_grad()
    def logits(self, hidden_ME: Tensor) -> Tensor:
        return self.model.logits(hidden_ME)

    def head(self, states_ME: Tensor) -> Tensor:
        """The model's own head, on states of a head that is trained."""
        head = self.model.head
        out = F.linear(states_ME, self.head_VE.to(states_ME.dtype))
        if head.bias is not None:
            out = out + head.bias
        if head.scale is not None:
            out = out * head.scale
        return out if head.softcap is None else torch.tanh(out / head.softcap) * head.softcap
