"""A model's architecture under one set of names, independent of the checkpoint's config. Memory plans and models are
built from it.

Each model file has a `read(config)` that fills these; the helpers it uses are in `config/reading.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from bough.config.adapter_facts import AdapterFacts
from bough.config.encoder_facts import EncoderFacts
from bough.config.media_facts import TowerFacts
from bough.config.rope_facts import RopeFacts
from bough.config.state_facts import StateMixer

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2", "xielu"]
"""quick_gelu is x * sigmoid(1.702 x), relu2 the square of relu; xielu has learned parameters of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFacts:
    """A norm: by the root mean square, or ("layer") by mean and deviation."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    """Added to the weights of an RMS norm."""
    bias: bool = False
    """Whether a layer norm has one."""
    weight: bool = True
    """Whether it has weights."""

    def num_parameters(self, width: int) -> int:
        return (width if self.weight else 0) + (width if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Normalisation of queries and keys."""

    norm: NormFacts
    over: Literal["head", "each head", "all heads"] = "head"
    """Each head by the same weights, each by its own, or all heads together as one long vector."""
    after_rope: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries are scaled by their position p: 1 + scale * log(1 + floor((p + shift) / every))."""

    scale: float
    every: int
    shift: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGate:
    """The output of attention is multiplied by gates, a projection of the layer's input."""

    by: Literal["sigmoid", "softplus"] = "sigmoid"
    over: Literal["value", "head"] = "value"
    """One gate per value of a head, or one per head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    """Attention in which groups of heads share keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a head's query and key."""
    v_dim: int | None = None
    """Width of a head's value; None: `head_dim`."""
    scale: float
    """Multiplies the scores."""
    window: int | None = None
    """How many tokens a query sees, its own included; None: all."""
    chunk: int | None = None
    """A query sees the tokens since the last multiple of this position; None: all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    rope: RopeFacts | None = None
    """How positions are rotated; None: not at all."""
    causal: bool = True
    """Whether a token sees only those before it."""
    qkv_bias: bool = False
    k_bias: bool = True
    """If there is a bias: whether the checkpoint has one for keys, too."""
    out_bias: bool = False
    head_norms: HeadNorms | None = None
    sinks: bool = False
    """Attention sinks: each head has a logit that takes part in its softmax and has no value."""
    alibi: float | None = None
    """ALiBi: scores grow with a key's position, with one slope per head, times this; None: no ALiBi."""
    alibi_bias_max: float = 8.0
    """The slopes are powers of 2 ** -(alibi_bias_max / heads)."""
    clip: float | None = None
    """Queries, keys and values are clamped to -clip .. clip, after heads are normed."""
    temperature: Temperature | None = None
    gate: OutputGate | None = None
    value_scale: float | None = None
    """Multiplies values."""
    value_norm: NormFacts | None = None
    """Of each head's value; it has no weights."""
    both_ways: bool = True
    """Tokens of an item whose tower is `atomic` see each other in both directions here."""
    values_are_keys: bool = False
    """Values are the keys before normalisation and rotation: one projection gives both."""

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def planes(self) -> tuple[int, ...]:
        """Values per token in the KV cache: of keys, and of values."""
        return self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Values of a token's queries, keys and values together."""
        return self.num_heads * self.head_dim + sum(self.planes)

    def num_parameters(self, hidden: int, *, own_kv: bool = True) -> int:
        """`own_kv`: whether it makes keys and values, or reads another layer's."""
        read = self.num_heads * self.value_dim
        projected = self.projected
        if self.values_are_keys:
            projected -= self.planes[1]
        if not own_kv:
            projected = self.num_heads * self.head_dim
        biases = (projected if self.qkv_bias else 0) + (hidden if self.out_bias else 0)
        gate = 0 if self.gate is None else hidden * (read if self.gate.over == "value" else self.num_heads)
        return hidden * (projected + read) + gate + biases + self._norm_parameters(own_kv)

    def _norm_parameters(self, own_kv: bool) -> int:
        norms, sinks = self.head_norms, self.num_heads if self.sinks else 0
        if norms is None:
            return sinks
        kv_heads = self.num_kv_heads if own_kv else 0
        width = (1 + own_kv) * self.head_dim if norms.over == "head" else (self.num_heads + kv_heads) * self.head_dim
        return norms.norm.num_parameters(width) + sinks

    @property
    def sees_all(self) -> bool:
        """Whether a token attends to all tokens before it."""
        return self.causal and self.window is None and self.chunk is None and self.alibi is None

    @property
    def keys_turn(self) -> bool:
        """Whether a cached key can be rotated to another position."""
        return self.head_norms is None or not self.head_norms.after_rope or not self.head_norms.norm.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Scores the tokens before a query: the sum over narrow heads of weight * relu(query . key). All heads share a token's
    key, which is kept beside its latent."""

    num_heads: int
    head_dim: int
    interleaved: bool
    """Layout of the rotated pairs: interleaved, or one value in each half."""

    def num_parameters(self, hidden: int, q_rank: int) -> int:
        return q_rank * self.num_heads * self.head_dim + hidden * (self.head_dim + self.num_heads) + 2 * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """A query attends only to some of the tokens before it (DeepSeek sparse attention)."""

    topk: int
    """Number of tokens, those with the best scores."""
    indexer: Indexer | None
    """None: use the choice of the nearest earlier layer that has an indexer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention (MLA): the cache keeps one latent vector per token, from which every head computes
    its key and value, and one rotated key that all heads share."""

    num_heads: int
    q_rank: int | None
    """Rank of the query projection; None: queries are computed from the hidden state directly."""
    kv_rank: int
    """Width of a latent."""
    nope_dim: int
    """Width of the part of a head's query and key that is not rotated."""
    rope_dim: int
    """Width of the part that is rotated."""
    v_dim: int
    """Width of a head's value."""
    scale: float
    norm: NormFacts
    """Of latents."""
    rope: RopeFacts | None = None
    """None: the shared key is not rotated."""
    bias: bool = False
    """Of the projections down to latents and of the last one."""
    temperature: Temperature | None = None
    sparse: Sparse | None = None
    """None: a query attends to all tokens before it."""

    causal: ClassVar[bool] = True
    num_kv_heads: ClassVar[int] = 1
    """Latents are read as one head."""
    keys_turn: ClassVar[bool] = True

    @property
    def kv_values(self) -> int:
        """Values per token in the cache: its latent and the rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def planes(self) -> tuple[int, ...]:
        """Values per token in the KV cache: the latent with the rotated key, and the indexer's key."""
        indexer = self.indexer
        return (self.kv_values,) if indexer is None else (self.kv_values, indexer.head_dim)

    @property
    def indexer(self) -> Indexer | None:
        """This layer's own indexer, which chooses tokens; None: it has none."""
        return None if self.sparse is None else self.sparse.indexer

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def projected(self) -> int:
        """Values of a token's queries, as heads read latents with them, and of its latent; and those of its indexer."""
        indexer = self.indexer
        scored = 0 if indexer is None else (indexer.num_heads + 1) * indexer.head_dim
        return (self.num_heads + 1) * self.kv_values + scored

    def num_parameters(self, hidden: int) -> int:
        queries = self.num_heads * self.head_dim
        total = hidden * queries
        if self.q_rank is not None:
            total = hidden * self.q_rank + self.q_rank * queries + self.q_rank
        total += hidden * self.kv_values + self.kv_rank
        total += self.kv_rank * self.num_heads * (self.nope_dim + self.v_dim) + self.num_heads * self.v_dim * hidden
        if self.bias:
            total += (self.q_rank or 0) + self.kv_values + hidden
        if self.indexer is not None:
            total += self.indexer.num_parameters(hidden, self.q_rank or hidden)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Cross:
    """Cross attention to the media of a request: keys and values of each position are computed once."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies the scores."""
    positions: int
    """Maximum number of positions of a request's media."""
    bias: bool = False
    """Of queries, values and the last product; that of keys is zero."""
    head_norms: HeadNorms | None = None
    gated: bool = False
    """Its output, and that of the block's feed-forward part, are each multiplied by the tanh of a learned number;
    tokens without media pass the block unchanged."""

    causal: ClassVar[bool] = True
    """A token does not see later tokens."""
    keys_turn: ClassVar[bool] = False
    rope: ClassVar[None] = None

    @property
    def planes(self) -> tuple[int, ...]:
        """Values that a position leaves in the KV cache: in keys, and in values."""
        return (self.num_kv_heads * self.head_dim,) * 2

    @property
    def projected(self) -> int:
        """Values of a token's queries."""
        return self.num_heads * self.head_dim

    def num_parameters(self, hidden: int) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = queries + 2 * keys + hidden if self.bias else 0
        norms = 0 if self.head_norms is None else self.head_norms.norm.num_parameters(2 * self.head_dim)
        return hidden * (2 * queries + 2 * keys) + biases + norms + (2 if self.gated else 0)


