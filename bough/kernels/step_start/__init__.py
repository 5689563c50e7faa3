"""What a step needs before its first layer: the page table brought up to date, and the ids of its tokens.

in: the step's page-table writes and input ids, and the tokens that rows sampled last. out: the table, written; ids of all
tokens. never: what a page or a token means.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def start_step(
    table_P: Tensor, at_U: Tensor, pages_U: Tensor, ids_T: Tensor, slots_T: Tensor, last_token_S: Tensor
) -> Tensor:
    """int64 [T]: `ids[t]`, or where that is negative `last_token[slots[t]]`. Sets `table[at[u]]` to `pages[u]`.

    Contiguous; table and pages are int32, all others int64. A place that is written twice gets the same page both times.
    """
    ids: Tensor = _IMPLEMENTATIONS.pick("start_step", ids_T.device)(
        table_P, at_U, pages_U, ids_T, slots_T, last_token_S
    )
    return ids
