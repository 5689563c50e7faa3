"""Pooling models: a body (an encoder, or a decoder without its output head) and what becomes of its hidden states.

T tokens, R texts, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import ModelFacts
from bough.config.pooling_facts import DenseFacts, PoolingFacts, StepActivation, is_dual
from bough.core.errors import UnsupportedModel, WeightsError
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.dual_encoder import DualEncoder
from bough.layers.linear import ReplicatedLinear
from bough.layers.pooling import Spans, normalise, pool
from bough.layers.tower import Tower
from bough.models.encoder import Encoder, MaskedLM
from bough.models.registry import DUAL_ENCODERS, ENCODERS, Architecture, architectures, find_architecture
from bough.quantization.unquantized import Unquantized
from bough.weights.from_safetensors import open_safetensors
from bough.weights.mapping import Mapping, Rename, Rule, renamed, retargeted
from bough.weights.stored import copy_into

SPARSE_AT_ONCE: Final = 1 << 25
"""Logits over the vocabulary that exist at the same time, at most."""

_ACTIVATIONS: Final[dict[StepActivation, Callable[[Tensor], Tensor]]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class PooledModel(nn.Module):
    """`forward` gives hidden states like any model; `results` makes of them what clients get."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    @property
    def tower(self) -> Tower | None:
        """What turns media into embeddings; None: the model takes text only."""
        return self.body.tower if isinstance(self.body, Decoder | DualEncoder) else None

    def forward(self, batch: Batch) -> Tensor:
        hidden: Tensor = self.body(batch)
        return hidden

    def results(self, hidden: Tensor, spans: Spans | None) -> Tensor:
        """float32 [R, width]. `spans` None: `hidden` are the texts' last tokens already."""
        out: Tensor = self.head(hidden, spans)
        return out


class EmbedHead(nn.Module):
    """Pools, projects, normalises."""

    def __init__(self, pooling: PoolingFacts, build: Build) -> None:
        super().__init__()
        self.modes = pooling.modes
        self.dense = nn.ModuleList(Projection(each, build) for each in pooling.dense)
        self.normalise = pooling.normalise

    def forward(self, hidden: Tensor, spans: Spans | None) -> Tensor:
        if spans is None:
            x_RD = hidden.float()
        else:
            x_RD = torch.cat([pool(mode, hidden, spans) for mode in self.modes], -1)
        for step in self.dense:
            x_RD = step(x_RD)
        return normalise(x_RD) if self.normalise else x_RD


class ScoreHead(nn.Module):
    """Logits of the labels, from the first token's state or the last one's."""

    def __init__(self, pooling: PoolingFacts, scores: nn.Module) -> None:
        super().__init__()
        self.mode = pooling.modes[0]
        self.scores = scores

    def forward(self, hidden: Tensor, spans: Spans | None) -> Tensor:
        x_RD = hidden.float() if spans is None else pool(self.mode, hidden, spans)
        out: Tensor = self.scores(x_RD)
        return out.float()


