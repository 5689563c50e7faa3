"""The model that heads are trained for: what it computes for whole texts, and its output head as a product that can be
differentiated. T tokens, E the model's width, M places, V tokens that a head can draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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

_SPARE_SHARE = 0.4
"""Of the device's free memory: the rest is for activations and logits."""
_HOST_BYTES = 2 << 30
_LOGIT_BYTES = 512 << 20
"""Of one tensor of logits, on a GPU."""


class TargetRows(NamedTuple):
    """The output head of some tokens."""

    weight_VE: Tensor
    bias_V: Tensor | None


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
    def compute(self, texts: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Tensor]:
        """[T, E] at each of `taps` (as in `DraftFacts`), then after the final norm; texts lie one behind the other."""
        lengths = np.array([len(text) for text in texts], dtype=np.int32)
        ids_T = self.on_device(np.concatenate([np.array(text, dtype=np.int64) for text in texts]))
        positions_T = self.on_device(np.concatenate([np.arange(length) for length in lengths]))
        read = Taps(tuple(sorted(set(taps))))
        batch = Batch(
            ids_T,
            positions_T,
            WholeAttention(whole_inputs(lengths, self.device)),
            num_tokens=len(ids_T),
            taps=read if read.layers else None,
        )
        hidden_TE = self.model.forward(batch)
        return [*(read.states[read.layers.index(layer)] for layer in taps), hidden_TE]

    def spare_bytes(self) -> int:
        """What may be kept on the device for the time of a training."""
        if self.device.type != "cuda":
            return _HOST_BYTES
        return int(torch.cuda.mem_get_info(self.device)[0] * _SPARE_SHARE)

    def places_at_once(self, num_tokens: int) -> int:
        """Places whose float32 logits over `num_tokens` tokens are held at a time."""
        return max(64, (_LOGIT_BYTES if self.device.type == "cuda" else _LOGIT_BYTES // 8) // (4 * num_tokens))

    def on_device(self, values: npt.NDArray[Any]) -> Tensor:
        """A copy; the device is not waited for."""
        made = torch.from_numpy(values)
        return made.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else made

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed.tokens.of(ids.flatten()).view(*ids.shape, -1)

    def head(self, states_ME: Tensor, among: TargetRows | None = None) -> Tensor:
        """The model's own head, on its states or on those of a head that is trained. `among`: of some tokens only."""
        head = self.model.head
        rows_VE, bias = (self.head_VE, head.bias) if among is None else among
        out = F.linear(states_ME, rows_VE.to(states_ME.dtype), None if bias is None else bias.to(states_ME.dtype))
        if head.scale is not None:
            out = out * head.scale
        return out if head.softcap is None else torch.tanh(out / head.softcap) * head.softcap

    def rows(self, ids_V: Tensor) -> TargetRows:
        bias = self.model.head.bias
        return TargetRows(self.head_VE[ids_V], None if bias is None else bias[ids_V])
