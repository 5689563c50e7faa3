"""The draft model or heads, as their checkpoint's config and headers describe them: read, and compared with the target
model, before any weight is loaded. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from bough.config import reading
from bough.config.fields import Fields
from bough.config.hf import Checkpoint
from bough.config.model_facts import Gqa, HeadNorms, LayerFacts, ModelFacts
from bough.core.errors import ConfigError

DraftMethod = Literal["STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "MEDUSA", "DFLASH"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3:
    """EAGLE-3: reads hidden states from several of the target's layers; the first block also reads a token's
    embedding."""

    target_hidden: int
    """Hidden size of the target."""
    vocab: int | None
    """Size of its draft vocabulary; None: all tokens, with the target's output head."""
    norm_before_residual: bool = False
    """The first block adds to the normed state, not to the state."""
    feature_norms: Literal["", "each", "all"] = ""
    """States are normed before they are joined: each for itself, or all as one vector; empty: not at all."""
    carries_normed: bool = False
    """For drafts after the first, it reads its own output after the norm in place of the target's hidden state."""
    fc_bias: bool = False
    num_taps: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """EAGLE, EAGLE-2 and NextN layers: a token's embedding and the target's last hidden state become one vector, which
    goes through ordinary blocks."""

    target_hidden: int
    norms: bool
    """Both are normed first."""
    hidden_first: bool = False
    """The state comes before the embedding."""
    bias: bool = False
    first_norm: bool = True
    """The first block norms what its attention reads."""
    last_norm: bool = True
    """What leaves the last block is normed, and read so in place of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medusa:
    """Medusa: heads on the target's last hidden state, one per draft."""

    num_heads: int
    num_layers: int
    own_heads: bool
    """Each head has its own output matrix; otherwise they use the target's."""
    vocab: int | None = None
    """Size of the draft vocabulary; None: all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dflash:
    """DFlash: a block of drafts in one pass; its layers use the target's hidden states as keys and values."""

    block_size: int
    mask_id: int
    target_hidden: int
    num_taps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """Facts about a draft model or heads."""

    method: DraftMethod
    model: ModelFacts
    """Its blocks as model facts; for STANDALONE, the whole model. Medusa has no blocks."""
    kind: Eagle3 | Fused | Medusa | Dflash | None = None
    """None: an ordinary model (STANDALONE)."""
    taps: tuple[int, ...] = ()
    """The target's layers whose input it reads, in its own order; an index equal to the number of layers means the
    output of the last one. Empty: it reads nothing, or the hidden states after the final norm."""
    tokens: tuple[int, ...] = ()
    """Ascending: the only tokens that a head which shares the target's drafts; empty: all."""
    num_heads: int = 1
    """NextN: number of heads, each with its own layer, that draft one token after the other."""

    @property
    def layers(self) -> tuple[LayerFacts, ...]:
        """Its layers that have a KV cache."""
        return self.model.layers

    @property
    def most_steps(self) -> int | None:
        """Maximum number of drafts; None: any number."""
        match self.kind:
            case Medusa(num_heads=count):
                return count
            case Dflash(block_size=size):
                return size - 1
        return self.num_heads if self.num_heads > 1 else None

    def num_parameters(self) -> int:
        """Weights, by arithmetic on shapes."""
        model, hidden = self.model, self.model.hidden
        if self.kind is None:
            return model.num_parameters()
        total = 0
        for layer in model.layers:
            total += 2 * hidden + layer.num_parameters(hidden)
        match self.kind:
            case Eagle3(target_hidden=width, vocab=vocab, num_taps=taps):
                return total + hidden * (width * taps + (vocab or 0) + 3) + hidden * model.mixers[0].projected
            case Fused():
                return total + hidden * (2 * hidden + 3)
            case Medusa(num_heads=heads, num_layers=layers, own_heads=own, vocab=vocab):
                return heads * (layers * (hidden + 1) * hidden + (hidden * (vocab or model.vocab) if own else 0))
            case Dflash(target_hidden=width, num_taps=taps):
                return total + hidden * (width * taps + 2)


