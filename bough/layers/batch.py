"""The tensors of one forward pass, as models and layers see them. T tokens of all rows, R rows, page table P wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionSpec, IndexKeys, IndexQueries, LatentMaps, RawLatents
from bough.layers.adapters import PassAdapters

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "Batch",
    "BatchMedia",
    "BatchStates",
    "ChoosingBackend",
    "CrossKv",
    "DraftedRows",
    "IndexKeys",
    "IndexQueries",
    "LatentBackend",
    "LatentMaps",
    "Model",
    "RawLatents",
    "RotatingBackend",
    "StatePhase",
    "Taps",
    "attention_specs",
    "chooses",
    "rotates",
    "takes_latents",
]


class AttentionBackend(Protocol):
    """Attention over the paged KV of this step. Built by the runner for each step (or once per graph)."""

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Writes k and v to their pages, then attends. Returns [T, num_heads * v_head_dim]."""
        ...

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """Attends to what an earlier layer of the pass, that of `spec.layer`, has written: as `forward`, without writing.
        Once that layer has been narrowed (`RotatingBackend.queries_at`), takes queries of the tokens that are left."""
        ...


class RotatingBackend(AttentionBackend, Protocol):
    """An attention backend that also norms and rotates queries and keys, in the pass that writes the KV."""

    def queries_at(self, spec: AttentionSpec) -> Tensor | None:
        """int64 indices of the tokens whose queries a layer's forward takes, and whose results it gives; None: all.

        Only the last layer that keeps KV may leave out others, which are not in `Batch.logits_at`.
        """
        ...

    def forward_rope(
        self,
        spec: AttentionSpec,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        offset: float,
        interleaved: bool = False,
    ) -> Tensor:
        """Like `forward`."""
        ...


def rotates(backend: AttentionBackend) -> TypeGuard[RotatingBackend]:
    """Asked by every layer of every step: `isinstance` of a protocol takes a hundred times as long."""
    return hasattr(backend, "forward_rope")


class LatentBackend(RotatingBackend, Protocol):
    """An attention backend that decides, row by row, whether to read latents as they are or what each head makes of them."""

    def forward_latent(self, spec: AttentionSpec, raw: RawLatents, maps: LatentMaps) -> Tensor:
        """Norms, rotates and writes latents to their pages, then attends. Returns [T, N * V], or of `queries_at` alone."""
        ...


def takes_latents(backend: AttentionBackend) -> TypeGuard[LatentBackend]:
    return hasattr(backend, "forward_latent")


class ChoosingBackend(AttentionBackend, Protocol):
    """An attention backend for layers whose queries read chosen tokens alone."""

    def choose(self, spec: AttentionSpec, index: IndexQueries) -> None:
        """Writes the keys of the step's tokens to the layer's pages, and chooses `spec.topk` tokens for each query. This
        layer, and those after it up to the next that chooses, read no others."""
        ...


def chooses(backend: AttentionBackend) -> TypeGuard[ChoosingBackend]:
    return hasattr(backend, "choose")


@dataclass(slots=True)
class BatchMedia:
    """What a tower made of the media that a step's tokens stand for."""

    at_M: Tensor
    """int64 indices into T."""
    values_MW: Tensor
    """Of each: its embedding, then what deeper layers add, [M, width of the model x (1 + such layers)]."""


class CrossKv(Protocol):
    """The media that rows of this step read, as pages hold them: keys and values of their positions."""

    @property
    def fresh_MW(self) -> Tensor | None:
        """Embeddings of media whose keys and values every layer has to write; None: all are there."""
        ...

    @property
    def has_media_T1(self) -> Tensor:
        """bool [T, 1]: whether a token's row reads any."""
        ...

    def write(self, spec: AttentionSpec, k_MKH: Tensor, v_MKH: Tensor) -> None:
        """Puts what a layer made of `fresh_MW` into its pages."""
        ...

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """[T, num_heads * head_dim]: what each token reads of its row's media; zero where there are none."""
        ...


@dataclass(slots=True)
class StatePhase:
    """Parts of rows whose states are advanced together, and then kept elsewhere where that is wanted."""

    ones_at_N: Tensor
    """int64 indices into T of tokens that are alone in their part..."""
    ones_N: Tensor
    """...and int64: their rows' states."""
    longs: tuple[tuple[slice, int], ...] = ()
    """Tokens of the other parts, and their states."""
    saves: tuple[Tensor, Tensor] | None = None
    """int64: states that are copied behind these parts, and to where; None: none are."""


