"""The parts of a model, made as its facts describe them."""

from __future__ import annotations

from torch import nn

from bough.config.model_facts import Cross, Gqa, KvMixer, LayerFacts, Mla, ModelFacts, Moe
from bough.config.rope_facts import RopeFacts
from bough.config.shares import stage_layers
from bough.config.state_facts import GatedDelta, Lightning, Mamba, Mamba2, ShortConv, StateMixer
from bough.core.errors import ConfigError
from bough.layers.attention import Attention
from bough.layers.build import Build
from bough.layers.cross_attention import CrossAttention
from bough.layers.gated_delta import GatedDeltaNet
from bough.layers.latent_attention import LatentAttention
from bough.layers.lightning import LightningAttention
from bough.layers.mamba import Mamba2Mixer, MambaMixer
from bough.layers.mlp import make_mlp
from bough.layers.moe import MixtureOfExperts
from bough.layers.norm import LayerNorm, RMSNorm, make_norm
from bough.layers.per_layer import LayerInputGate
from bough.layers.rotary import Rope
from bough.layers.shared_attention import SharedKvAttention
from bough.layers.short_conv import ShortConvMixer
from bough.layers.states import StateLayer

TokenMixer = Attention | SharedKvAttention | LatentAttention | CrossAttention | StateLayer
"""What lets tokens see one another: called with (normed stream, `Batch`), gives what is added to the stream."""


class Parts:
    """Makes the parts of one model. Layers that rotate alike share a table."""

    def __init__(self, facts: ModelFacts, build: Build) -> None:
        self.facts = facts
        self.build = build
        self._ropes: dict[RopeFacts, Rope] = {}

    @property
    def stage(self) -> range:
        """The layers that this rank has; their KV is numbered from the first of them on."""
        mesh = self.build.mesh
        return stage_layers(self.facts.num_layers, mesh.pp.size, mesh.pp.rank, mesh.stage_sizes)

    def layer(self, index: int) -> LayerFacts:
        return self.facts.layers[index]

    def norm(self) -> RMSNorm | LayerNorm:
        """A norm of the stream."""
        return make_norm(self.facts.norm, self.facts.hidden, self.build)

    def attention(self, index: int, *, in_dim: int | None = None) -> TokenMixer:
        """The attention of a layer that has nothing else, or what stands in its place. `in_dim`: as in `Attention`."""
        (_,) = self.layer(index).mixers
        return self.mixer(index, 0, in_dim=in_dim)

    def mixer(self, index: int, number: int, *, in_dim: int | None = None) -> TokenMixer:
        """One of a layer's mixers, by its number among them."""
        layer, hidden, build = self.layer(index), self.facts.hidden, self.build
        before = layer.mixers[:number]
        state = sum(isinstance(each, StateMixer) for each in before)
        state += sum(len(each.state_mixers) for each in self.facts.layers[self.stage.start : index])
        kv = self._kv_place(index) + sum(isinstance(each, KvMixer) for each in before)
        match layer.mixers[number]:
            case GatedDelta() as mixer:
                return GatedDeltaNet(mixer, state, hidden, build)
            case Mamba2() as mixer:
                return Mamba2Mixer(mixer, state, hidden, build)
            case Mamba() as mixer:
                return MambaMixer(mixer, state, hidden, build)
            case Lightning() as mixer:
                return LightningAttention(mixer, state, hidden, build)
            case ShortConv() as mixer:
                return ShortConvMixer(mixer, state, hidden, build)
            case Mla() as mixer:
                return LatentAttention(mixer, kv, hidden, self.rope(mixer.rope), build)
            case Gqa() as mixer if layer.kv_from is not None:
                return SharedKvAttention(mixer, self._kv_place(layer.kv_from), hidden, self.rope(mixer.rope), build)
            case Gqa() as mixer:
                rope, is_shared = self.rope(mixer.rope), any(each.kv_from == index for each in self.facts.layers)
                return Attention(mixer, kv, hidden, rope, build, in_dim=in_dim, is_shared=is_shared)
            case Cross() as mixer:
                return CrossAttention(mixer, kv, hidden, build)

    def _kv_place(self, index: int) -> int:
        """The number of a layer's KV cache."""
        before = self.facts.layers[self.stage.start : index]
        return self.build.first_layer + sum(len(layer.kv_mixers) for layer in before)

    def layer_input_gate(self) -> LayerInputGate:
        """What makes something of a layer's own input."""
        own = self.facts.per_layer
        if own is None:
            raise ConfigError(what=f"{self.facts.architecture} has no inputs of single layers")
        return LayerInputGate(self.facts, own, self.build)

    def feed_forward(self, index: int) -> nn.Module:
        """Dense or a mixture of experts, as the layer has it."""
        ffn = self.layer(index).ffn
        if ffn is None:
            raise ConfigError(what=f"layer {index} of {self.facts.architecture} has no feed-forward block")
        if isinstance(ffn, Moe):
            mixture = sum(isinstance(layer.ffn, Moe) for layer in self.facts.layers[:index])
            return MixtureOfExperts(ffn, self.facts.hidden, self.build, mixture)
        return make_mlp(ffn, self.facts.hidden, self.build)

    def rope(self, facts: RopeFacts | None) -> Rope | None:
        if facts is None:
            return None
        if facts not in self._ropes:
            self._ropes[facts] = Rope(facts, self.build)
        return self._ropes[facts]
