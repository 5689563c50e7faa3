"""Adapters on the CPU: two products of the library for each adapter that the step has, in the dtype of the inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.lora import LoraStack, TokenAdapters


def add_lora(out_TO: Tensor, x_TD: Tensor, stack: LoraStack, tokens: TokenAdapters) -> None:
    starts = stack.starts_P1.tolist()
    for slot, at in tokens.groups:
        rank, first, scale = int(stack.ranks_S[slot]), int(stack.offsets_S[slot]), float(stack.scales_S[slot])
        if not rank:
            continue
        x_ND = x_TD if at is None else x_TD.index_select(0, at)
        narrow_NL = F.linear(x_ND, stack.a_LD[stack.parts * first : stack.parts * (first + rank)])
        for part, narrow_NR in enumerate(torch.split(narrow_NL, rank, 1)):
            columns = slice(starts[part], starts[part + 1])
            added_NO = F.linear(narrow_NR, stack.b_OL[columns, first : first + rank])
            if at is None:
                out_TO[:, columns].add_(added_NO, alpha=scale)
            else:
                out_TO[:, columns].index_add_(0, at, added_NO, alpha=scale)
