"""What a pooling model returns and how it pools, read from its config and from the module files of
sentence-transformers.

A checkpoint is a pooling model if it has an architecture without a language model head or with a classifier, a
modules.json with a pooling module, or if `--is-embedding` is set. Other checkpoints generate text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from bough.config.model_facts import ModelFacts
from bough.core.errors import ConfigError, UnsupportedModel
from bough.core.media import MediaKind

PoolMode = Literal["cls", "last", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"]
Task = Literal["embed", "sparse", "classify"]
Spelling = Literal["own", "lower", "plain"]
"""Normalisation of texts before they are tokenized: none, lower case, or lower case without punctuation."""
ScoreScale = Literal["identity", "sigmoid", "softmax"]
StepActivation = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]

DUAL_FAMILIES: Final = ("CLIP", "Siglip", "Siglip2")
_ARCHITECTURE: Final = re.compile(
    r"(?P<family>\w+?)(?P<form>LMHeadModel|TextModel|Model|ForCausalLM|ForSequenceClassification|ForMaskedLM|ForRewardModel)"
)
_ACTIVATIONS: Final[dict[str, StepActivation]] = {
    name: name for name in ("identity", "tanh", "relu", "gelu", "silu", "sigmoid")
}
_OLD_MODES: Final[dict[str, PoolMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_MODES: Final[dict[str, PoolMode]] = {**{mode: mode for mode in _OLD_MODES.values()}, "lasttoken": "last"}


class DenseFacts(Struct, frozen=True, kw_only=True):
    """A projection after pooling."""

    path: str
    """Folder with its weights, below the checkpoint's."""
    in_dim: int
    out_dim: int
    bias: bool
    activation: StepActivation


class PoolingFacts(Struct, frozen=True, kw_only=True):
    """Facts about a pooling model, for the runner and the API workers. Sent between processes."""

    task: Task
    family: str
    """The architecture without its ending: "Bert", "Qwen3" ..."""
    modes: tuple[PoolMode, ...] = ("cls",)
    """How token vectors become one vector; several methods are concatenated."""
    dense: tuple[DenseFacts, ...] = ()
    normalise: bool = False
    width: int
    """Number of values in a result: the size of an embedding, of the vocabulary, or the number of labels."""
    dimensions: tuple[int, ...] = ()
    """Sizes to which an embedding may be truncated, beside its full size."""
    any_dimension: bool = False
    """Whether it may be truncated to any size."""
    labels: tuple[str, ...] = ()
    score: ScoreScale = "identity"
    """How a classifier's logits become scores."""
    reward_head: bool = False
    """The score has a head of two layers (Qwen2's reward models)."""
    sparse_sum: bool = False
    """Sparse weights are summed over the tokens instead of taking the maximum."""
    sparse_log_twice: bool = False
    whole: bool = True
    """A text must be computed in one piece."""
    prompts: dict[str, str] = {}
    """Texts to put before an input, by name."""
    default_prompt: str = ""
    max_length: int = 0
    """Length to which the authors truncate texts, in tokens; 0: not stated."""
    append_eos: bool = False
    """The tokenizer's end-of-sequence token closes every text."""
    pad_to: int = 0
    """Tokens that every text is padded to, padding included in the result (SigLIP); 0: no padding."""
    pad_id: int = 0
    """The token that texts are padded with."""
    pad_left: bool = False
    """Whether padding comes before the text."""
    spelling: Spelling = "own"
    media: tuple[MediaKind, ...] = ()
    """Kinds of media that an input may have."""
    apart: bool = False
    """Whether an input is either a text or a medium, never both."""

    def legal_dimensions(self) -> str:
        """For an error message."""
        if self.any_dimension:
            return f"1 to {self.width}"
        return ", ".join(map(str, sorted({*self.dimensions, self.width})))

    def allows(self, dimensions: int) -> bool:
        """Whether an embedding may be truncated to this size: always to its native size, to others if the model allows
        it."""
        if dimensions == self.width:
            return True
        return dimensions in self.dimensions or (self.any_dimension and 1 <= dimensions < self.width)