class SparseHead(nn.Module):
    """SPLADE: how much each word of the vocabulary is meant by a text."""

    def __init__(self, pooling: PoolingFacts, words: nn.Module) -> None:
        super().__init__()
        self.width = pooling.width
        self.sum = pooling.sparse_sum
        self.log_twice = pooling.sparse_log_twice
        self.words = words

    def forward(self, hidden: Tensor, spans: Spans | None) -> Tensor:
        assert spans is not None, "sparse weights come from all tokens of a text"
        weights: Tensor | None = None
        step = max(1, SPARSE_AT_ONCE // self.width)
        for begin in range(0, len(hidden), step):
            part = slice(begin, begin + step)
            logits_TV = torch.log1p(F.relu(self.words(hidden[part]).float()))
            if self.log_twice:
                logits_TV = torch.log1p(logits_TV)
            if weights is None:
                weights = logits_TV.new_zeros(len(spans.length_R), logits_TV.shape[1])
            if self.sum:
                weights.index_add_(0, spans.row_T[part], logits_TV)
            else:
                weights.scatter_reduce_(0, spans.row_T[part, None].expand(logits_TV.shape), logits_TV, "amax")
        assert weights is not None, "a step has tokens"
        return weights


class Projection(nn.Module):
    """A dense layer after pooling; its weights lie in a file of their own."""

    def __init__(self, facts: DenseFacts, build: Build) -> None:
        super().__init__()
        self.facts = facts
        size = (facts.out_dim, facts.in_dim)
        self.weight = nn.Parameter(torch.empty(size, device=build.device), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if facts.bias:
            self.bias = nn.Parameter(torch.empty(facts.out_dim, device=build.device), requires_grad=False)

    def load(self, folder: Path) -> None:
        """Reads the weights from below the checkpoint's folder."""
        path = folder / self.facts.path / "model.safetensors"
        if not path.exists():
            raise WeightsError(
                what=f"{path} is missing",
                why="the model projects its embeddings with it; pickled weights are not loaded",
                fix="convert the module's weights to safetensors",
            )
        with open_safetensors((path,)) as tensors, torch.no_grad():
            for name, target in (("linear.weight", self.weight), ("linear.bias", self.bias)):
                if target is None:
                    continue
                if name not in tensors or tensors[name].shape != tuple(target.shape):
                    raise WeightsError(
                        what=f"{path} has no {name} of shape {list(target.shape)}", fix="download it again"
                    )
                copy_into(target, tensors[name])

    def forward(self, x_RD: Tensor) -> Tensor:
        return _ACTIVATIONS[self.facts.activation](F.linear(x_RD, self.weight, self.bias))


def pooled_architecture(facts: ModelFacts, pooling: PoolingFacts) -> Architecture:
    """How to make and fill the pooling model. Raises `UnsupportedModel`."""
    if pooling.family in ENCODERS:
        return _encoder_architecture(pooling)
    if is_dual(facts.architecture):
        return _dual_architecture(pooling)
    name = facts.architecture if facts.architecture in architectures() else f"{pooling.family}ForCausalLM"
    if name not in architectures():
        known = sorted({*ENCODERS, *DUAL_ENCODERS, *(each.removesuffix("ForCausalLM") for each in architectures())})
        raise UnsupportedModel(
            what=f"no implementation of {facts.architecture}",
            why=f"pooling models can be made of: {', '.join(known)}",
            fix="choose another model",
        )
    return _decoder_architecture(find_architecture(name), pooling)


def load_projections(model: PooledModel, folder: Path) -> None:
    for module in model.modules():
        if isinstance(module, Projection):
            module.load(folder)


def _encoder_architecture(pooling: PoolingFacts) -> Architecture:
    family = import_module(ENCODERS[pooling.family])

    def make(facts: ModelFacts, build: Build) -> PooledModel:
        body = Encoder(facts, build)
        match pooling.task:
            case "embed":
                return PooledModel(body, EmbedHead(pooling, build))
            case "classify":
                scores = family.make_classifier(facts, pooling.width, _precise(build))
                return PooledModel(body, ScoreHead(pooling, scores))
            case "sparse":
                return PooledModel(body, SparseHead(pooling, MaskedLM(facts, body.embed, build)))

    rules = {"embed": family.EMBEDDER, "classify": family.CLASSIFIER, "sparse": family.MASKED_LM}[pooling.task]
    inner = {"embed": "head", "classify": "head.scores", "sparse": "head.words"}[pooling.task]
    return Architecture(make, _OldNames(*(_moved(rule, inner) for rule in rules)))


def _dual_architecture(pooling: PoolingFacts) -> Architecture:
    family = import_module(DUAL_ENCODERS[pooling.family])

    def make(facts: ModelFacts, build: Build) -> PooledModel:
        return PooledModel(family.make(facts, build), EmbedHead(pooling, build))

    return Architecture(make, family.WEIGHTS)


def _decoder_architecture(generative: Architecture, pooling: PoolingFacts) -> Architecture:
    def make(facts: ModelFacts, build: Build) -> PooledModel:
        body = generative.make(replace(facts, tie_embeddings=True), build)  # tied: the output head costs nothing
        if pooling.task == "embed":
            return PooledModel(body, EmbedHead(pooling, build))
        return PooledModel(body, ScoreHead(pooling, _scores(facts, pooling, _precise(build))))

    rules: list[Rule] = list(_under_body(generative.weights.rules))
    if pooling.task == "classify":
        rules += [Rename("score", "head.scores"), Rename("score.*", "head.scores.*")]
    return Architecture(make, Mapping(*rules))


def _scores(facts: ModelFacts, pooling: PoolingFacts, build: Build) -> nn.Module:
    if not pooling.reward_head:
        return ReplicatedLinear(facts.hidden, pooling.width, build)
    return nn.Sequential(
        ReplicatedLinear(facts.hidden, facts.hidden, build, bias=True),
        nn.ReLU(),
        ReplicatedLinear(facts.hidden, pooling.width, build, bias=True),
    )


def _precise(build: Build) -> Build:
    """Heads are small and computed once a text: in float32."""
    return replace(build, dtype=torch.float32, scheme=Unquantized())


def _under_body(rules: Iterable[Rule]) -> Iterable[Rule]:
    """A generative model's rules for the same model as a body; checkpoints of bodies may leave out the leading `model.`"""
    given = list(rules)
    short = [renamed(rule, lambda source: source.removeprefix("model.")) for rule in given]
    known: list[Rule] = []
    for each in (*short, *given):
        if each not in known:  # families with several prefixes have both already
            known.append(each)
            yield retargeted(each, lambda target: f"body.{target}")


def _moved(rule: Rule, head: str) -> Rule:
    return retargeted(rule, lambda target: head + target.removeprefix("head") if target.startswith("head") else target)


class _OldNames(Mapping):
    """Norms of checkpoints that were converted from TensorFlow are called gamma and beta."""

    def targets_of(self, name: str) -> tuple[str, ...] | None:
        stem, _, last = name.rpartition(".")
        return super().targets_of(f"{stem}.{_NEW_NAMES.get(last, last)}")


_NEW_NAMES: Final = {"gamma": "weight", "beta": "bias"}
