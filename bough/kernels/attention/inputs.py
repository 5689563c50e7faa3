"""What attention needs to know about one step. Filled by the runner, read by every attention backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bough.kernels.kv_codes import Ranges

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """The keys by which tokens are chosen: one of each token, whose first numbers are rotated."""

    dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention layer computes. Fixed at model construction."""

    layer: int
    """Index into the KV cache."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Sliding window: a query at position p sees positions p - window + 1 .. p (to p + window - 1 if not causal)."""
    softcap: float | None = None
    v_head_dim: int | None = None
    """Width of a value head where it differs from `head_dim`."""
    causal: bool = True
    chunk: int | None = None
    """A query at position p sees positions p // chunk * chunk .. p. A layer has a window or a chunk, not both."""
    sinks: Tensor | None = None
    """float32 [num_heads]: a logit for each head that takes part in the softmax and adds nothing."""
    slopes: Tensor | None = None
    """float32 [num_heads]: what each position of a key adds to a score (ALiBi; a constant by query changes nothing)."""

    media: int = 0
    """Positions of a request's media at most, where it reads those instead of tokens (cross attention)."""
    latent: bool = False
    """The cache holds keys alone: a value is the first `v_head_dim` numbers of its key."""
    both_ways: bool = True
    """Spans of tokens that see each other in both directions (`two_way.TwoWaySpan`) do so in this layer."""
    is_shared: bool = False
    """Later layers read this one's KV, too (`AttentionBackend.attend`)."""
    topk: int = 0
    """A query reads this number of tokens at most: those that were chosen last (`ChoosingBackend.choose`); 0: all..."""
    index: IndexKeys | None = None
    """...and what this layer keeps of a token to choose by; None: it takes the choice of a layer before."""

    @property
    def v_width(self) -> int:
        """Of a value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def is_plain(self) -> bool:
        """Whether no chunk, sink, slope or latent asks for more than common kernels compute."""
        return self.chunk is None and self.sinks is None and self.slopes is None and not self.latent


Spec = AttentionSpec


class LatentMaps(Protocol):
    """What would make each head's keys (C numbers) and values (V) of latents (R), applied from either side."""

    v_dim: int

    @property
    def weight(self) -> Tensor:
        """[N, C + V, R]"""
        ...

    def absorb(self, q_TNC: Tensor, out_TNR: Tensor) -> None:
        """Fills `out_TNR` with queries that read latents as `q_TNC` would read the keys made of them."""
        ...

    def values(self, read_TNR: Tensor, out_TNV: Tensor) -> None:
        """Fills `out_TNV` with what heads read, from sums of latents."""
        ...

    def expand(self, latents_SR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, N, C] and values [S, N, V]."""
        ...


class RawLatents(NamedTuple):
    """What a layer with latents projects: queries whose last numbers are not rotated yet, and of each token a latent that is
    not normed yet with a key that is not rotated yet."""

    q_TNH: Tensor
    """May be written to."""
    kv_TX: Tensor
    norm_R: Tensor
    eps: float
    offset: float
    positions_T: Tensor
    cos_sin_PE: Tensor
    interleaved: bool


class IndexQueries(NamedTuple):
    """What a layer projects to choose tokens by; all is rotated. The score of a token is the sum over I heads of
    weight * relu(query . key)."""

    q_TID: Tensor
    weights_TI: Tensor
    """float32"""
    k_TD: Tensor
    """Of the step's own tokens."""


@dataclass(slots=True)
class SpanTensors:
    """`core.step.SharedSpans` on the device, padded to fixed sizes so that a captured graph can read any of them.

    Rows `rows_M[start_S1[s]:start_S1[s + 1]]` share KV tokens `first_S[s] .. last_S[s] - 1`, all of which come before their
    query tokens. They are read from the pages of the span's first row. Padding: spans with `last_S` 0 and `start_S1`
    repeating its last value; what `rows_M` holds beyond the last start is ignored.
    """

    rows_M: Tensor
    """int32 [room for rows]: a row may be in spans of several levels."""
    start_S1: Tensor
    """int32 [room for spans + 1]."""
    first_S: Tensor
    last_S: Tensor
    """int32 [room for spans], multiples of the page size."""
    level_S: Tensor
    """int32 [room for spans]: how many spans before it a span's rows have."""
    levels: int
    """No level is as large."""
    num_tokens: int
    """No query token of the spans' rows comes behind the first `num_tokens` of the step."""