KvMixer = Gqa | Mla | Cross
"""Mixers with a KV cache: per token, or per position of media."""
Mixer = KvMixer | StateMixer
"""The part of a layer in which tokens see one another: attention, or a recurrent state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A dense feed-forward block."""

    intermediate: int
    """Its inner width."""
    activation: Activation = "silu"
    gated: bool = True
    """down(activation(gate(x)) * up(x)); otherwise down(activation(up(x)))."""
    bias: bool = False
    sparsity: float = 0.0
    """Share of the gates that are set to 0: those below a quantile of a normal distribution with the same mean and
    deviation."""
    gate_scale: float | None = None
    """Multiplies gates before their activation."""

    @property
    def inner_values(self) -> int:
        """Intermediate values per token."""
        return self.intermediate

    def num_parameters(self, hidden: int) -> int:
        ups = 2 if self.gated else 1
        return (ups + 1) * hidden * self.intermediate + (ups * self.intermediate + hidden if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and -limit <= up <= limit (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Routers other than a softmax over all experts; scores are in float32."""

    by: Literal["sigmoid", "softmax", "sparsemixer"] = "sigmoid"
    """How logits become scores. "sparsemixer": two experts, each weighted among those with scores close to it
    (Phi-3.5-MoE)."""
    bias: Literal["", "flat", "row"] = ""
    """A learned bias [E] ("row": [1, E]) is added to decide which experts are chosen; their weights are without it."""
    groups: int = 1
    kept_groups: int = 1
    """Experts are chosen only from the `kept_groups` best of `groups` groups of neighbouring experts."""
    group_by: Literal["best", "best two"] = "best two"
    """The score of a group: that of its best expert, or the sum of its best two."""
    least_sum: float = 0.0
    """Weights are divided by their sum, or by this if it is larger."""
    margin: float = 0.0
    """Of "sparsemixer": how close, relative to the score."""
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap) first."""
    logit_scale: float = 1.0
    """Multiplies logits, before all else."""
    expert_scales: bool = False
    """Each expert has a learned factor of its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts: a router picks a few experts for each token."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    """Intermediate size of an expert."""
    renormalise: bool
    """Whether the chosen experts' weights are made to sum to 1."""
    activation: Activation = "silu"
    shared_intermediate: int = 0
    """Intermediate size of the shared expert; 0: there is none."""
    shared_gated: bool = True
    """Whether the shared expert has a gate."""
    shared_scale: float = 1.0
    """Factor of the shared expert's output."""
    scored: Scored | None = None
    """None: a softmax over all experts gives their weights, and the largest are chosen."""
    scale: float = 1.0
    """Multiplies the chosen experts' weights."""
    router_bias: bool = False
    weighs_input: bool = False
    """The weight multiplies the expert's input instead of its output. For one expert per token."""
    clamped: ClampedGate | None = None
    """How experts' gates are computed, if not by `activation`; their products then have biases."""
    gated: bool = True
    """As of `Dense`, of all experts."""

    @property
    def inner_values(self) -> int:
        """Intermediate values per token, in all of its experts."""
        return self.experts_per_token * self.intermediate

    def num_parameters(self, hidden: int) -> int:
        matrices = 3 if self.gated else 2
        experts = (matrices * hidden * self.intermediate + hidden) * self.num_experts
        if self.clamped is not None:
            experts += (2 * self.intermediate + hidden) * self.num_experts
        biases = int(self.router_bias)
        if self.scored is not None:
            biases += int(self.scored.bias != "") + int(self.scored.expert_scales)
        shared = matrices * hidden * self.shared_intermediate
        gate = hidden if self.shared_intermediate and self.shared_gated else 0
        return experts + biases * self.num_experts + shared + gate


FeedForward = Dense | Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One block."""

    mixers: tuple[Mixer, ...]
    """Usually one; several if a block has parallel mixers, or cross attention to media."""
    ffn: FeedForward | None
    kv_from: int | None = None
    """The earlier layer whose keys and values this one reads instead of its own; None: it has its own."""
    adapter_ranks: int = 0
    """Of all adapters of its matrices together."""
    adapters_fused: bool = True
    """Parts of a matrix that are computed together (queries, keys and values; gate and up) share an adapter's first
    product."""

    def num_parameters(self, hidden: int) -> int:
        """Weights of the mixers and of the feed-forward block, and of adapters."""
        total = 0 if self.ffn is None else self.ffn.num_parameters(hidden)
        for mixer in self.mixers:
            if isinstance(mixer, Gqa):
                total += mixer.num_parameters(hidden, own_kv=self.kv_from is None)
            else:
                total += mixer.num_parameters(hidden)
        return total + self.adapter_parameters(hidden)

    def adapter_parameters(self, hidden: int) -> int:
        """Weights of adapters."""
        total = 0
        if isinstance(self.ffn, Dense):
            ups = 1 + self.ffn.gated
            total += (1 + (1 if self.adapters_fused else ups)) * hidden + (ups + 1) * self.ffn.intermediate
        for mixer in self.mixers:
            if isinstance(mixer, Gqa):
                parts = 2 if mixer.values_are_keys else 3
                total += (1 + (1 if self.adapters_fused else parts)) * hidden
                total += mixer.projected - (mixer.planes[1] if mixer.values_are_keys else 0)
                total += mixer.num_heads * mixer.value_dim
        return self.adapter_ranks * total

    @property
    def kv_mixers(self) -> tuple[KvMixer, ...]:
        """Mixers with a KV cache."""
        return tuple(each for each in self.mixers if isinstance(each, KvMixer)) if self.kv_from is None else ()

    @property
    def shares_choice(self) -> bool:
        """Whether it uses the token choice of an earlier layer."""
        mixers = [each for each in self.mixers if isinstance(each, Mla)]
        return any(each.sparse is not None and each.indexer is None for each in mixers)

    @property
    def state_mixers(self) -> tuple[StateMixer, ...]:
        """Mixers with a recurrent state."""
        return tuple(each for each in self.mixers if isinstance(each, StateMixer))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """A table of vectors that are added to embeddings by position."""

    num_positions: int
    """Rows of the table of learned positions."""
    first: int = 0
    """The row that a text's first token takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """Per-layer embeddings: each layer has its own embedding of every token, which is added to the residual stream
    after its feed-forward block."""

    vocab: int
    """Number of tokens with such an embedding; others use that of token 0."""
    media_token: int = 0
    """The token whose embedding stands for media."""
    width: int
    activation: Activation
    """Activation of the gate, which is computed from the residual stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """Alternating updates (AltUp): there are several residual streams; blocks compute one of them, from which the
    others are predicted and corrected."""

    streams: int
    active: int
    """Index of the stream that blocks compute."""
    scaled: bool
    """Whether what enters the others is of the active one times a learned vector."""
    laurel_rank: int
    """Rank of the learned projection that is added beside attention."""

    def num_parameters(self, hidden: int) -> int:
        """In each block."""
        streams = self.streams
        mixing = streams * hidden + streams**2 + streams**3 + 2 * hidden
        return mixing + 2 * self.laurel_rank * hidden + hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A language model: a decoder, or an encoder of BERT's kind."""

    architecture: str
    hidden: int
    vocab: int
    max_context: int
    norm: NormFacts
    """Of the norms before blocks' halves and of the last one."""
    layers: tuple[LayerFacts, ...]
    block_norms: int = 2
    """Norms of the stream, or of what is added to it, in each block."""
    tie_embeddings: bool = False
    unspoken: int = 0
    """Number of last tokens of the vocabulary that have only embeddings: they occur in prompts and have no logits."""
    embed_scale: float | None = None
    """Multiplies embeddings, rounded to their type first."""
    embed_norm: bool = False
    """Whether embeddings are normed, as blocks norm."""
    embed_dim: int | None = None
    """The width of embeddings and of the head's input where it is not `hidden`: a matrix stands between."""
    positions: LearnedPositions | None = None
    last_norm: bool = True
    """Whether the stream is normed after the last block."""
    head_bias: bool = False
    logit_scale: float | None = None
    """Multiplies the logits."""
    logit_softcap: float | None = None
    residual_scale: float | None = None
    """Multiplies what each half of a block adds."""
    through_transformers: bool = False
    """Computed by a module of transformers (`models/through_transformers.py`)."""
    encoder: EncoderFacts | None = None
    """Facts of BERT-like encoders; None for decoders."""
    tower: TowerFacts | None = None
    """The media encoder; None: the model takes text only, or is served for text only."""
    adapters: tuple[AdapterFacts, ...] = ()
    """Of attention and feed-forward blocks of all layers (`LayerFacts.adapter_ranks`)."""
    built_in_adapters: bool = False
    """They belong to the checkpoint: media choose among them. Otherwise the operator has given them, and requests do."""
    per_layer: PerLayerInputs | None = None
    altup: AltUp | None = None
    deepstack: int = 0
    """Leading layers after which further features of the tower are added at media positions."""
    config: Mapping[str, Any]
    """The config as it was read, for architectures with facts of their own."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def with_adapters(self, adapters: tuple[AdapterFacts, ...], *, built_in: bool) -> ModelFacts:
        """The same model with adapters."""
        ranks = sum(each.rank for each in adapters)
        layers = tuple(replace(layer, adapter_ranks=ranks, adapters_fused=built_in) for layer in self.layers)
        return replace(self, adapters=adapters, built_in_adapters=built_in, layers=layers)

    @property
    def adapter_parameters(self) -> int:
        """Weights of adapters."""
        return sum(layer.adapter_parameters(self.hidden) for layer in self.layers)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Of all layers, in order."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def kv_mixers(self) -> tuple[KvMixer, ...]:
        """Of all layers, those that keep KV: by number of their KV cache."""
        return tuple(mixer for layer in self.layers for mixer in layer.kv_mixers)

    @property
    def state_mixers(self) -> tuple[StateMixer, ...]:
        """Of all layers, those that keep a state: by number of their states."""
        return tuple(mixer for layer in self.layers for mixer in layer.state_mixers)

    @property
    def shares_kv(self) -> bool:
        """Whether some layers read the KV of others."""
        return any(layer.kv_from is not None for layer in self.layers)

    @property
    def topk(self) -> int:
        """Maximum number of tokens that a query attends to in sparse attention; 0: there is none."""
        return max((mixer.sparse.topk for mixer in self.mixers if isinstance(mixer, Mla) and mixer.sparse), default=0)

    @property
    def reads_media(self) -> bool:
        """Whether cross attention reads media, instead of prompts with embeddings of them."""
        return any(isinstance(mixer, Cross) for mixer in self.mixers)

    @property
    def bidirectional(self) -> bool:
        """Attention is bidirectional, so a text must be computed in one piece."""
        return any(not mixer.causal for mixer in self.mixers)

    @property
    def ropes(self) -> tuple[RopeFacts | None, ...]:
        """By layer of the KV cache: how keys are rotated."""
        return tuple(mixer.rope for mixer in self.kv_mixers)

    @property
    def keys_turn(self) -> bool:
        """Whether cached keys can be rotated to other positions: positions must be in rotated keys, or nowhere."""
        return self.positions is None and all(mixer.keys_turn for mixer in self.mixers)

    @property
    def takes_items(self) -> bool:
        """Whether a prompt may end in items that don't see each other: what a token sees then depends on no place in the row
        but its own."""
        return self.positions is None and all(isinstance(mixer, Gqa) and mixer.sees_all for mixer in self.mixers)

    @property
    def block_parameters(self) -> int:
        """Weights of a block apart from its mixers and feed-forward part: norms and others."""
        total = self.block_norms * self.norm.num_parameters(self.hidden)
        if self.per_layer is not None:
            total += 2 * self.hidden * self.per_layer.width + self.norm.num_parameters(self.hidden)
        return total + (0 if self.altup is None else self.altup.num_parameters(self.hidden))

    def end_parameters(self, rows: int) -> int:
        """Weights before the first block and after the last, with `rows` of the vocabulary."""
        width = self.embed_dim or self.hidden
        total = rows * width * (1 if self.tie_embeddings else 2) - self.unspoken * width
        total += self.norm.num_parameters(self.hidden) * (self.last_norm + self.embed_norm)
        if self.embed_dim is not None:
            total += 2 * self.embed_dim * self.hidden
        if self.positions is not None:
            total += self.positions.num_positions * self.hidden
        if self.per_layer is not None:
            mine = -(-self.per_layer.vocab * rows // self.vocab)
            total += self.num_layers * self.per_layer.width * (mine + self.hidden) + self.per_layer.width
        if self.altup is not None:
            total += 2 * (self.altup.streams - 1) * self.hidden**2
        return total + (self.vocab if self.head_bias else 0)

    def num_parameters(self) -> int:
        """Weights of the model, by arithmetic on its shapes."""
        total = self.end_parameters(self.vocab) + (self.tower.num_parameters if self.tower is not None else 0)
        for layer in self.layers:
            total += self.block_parameters + layer.num_parameters(self.hidden)
        return total