def read_draft(method: DraftMethod, draft: Checkpoint, target: ModelFacts, model: ModelFacts | None) -> DraftFacts:
    """The facts of the checkpoint `draft`, for `target`. `model`: facts of the whole model, for STANDALONE. Raises
    `ConfigError` if the two do not fit together."""
    _same_kind(method, draft)
    match method:
        case "STANDALONE":
            assert model is not None, "read by its own architecture"
            return _standalone(draft, target, model)
        case "EAGLE3":
            return _eagle3(draft, target)
        case "EAGLE":
            return _eagle(draft, target)
        case "NEXTN":
            return _nextn(draft, target)
        case "MEDUSA":
            return _medusa(draft, target)
        case "DFLASH":
            return _dflash(draft, target)


def _same_kind(method: DraftMethod, draft: Checkpoint) -> None:
    """Refuses a checkpoint whose config names another method. Many name none."""
    if method in ("STANDALONE", "NEXTN"):
        return
    config = draft.config
    names = [*(config.get("architectures") or ()), config.get("model_type"), config.get("speculators_model_type")]
    named = " ".join(str(name).lower() for name in names)
    made_for: DraftMethod | None = None
    if "medusa" in named or "medusa_num_heads" in config:
        made_for = "MEDUSA"
    elif "dflash" in named or "dflash_config" in config:
        made_for = "DFLASH"
    elif "eagle3" in named:
        made_for = "EAGLE3"
    elif "eagle" in named and method not in ("EAGLE", "EAGLE3"):
        made_for = "EAGLE"
    if made_for not in (None, method):
        raise ConfigError(
            what=f"{draft.name} drafts by {made_for}, and --speculative-algorithm is {method}",
            why="its config says so",
            fix=f"use --speculative-algorithm {made_for}, or another --speculative-draft-model-path",
            param="speculative_algorithm",
        )


def _standalone(draft: Checkpoint, target: ModelFacts, model: ModelFacts) -> DraftFacts:
    if model.vocab > target.vocab:
        raise misfit(
            draft,
            f"{draft.name} has a vocabulary of {model.vocab:,} tokens, the model that it is to draft for {target.vocab:,}",
            "a draft is a token of that model: both must have the same tokenizer",
        )
    return DraftFacts(method="STANDALONE", model=model)


def misfit(draft: Checkpoint, what: str, why: str) -> ConfigError:
    return ConfigError(
        what=what,
        why=why,
        fix="name a draft that was made for this model with --speculative-draft-model-path",
        param="speculative_draft_model_path",
    )


def _flat(config: dict[str, Any]) -> Fields:
    """vLLM's "speculators" keep the blocks' config apart."""
    inner = config.get("transformer_layer_config")
    return Fields({**inner, **config} if isinstance(inner, dict) else config)


def _has(draft: Checkpoint, *endings: str, default: bool = False) -> bool:
    """Whether a tensor's name ends so; `default` where there are no weights to look at."""
    if draft.kind == "config-only":
        return default
    return any(name.endswith(endings) for name in draft.tensors)


def _blocks(draft: Checkpoint, fields: Fields, vocab: int) -> ModelFacts:
    """Blocks of Llama's shape, with biases and norms of heads where the checkpoint has them."""
    norm = reading.rms_norm(fields)
    width = reading.head_dim(fields)
    head_norms = HeadNorms(norm=norm) if _has(draft, "self_attn.q_norm.weight") else None
    attention = reading.gqa(
        fields,
        ropes=reading.same_rope(fields, width),
        qkv_bias=_has(draft, "self_attn.q_proj.bias"),
        out_bias=_has(draft, "self_attn.o_proj.bias"),
        head_norms=head_norms,
    )
    ffn = reading.dense(fields, bias=_has(draft, "mlp.down_proj.bias"))
    facts = reading.decoder(fields, attention, [ffn] * len(attention), norm=norm)
    return replace(facts, vocab=vocab, tie_embeddings=False)