@dataclass(slots=True)
class HostLengths:
    """Lengths the host knows, for steps that run eagerly: lets a backend pick kernels row by row."""

    num_query_R: I32
    context_R: I32
    """KV tokens of the row before this step at most; 0 only where it is 0."""


@dataclass(slots=True)
class LastRows:
    """The tokens of a step whose hidden states are read after the last layer: of the others it computes keys and values."""

    at_L: Tensor
    """int64 [L] indices into T."""
    inputs: Callable[[], AttentionInputs]
    """Makes the same tokens rows of one query each. Called by the last layer: the first must not wait for it."""
    layer: int | None = None
    """The layer that is the last; None: the one whose KV is the last in the pool."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Where the KV of a model with several lines (`core.kv`) lies. Everything is by line."""

    of_layer: Sequence[int]
    """By layer: its line."""
    tables: Sequence[Tensor]
    locs: Sequence[Tensor]
    page_sizes: Sequence[int]


@dataclass(slots=True)
class TreeMask:
    """What tokens see where not every one follows the one before it. Each sees the KV tokens before `tail_T`, and of the up
    to 64 from there on those whose bit is set."""

    seen_T: Tensor
    """int64 bits."""
    tail_T: Tensor
    """int32"""
    positions_T: Tensor
    """int64, for windows. KV tokens before `tail_T` stand at their place in the row; those behind it within every window."""


@dataclass(slots=True)
class Chain:
    """Passes over the same rows, each with one query that is a token further, of which this is one: a backend may prepare
    for all of them at the first. What one has written is complete before any kernel of the next one's attention starts."""

    place: int
    kv_len_PR: Tensor
    """int32: `AttentionInputs.kv_len_R` of each pass."""
    prepared: dict[object, Any]
    """By what a backend says; the same object in all passes."""


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
    """By layer: [num_pages, page_size, num_kv_heads, head_dim], in the model's dtype or float8_e4m3fn; uint8 codes where
    there are `ranges`."""
    v_caches: Sequence[Tensor]
    index_caches: Sequence[Tensor | None] = ()
    """By layer: [num_pages, page_size, 1, width] of keys that tokens are chosen by; None: it has none. Empty: none has."""
    shared: SpanTensors | None = None
    """None: nothing is shared, and no shared kernel runs."""
    host: HostLengths | None = None
    """None in a captured graph."""
    lists_fresh: bool = False
    """Without `host`: rows without context may be found by the device, and attended to without pages."""
    k_scales: Sequence[float] = field(default=())
    """By layer: the cache holds k / k_scale. Empty: 1."""
    v_scales: Sequence[float] = field(default=())
    ranges: Sequence[Ranges] = field(default=())
    """By layer: those of the codes that the caches hold. Empty: the caches hold floats."""
    tree: TreeMask | None = None
    """None: a query sees its row's KV tokens up to its own. No layer has slopes or chunks where it is given."""
    tail: LastRows | None = None
    """All that the last layer has to attend for; None: every token. A backend may leave it aside."""
    chain: Chain | None = None
    """None: there are no further passes over these rows in the step, or nothing is known of them."""
    lines: Lines | None = None
    """None: all layers have `page_table`, `loc_T` and `page_size`; otherwise those are the first line's."""

    gaps_T2: Tensor | None = None
    """int32 [T, 2]: of its row's KV tokens, a token does not see those from the first of the two up to the second; None: all
    see all. Only for layers without window, chunk and slopes: what a token sees does not depend on places in the row then.
    Taken by the reference, torch's and the CPU's backends."""

    @property
    def num_rows(self) -> int:
        return self.kv_len_R.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.loc_T.shape[0]

    def of_layer(self, layer: int) -> AttentionInputs:
        """The same with the page table, locations and page size of a layer."""
        lines = self.lines
        if lines is None or lines.of_layer[layer] == 0:
            return self
        line = lines.of_layer[layer]
        return replace(self, page_table=lines.tables[line], loc_T=lines.locs[line], page_size=lines.page_sizes[line])

    def ranges_of(self, layer: int) -> Ranges | None:
        """Of a layer whose caches hold codes."""
        return self.ranges[layer] if self.ranges else None

    def scales(self, layer: int) -> tuple[float, float]:
        """(k_scale, v_scale) of a layer."""
        return (self.k_scales[layer] if self.k_scales else 1.0), (self.v_scales[layer] if self.v_scales else 1.0)