@dataclass(slots=True)
class DraftedRows:
    """Decode rows that may have drafts, or had some in the step before. Which drafts are right is known when a step is over.
    So a state takes in a row's newest token, which is certain, and not its drafts: what the recurrence takes of these is
    kept, and taken in by the next step, as far as they were right. int64, all of them."""

    slots_R: Tensor
    first_R: Tensor
    """Of each row: its newest token, an index into T..."""
    count_R: Tensor
    """...how many tokens it has, drafts included (0 or less: padding)..."""
    kept_R: Tensor
    """...and how many of those that were kept count."""
    most_kept: int
    """No row has more..."""
    width: int
    """...nor more tokens."""
    padding: int
    """The state that takes what padding writes."""


@dataclass(slots=True)
class BatchStates:
    """What layers keep of the rows' tokens before the step, and advance."""

    layers: Sequence[tuple[Tensor, ...]]
    """By layer that keeps a state: [states, ...] each."""
    phases: Sequence[StatePhase] = ()
    """A row's parts are in phases that follow one another."""
    all_ones_N: Tensor | None = None
    """int64 [T], instead of phases: each token is that of a row of its own, with this state."""
    drafted: DraftedRows | None = None
    """Rows beside those of the phases; None: no drafts are verified."""
    kept: Sequence[Tensor] = ()
    """By layer that keeps a state: what its recurrence takes of drafts, float32 [slots + 1, most drafts, values]."""


@dataclass(slots=True)
class Taps:
    """States of the stream that are read between a model's layers, of all tokens."""

    layers: tuple[int, ...]
    """Ascending: the stream as it enters these layers; the number of layers: as it leaves the last one."""
    states: list[Tensor] = field(default_factory=list)
    """[T, D] each, in the order of `layers`, once the pass has been made."""


@dataclass(slots=True)
class Batch:
    """One forward pass."""

    ids_T: Tensor
    """int64 token ids (already resolved; padded entries are 0)."""
    positions_T: Tensor
    """int64 positions."""
    attention: AttentionBackend
    logits_at: Tensor | None = None
    """int64 indices into T of the tokens whose logits (or hidden states) are wanted; None: all."""
    num_tokens: int = 0
    """Tokens that are real; the rest is padding."""
    loc_T: Tensor | None = None
    """int64, in steps that may be padded: negative for tokens of which nothing is read. None: all are real..."""
    is_padding_T1: Tensor | None = None
    """...and bool [T, 1]: where it is negative, once something has asked (`Stream.is_padding_T1`)."""
    taps: Taps | None = None
    """None: nothing is read between the layers."""
    media: BatchMedia | None = None
    """Embeddings of media, in place of those of `ids_T` at some tokens; None: there are none."""
    axes_AT: Tensor | None = None
    """int64 [axes, T]: positions with several axes (mrope), in steps that have media; None: `positions_T` says all."""
    rotary: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By `id` of a `Rope`: positions and table of this pass, where they differ from the layer's own (`Rope.at`)."""
    cross: CrossKv | None = None
    """What layers with cross attention read; None: the model has none."""
    states: BatchStates | None = None
    """None: layers that keep states take all tokens for one row from its beginning, and keep nothing."""
    adapters: PassAdapters | None = None
    """None: no token has an adapter."""
    first_TO: Tensor | None = None
    """What the first layer projects of each token, where it was looked up with the embeddings and isn't used yet."""
    segments_T: Tensor | None = None
    """int64 segment of each token (0: a pair's first text, 1: its second), for encoders; None: all 0."""


class Model(Protocol):
    """A causal language model. `forward` returns hidden states after the final norm at `batch.logits_at`, [L, D]."""

    def forward(self, batch: Batch) -> Tensor: ...

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """float32 or model-dtype logits [L, vocab], gathered over the mesh, soft-capped and scaled as the model says."""
        ...


def attention_specs(model: torch.nn.Module) -> list[AttentionSpec]:
    """The specs of all attention layers of a model, by layer index: what the KV cache is sized from."""
    specs = [getattr(module, "spec", None) for module in model.modules()]
    return sorted((spec for spec in specs if isinstance(spec, AttentionSpec)), key=lambda spec: spec.layer)
