"""Idefics 2's vision encoder, and the resampler that turns its patches into a fixed number of positions, as configs
describe them."""

from __future__ import annotations

from dataclasses import dataclass

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import HALF, image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Activation, Dense, NormFacts
from bough.config.tower_facts import VitFacts
from bough.config.vit import BILINEAR, read_vit


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics2Vision:
    """SigLIP over images that keep their aspect ratio; learned queries attend to its output and become the
    positions."""

    vit: VitFacts
    shortest: int
    longest: int
    """Edges of an image, at least and at most."""
    splits: bool
    """Whether an image is encoded as four quarters and the whole."""
    inner: int
    out: int
    activation: Activation
    queries: int
    depth: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormFacts
    mlp: Dense

    def tower(self) -> TowerFacts:
        hidden, out, norm = self.vit.block.hidden, self.out, self.norm.num_parameters(self.out)
        projection = 2 * hidden * self.inner + self.inner * out
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * out
        layer = 3 * norm + heads + self.mlp.num_parameters(out)
        patches = (self.longest // self.vit.patch) ** 2
        return TowerFacts(
            kinds=("image",),
            num_parameters=self.vit.num_parameters() + projection + self.depth * layer + norm + self.queries * out,
            width=out,
            tokens_per_position=max(1, -(-patches // self.queries)),
            values_per_token=max(self.vit.values_per_token, 3 * self.inner),
            max_positions=self.queries,
        )


def read_idefics2(config: Fields) -> Idefics2Vision:
    settings, reader = processor_fields(config), config.inner("perceiver_config")
    facts, out = image_facts(settings, mean=HALF, std=HALF, resample=BILINEAR), config.count("hidden_size")
    eps = config.number("rms_norm_eps", default=1e-5)
    if reader.count("hidden_size", default=4096) == out:
        eps = reader.number("rms_norm_eps", default=1e-6)
    activation = reader.choice(reading.ACTIVATIONS, "hidden_act", default="silu")
    return Idefics2Vision(
        vit=read_vit(config, mean=HALF, std=HALF, resample=BILINEAR, patch_size=32, image_size=224, model_type=""),
        shortest=facts.edge("shortest_edge", 378),
        longest=facts.edge("longest_edge", 980),
        splits=settings.flag("do_image_splitting"),
        inner=config.count("intermediate_size"),
        out=out,
        activation=reading.activation(config),
        queries=reader.count("resampler_n_latents", default=64),
        depth=reader.count("resampler_depth", default=3),
        num_heads=reader.count("resampler_n_heads", default=16),
        num_kv_heads=reader.count("num_key_value_heads", default=4),
        head_dim=reader.count("resampler_head_dim", default=96),
        norm=NormFacts(eps=eps),
        mlp=Dense(intermediate=4 * out, activation=activation),
    )
