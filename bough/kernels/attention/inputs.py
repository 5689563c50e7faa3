"""What attention needs to know about one step. Filled by the runner, read by every attention backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

I32 = npt.NDArray[np.int32]


class Spec(Protocol):
    """What one attention layer computes (`bough.layers.batch.AttentionSpec` is one)."""

    @property
    def layer(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def v_head_dim(self) -> int | None: ...
    @property
    def causal(self) -> bool: ...


@dataclass(slots=True)
class SharedGroups:
    """`core.step.SharedSpans` on the device, padded to fixed sizes so that a captured graph can read any grouping.

    Rows `rows_S[start_G1[g]:start_G1[g + 1]]` (one query token each) share their first `num_tokens_G[g]` KV tokens, which
    are read from the pages of the group's first row. Rows are in at most one group. Padding: groups with 0 tokens and
    `start_G1` repeating its last value; what `rows_S` holds beyond the last start is ignored.
    """

    rows_S: Tensor
    """int32 [room for rows]."""
    start_G1: Tensor
    """int32 [room for groups + 1]."""
    num_tokens_G: Tensor
    """int32 [room for groups], multiples of the page size."""


@dataclass(slots=True)
class HostLengths:
    """Lengths the host knows exactly, for steps that run eagerly: lets a backend pick kernels row by row."""

    num_query_R: I32
    context_R: I32
    """KV tokens of the row before this step."""


@dataclass(slots=True)
class Tail:
    """The tokens of a step whose hidden states are read after the last layer: of the others it computes keys and values."""

    at_L: Tensor
    """int64 [L] indices into T."""
    inputs: Callable[[], AttentionInputs]
    """Makes the same tokens rows of one query each. Called by the last layer: the first must not wait for it."""


@dataclass(slots=True)
class AttentionInputs:
    """One step over R rows and T tokens (both may be padded). Row r's queries are tokens
    `query_start_R1[r] .. query_start_R1[r + 1]` and are the last of its `kv_len_R[r]` KV tokens.

    In a captured graph the tensors are fixed buffers whose contents change between replays, and the Python numbers are
    upper bounds that hold for every replay. Padded rows have no queries, or `kv_len_R` 0; padded tokens have `loc_T` -1.
    Output at tokens that belong to no row, or to a row with `kv_len_R` 0, is zero.
    """

    query_start_R1: Tensor
    """int32 [R + 1]; entry R is the number of real tokens."""
    kv_len_R: Tensor
    """int32 [R]: KV tokens of the row, those of this step included."""
    slots_R: Tensor
    """int32 [R]: the row's line in `page_table`."""
    page_table: Tensor
    """int32 [num_slots, P]."""
    loc_T: Tensor
    """int64 [T]: `page * page_size + offset` where the token's KV goes; -1: nowhere."""
    page_size: int
    max_query: int
    """No row has more query tokens."""
    max_kv: int
    """No row has more KV tokens."""
    k_caches: Sequence[Tensor]
    """By layer: [num_pages, page_size, num_kv_heads, head_dim], in the model's dtype or float8_e4m3fn."""
    v_caches: Sequence[Tensor]
    shared: SharedGroups | None = None
    """None: nothing is shared, and no shared kernel runs."""
    host: HostLengths | None = None
    """None in a captured graph."""
    k_scales: Sequence[float] = field(default=())
    """By layer: the cache holds k / k_scale. Empty: 1."""
    v_scales: Sequence[float] = field(default=())
    tail: Tail | None = None
    """All that the last layer has to attend for; None: every token. A backend may leave it aside."""

    @property
    def num_rows(self) -> int:
        return self.kv_len_R.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.loc_T.shape[0]

    def scales(self, layer: int) -> tuple[float, float]:
        """(k_scale, v_scale) of a layer."""
        return (self.k_scales[layer] if self.k_scales else 1.0), (self.v_scales[layer] if self.v_scales else 1.0)
