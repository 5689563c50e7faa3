"""The convolution in plain torch, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_row(x_LC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, state_CW: Tensor, *, silu: bool = True) -> Tensor:
    seen_CL = torch.cat((state_CW, x_LC.float().T), 1)
    state_CW.copy_(seen_CL[:, seen_CL.shape[1] - state_CW.shape[1] :])
    out_LC = F.conv1d(seen_CL, weight_CW[:, None], bias_C, groups=len(seen_CL)).T
    return F.silu(out_LC) if silu else out_LC


def conv_ones(
    x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_SCW: Tensor, at_N: Tensor, *, silu: bool = True
) -> Tensor:
    seen_NCW = torch.cat((states_SCW[at_N], x_NC.float()[:, :, None]), 2)
    states_SCW[at_N] = seen_NCW[:, :, 1:]
    out_NC = (seen_NCW * weight_CW).sum(2)
    out_NC = out_NC if bias_C is None else out_NC + bias_C
    return F.silu(out_NC) if silu else out_NC