def _eagle3(draft: Checkpoint, target: ModelFacts) -> DraftFacts:
    fields = _flat(draft.config)
    eagle = fields.inner("eagle_config")
    vocab = fields.any("draft_vocab_size")
    whole = fields.count("vocab_size", default=target.vocab)
    _same_vocab(draft, whole, target)
    hidden = fields.count("hidden_size")
    target_hidden = fields.count("target_hidden_size", default=hidden)
    _same_width(draft, target_hidden, target)
    own_head = _has(draft, "lm_head.weight", default=vocab is not None)
    taps = _aux_layers(draft, fields, eagle, target)
    norms: Literal["", "each", "all"] = ""
    if fields.flag("fc_norm", "use_aux_norm"):
        norms = "each"
    elif fields.flag("norm_before_fc") or eagle.flag("norm_before_fc"):
        norms = "all"
    if not own_head and hidden != target.hidden:
        raise misfit(
            draft,
            f"{draft.name} has no head of its own, and is {hidden} wide",
            f"the head of {target.architecture} takes {target.hidden}",
        )
    is_speculators = fields.has("speculators_model_type")
    kind = Eagle3(
        target_hidden=target_hidden,
        vocab=(int(vocab) if vocab else whole) if own_head else None,
        norm_before_residual=fields.flag("norm_before_residual", default=is_speculators),
        feature_norms=norms,
        carries_normed=fields.flag("norm_output"),
        fc_bias=_has(draft, "fc.bias"),
        num_taps=len(taps),
    )
    return DraftFacts(method="EAGLE3", model=_blocks(draft, fields, kind.vocab or whole), kind=kind, taps=taps)


def _eagle(draft: Checkpoint, target: ModelFacts) -> DraftFacts:
    fields = _flat(draft.config)
    _same_vocab(draft, fields.count("vocab_size", default=target.vocab), target)
    hidden = fields.count("hidden_size")
    _same_width(draft, hidden, target)
    kind = Fused(
        target_hidden=target.hidden,
        norms=_has(draft, "enorm.weight", "embedding_layernorm.weight"),
        bias=_has(draft, "fc.bias"),
        first_norm=_has(draft, "layers.0.input_layernorm.weight"),
        last_norm=draft.kind != "config-only" and bool({"norm.weight", "model.norm.weight"} & draft.tensors.keys()),
    )
    return DraftFacts(method="EAGLE", model=_blocks(draft, fields, target.vocab), kind=kind)


def _nextn(draft: Checkpoint, target: ModelFacts) -> DraftFacts:
    fields = Fields(draft.config)
    count = fields.count("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", default=1)
    _same_vocab(draft, fields.count("vocab_size"), target)
    _same_width(draft, fields.count("hidden_size"), target)
    # Models with states may end otherwise; and what shares the choice of a layer before has none before it here.
    attending = [layer for layer in target.layers if layer.kv_mixers and not layer.shares_choice]
    model = replace(target, layers=tuple(attending[-1:]) * count, tie_embeddings=True)
    hidden_first = target.architecture.startswith("MiMo")
    return DraftFacts(
        method="NEXTN",
        model=model,
        kind=Fused(target_hidden=target.hidden, norms=True, hidden_first=hidden_first),
        num_heads=count,
    )


def _medusa(draft: Checkpoint, target: ModelFacts) -> DraftFacts:
    fields = Fields(draft.config)
    _same_vocab(draft, fields.count("vocab_size", default=target.vocab), target)
    _same_width(draft, fields.count("hidden_size", default=target.hidden), target)
    layers = fields.count("medusa_num_layers", "num_hidden_layers", default=1)
    vocab = fields.any("draft_vocab_size", "truncated_vocab_size")
    own = _has(draft, f"0.{layers}.weight", "lm_heads.0.weight", default=True)
    kind = Medusa(
        num_heads=fields.count("medusa_num_heads", "num_heads", default=5),
        num_layers=layers,
        own_heads=own,
        vocab=int(vocab) if own and vocab and int(vocab) != target.vocab else None,
    )
    return DraftFacts(method="MEDUSA", model=replace(target, layers=()), kind=kind)