class RerankTokens(Struct, frozen=True, kw_only=True):
    """Tokens whose probabilities are the score of a generative reranker."""

    true_id: int
    false_id: int | None = None


def split_architecture(architecture: str) -> tuple[str, str]:
    """("Bert", "ForMaskedLM") of "BertForMaskedLM"; ("", "") of what has another ending."""
    found = _ARCHITECTURE.fullmatch(architecture)
    return (found["family"], found["form"]) if found else ("", "")


def pooling_facts(facts: ModelFacts, path: Path, *, forced: bool = False, mode: str = "auto") -> PoolingFacts | None:
    """How the checkpoint in `path` pools; None: it generates text. `mode` overrides the pooling method. Raises
    `UnsupportedModel` for modules of sentence-transformers that are not supported.
    """
    family, form = split_architecture(facts.architecture)
    folder = path if path.is_dir() else path.parent
    modules = read_modules(folder)
    kinds = [kind for kind, _ in modules]
    generative = form in ("ForCausalLM", "LMHeadModel", "")
    if generative and not forced and "Pooling" not in kinds:
        if mode != "auto":
            raise ConfigError(
                what=f"--pooling {mode} was given, but {facts.architecture} generates",
                why="it is served as a generative model unless --is-embedding is given",
                fix="add --is-embedding",
                param="pooling",
            )
        return None
    if form in ("ForSequenceClassification", "ForRewardModel"):
        return _classifier(facts, family, form, folder)
    if is_dual(facts.architecture):
        return _dual(facts, family, folder, mode)
    says_sparse = "SpladePooling" in kinds or (form == "ForMaskedLM" and "Pooling" not in kinds)
    if mode == "sparse" or (mode == "auto" and says_sparse):
        return _sparse(facts, family, form, folder, dict(modules))
    return _embedder(facts, family, folder, modules, mode)


def rerank_tokens(path: Path) -> RerankTokens | None:
    """How a generative reranker's files define its score."""
    folder = path if path.is_dir() else path.parent
    found = dict(read_modules(folder)).get("LogitScore")
    if found is None:
        return None
    true_id, false_id = found.get("true_token_id"), found.get("false_token_id")
    return RerankTokens(true_id=int(true_id), false_id=false_id) if isinstance(true_id, int) else None


