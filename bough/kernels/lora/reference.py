"""Adapters in plain torch, in float32."""

from __future__ import annotations

from torch import Tensor

from bough.kernels.lora import LoraStack, TokenAdapters


def add_lora(out_TO: Tensor, x_TD: Tensor, stack: LoraStack, tokens: TokenAdapters) -> None:
    starts = stack.starts_P1.tolist()
    for slot, at in tokens.groups:
        rank, first = int(stack.ranks_S[slot]), int(stack.offsets_S[slot])
        x_ND = x_TD if at is None else x_TD[at]
        for part in range(stack.parts):
            line, columns = stack.parts * first + part * rank, slice(starts[part], starts[part + 1])
            a_RD = stack.a_LD[line : line + rank].float()
            b_OR = stack.b_OL[columns, first : first + rank].float()
            added_NO = (x_ND.float() @ a_RD.T @ b_OR.T) * float(stack.scales_S[slot])
            if at is None:
                out_TO[:, columns] += added_NO.to(out_TO.dtype)
            else:
                out_TO[at, columns] += added_NO.to(out_TO.dtype)