def _dflash(draft: Checkpoint, target: ModelFacts) -> DraftFacts:
    fields = _flat(draft.config)
    more = fields.inner("dflash_config")
    _same_vocab(draft, fields.count("vocab_size", default=target.vocab), target)
    hidden = fields.count("hidden_size")
    _same_width(draft, hidden, target)
    mask_id = more.any("mask_token_id") if more.has("mask_token_id") else fields.any("mask_token_id")
    if not isinstance(mask_id, int) or not 0 <= mask_id < target.vocab:
        raise misfit(
            draft,
            f"{draft.name} has the mask token {mask_id}",
            f"it must be one of the model's {target.vocab:,} tokens",
        )
    model = _blocks(draft, fields, target.vocab)
    ids = more.numbers("target_layer_ids")
    taps = tuple(int(layer) + 1 for layer in ids) if ids else ()
    if not taps:
        counted = fields.numbers("aux_hidden_state_layer_ids")
        taps = tuple(map(int, counted)) if counted else _spread(target.num_layers, model.num_layers)
    _check_taps(draft, taps, target)
    both_ways = tuple(
        replace(layer, mixers=tuple(replace(mixer, causal=False) for mixer in layer.mixers if isinstance(mixer, Gqa)))
        for layer in model.layers
    )
    kind = Dflash(
        block_size=fields.count("block_size", default=16),
        mask_id=mask_id,
        target_hidden=hidden,
        num_taps=len(taps),
    )
    return DraftFacts(method="DFLASH", model=replace(model, layers=both_ways), kind=kind, taps=taps)


def _spread(num_layers: int, count: int) -> tuple[int, ...]:
    """Behind `count` layers from the second to the third last, as evenly as can be."""
    if count == 1:
        return (num_layers // 2 + 1,)
    span = num_layers - 3 - 1
    return tuple(round(1 + place * span / (count - 1)) + 1 for place in range(count))


def _aux_layers(draft: Checkpoint, fields: Fields, eagle: Fields, target: ModelFacts) -> tuple[int, ...]:
    """The target's states that an EAGLE-3 head reads. SGLang's and SpecForge's configs name layers, whose results they are;
    vLLM's count layers before the state."""
    last = target.num_layers
    given = eagle.numbers("eagle_aux_hidden_state_layer_ids")
    more = 1
    if not given:
        given, more = fields.numbers("eagle_aux_hidden_state_layer_ids"), 0
    if given:
        layers = tuple(int(layer) + more for layer in given)
    else:
        layers = (2, last // 2, last - 3)[: fields.count("num_aux_hidden_states", default=3)]
    _check_taps(draft, layers, target)
    return layers


def _check_taps(draft: Checkpoint, taps: tuple[int, ...], target: ModelFacts) -> None:
    if not all(0 <= layer <= target.num_layers for layer in taps):
        raise misfit(
            draft,
            f"{draft.name} reads states at layers {', '.join(map(str, taps))}",
            f"{target.architecture} has {target.num_layers} layers",
        )


def _same_vocab(draft: Checkpoint, vocab: int, target: ModelFacts) -> None:
    if vocab != target.vocab:
        raise misfit(
            draft,
            f"{draft.name} was made for a vocabulary of {vocab:,} tokens, the model has {target.vocab:,}",
            "its drafts would be tokens of another tokenizer",
        )


def _same_width(draft: Checkpoint, width: int, target: ModelFacts) -> None:
    if width != target.hidden:
        raise misfit(
            draft,
            f"{draft.name} was made for states of width {width:,}, the model's are {target.hidden:,} wide",
            "it reads the model's hidden states",
        )