def read_modules(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """sentence-transformers' modules in order: (kind, its config with its "path"). Empty: there is no modules.json."""
    listed = _read(folder / "modules.json")
    if not isinstance(listed, list):
        return []
    modules = []
    for entry in listed:
        kind = str(entry.get("type", "")).rpartition(".")[2]
        inner = str(entry.get("path", ""))
        if Path(inner).is_absolute() or ".." in Path(inner).parts:
            raise ConfigError(what=f"{folder / 'modules.json'} points outside the checkpoint", why=f"to {inner!r}")
        config = _read(folder / inner / "config.json") if inner else {}
        modules.append((kind, {**(config if isinstance(config, dict) else {}), "path": inner}))
    return modules


def is_dual(architecture: str) -> bool:
    """Whether an architecture is a dual encoder of texts and images (CLIP, SigLIP)."""
    family, form = split_architecture(architecture)
    return family in DUAL_FAMILIES and form == "Model"


# -- by task --------------------------------------------------------------------------------------


def _embedder(
    facts: ModelFacts, family: str, folder: Path, modules: list[tuple[str, dict[str, Any]]], mode: str
) -> PoolingFacts:
    modes: tuple[PoolMode, ...] = ("cls" if facts.encoder is not None else "last",)
    normalised = not modules
    dense: list[DenseFacts] = []
    for kind, config in modules:
        match kind:
            case "Transformer" | "MLMTransformer" | "Dropout" | "SpladePooling":
                pass
            case "Pooling":
                modes = _modes_of(config)
            case "Normalize":
                normalised = True
            case "Dense":
                dense.append(_dense_of(config))
            case _:
                raise UnsupportedModel(
                    what=f"the model's module {kind} can't be computed",
                    why="known are Transformer, Pooling, Dense, Normalize, SpladePooling",
                    fix="choose another model",
                )
    if mode not in ("auto", "sparse"):
        modes = (_MODES[mode],)
    width = dense[-1].out_dim if dense else facts.hidden * len(modes)
    dimensions, any_dimension = _matryoshka(facts, width)
    settings = _read_object(folder / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (settings.get("prompts") or {}).items() if text}
    return PoolingFacts(
        task="embed",
        family=family,
        modes=modes,
        dense=tuple(dense),
        normalise=normalised,
        width=width,
        dimensions=dimensions,
        any_dimension=any_dimension,
        whole=facts.bidirectional or modes != ("last",),
        media=facts.tower.kinds if facts.tower is not None and modes == ("last",) and not facts.bidirectional else (),
        prompts=prompts,
        default_prompt=prompts.get(str(settings.get("default_prompt_name")), ""),
        **_text_rules(folder),
    )


def _dual(facts: ModelFacts, family: str, folder: Path, mode: str) -> PoolingFacts:
    """A dual encoder: texts are pooled by their last token, images by the vision encoder's own pooling."""
    if mode not in ("auto", "last"):
        raise ConfigError(
            what=f"--pooling {mode} does not work with {facts.architecture}",
            why="its encoders have been trained with one way to pool",
            fix="leave --pooling out",
            param="pooling",
        )
    assert facts.tower is not None, "what makes it a dual encoder"
    padded = family != "CLIP"
    settings = _read_object(folder / "tokenizer_config.json")
    named = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    rules = _text_rules(folder)
    if named == "SiglipTokenizer":  # closes texts, and says so nowhere
        rules["append_eos"] = True
    dimensions, any_dimension = _matryoshka(facts, facts.tower.width)
    return PoolingFacts(
        task="embed",
        family=family,
        modes=("last",),
        normalise=True,
        width=facts.tower.width,
        dimensions=dimensions,
        any_dimension=any_dimension,
        pad_to=facts.max_context if padded else 0,
        pad_id=_pad_id(folder, facts.config) if padded else 0,
        pad_left=settings.get("padding_side") == "left",
        spelling="own" if not padded else "plain" if named == "SiglipTokenizer" else "lower",
        media=facts.tower.kinds,
        apart=True,
        **rules,
    )


def _matryoshka(facts: ModelFacts, width: int) -> tuple[tuple[int, ...], bool]:
    """Sizes that embeddings may be truncated to by the config, and whether any size is allowed."""
    stated = facts.config.get("matryoshka_dimensions")
    dimensions = tuple(int(each) for each in stated if 0 < int(each) <= width) if isinstance(stated, list) else ()
    return dimensions, bool(facts.config.get("is_matryoshka")) and not dimensions


def _pad_id(folder: Path, config: Mapping[str, Any]) -> int:
    """The id of the tokenizer's padding token; without a tokenizer, the config's."""
    settings = _read_object(folder / "tokenizer_config.json")
    name = settings.get("pad_token")
    name = name.get("content") if isinstance(name, Mapping) else name
    listed = settings.get("added_tokens_decoder")
    tokens = list(listed.items()) if isinstance(listed, Mapping) else []
    if name is not None and not tokens:
        added = _read_object(folder / "tokenizer.json").get("added_tokens") or []
        tokens = [(each.get("id"), each) for each in added]
    for number, token in tokens:
        if name is not None and token.get("content") == name:
            return int(number)
    text = config.get("text_config")
    stated = text.get("pad_token_id") if isinstance(text, Mapping) else None
    return stated if isinstance(stated, int) else 1


def _sparse(
    facts: ModelFacts, family: str, form: str, folder: Path, modules: Mapping[str, dict[str, Any]]
) -> PoolingFacts:
    if facts.encoder is None or form != "ForMaskedLM":
        raise UnsupportedModel(
            what=f"{facts.architecture} has no head for sparse weights",
            why="they are made by the head of a masked language model",
            fix="serve a BertForMaskedLM or XLMRobertaForMaskedLM checkpoint",
        )
    config = modules.get("SpladePooling", {})
    return PoolingFacts(
        task="sparse",
        family=family,
        width=facts.vocab,
        sparse_sum=config.get("pooling_strategy") == "sum",
        sparse_log_twice=config.get("activation_function") == "log1p_relu",
        **_text_rules(folder),
    )


def _classifier(facts: ModelFacts, family: str, form: str, folder: Path) -> PoolingFacts:
    labels = _labels(facts.config)
    if form == "ForRewardModel":
        labels = labels[: int(facts.config.get("num_labels") or 1)]
    return PoolingFacts(
        task="classify",
        family=family,
        modes=("cls" if facts.encoder is not None else "last",),
        width=len(labels),
        labels=labels,
        score=_score_scale(facts.config, len(labels)),
        reward_head=form == "ForRewardModel",
        whole=facts.bidirectional,
        **_text_rules(folder),
    )


# -- details --------------------------------------------------------------------------------------


def _modes_of(config: Mapping[str, Any]) -> tuple[PoolMode, ...]:
    stated = config.get("pooling_mode")
    if stated is None:
        return tuple(mode for key, mode in _OLD_MODES.items() if config.get(key)) or ("mean",)
    names = [stated] if isinstance(stated, str) else list(stated)
    unknown = [name for name in names if name not in _MODES]
    if unknown or not names:
        raise UnsupportedModel(
            what=f"the model's pooling mode {unknown[:1] or names} is not known", why=f"known: {', '.join(_MODES)}"
        )
    return tuple(_MODES[name] for name in names)


def _dense_of(config: Mapping[str, Any]) -> DenseFacts:
    name = str(config.get("activation_function") or "identity").rpartition(".")[2].lower()
    plain = config.get("module_input_name", "sentence_embedding") == "sentence_embedding"
    if name not in _ACTIVATIONS or config.get("use_residual") or not plain:
        raise UnsupportedModel(
            what=f"the model's Dense module in {config['path']} can't be computed",
            why=f"activations known: {', '.join(_ACTIVATIONS)}; no residual, on the pooled vector only",
            fix="choose another model",
        )
    return DenseFacts(
        path=str(config["path"]),
        in_dim=int(config["in_features"]),
        out_dim=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=_ACTIVATIONS[name],
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    return tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels") or 2)))


def _score_scale(config: Mapping[str, Any], num_labels: int) -> ScoreScale:
    inner = config.get("sentence_transformers")
    stated = (inner.get("activation_fn") if isinstance(inner, Mapping) else None) or config.get(
        "sbert_ce_default_activation_function"
    )
    name = str(stated or "").rpartition(".")[2].lower()
    if name in ("identity", "sigmoid", "softmax"):
        return name  # type: ignore[return-value]
    if num_labels == 1 or config.get("problem_type") == "multi_label_classification":
        return "sigmoid"
    return "softmax"


def _text_rules(folder: Path) -> dict[str, Any]:
    """How texts are cut and closed."""
    limit = _read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    tokenizer = _read_object(folder / "tokenizer_config.json")
    return {
        "max_length": int(limit) if isinstance(limit, int) and limit > 0 else 0,
        "append_eos": tokenizer.get("add_eos_token") is True,
    }


def _read(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(what=f"{path} is no JSON", why=str(error), fix="download it again") from error


def _read_object(path: Path) -> dict[str, Any]:
    found = _read(path)
    return found if isinstance(found, dict) else {}
