"""Names of the tensors of Whisper's encoder, as checkpoints of all models that have it spell them."""

from __future__ import annotations

from typing import Final

from bough.weights.mapping import Exact, Fuse, Rename, Rule

HEARING: Final[tuple[Rule, ...]] = (
    Rename("conv1", "tower.conv1"),
    Rename("conv2", "tower.conv2"),
    Exact("embed_positions.weight", "tower.positions.weight"),
    Rename("layer_norm", "tower.norm"),
    Rename("layers.*.self_attn_layer_norm", "tower.blocks.*.attn_norm"),
    Rename("layers.*.final_layer_norm", "tower.blocks.*.mlp_norm"),
    Fuse(
        "tower.blocks.*.attn.qkv",
        q="layers.*.self_attn.q_proj",
        k="layers.*.self_attn.k_proj",
        v="layers.*.self_attn.v_proj",
    ),
    Rename("layers.*.self_attn.out_proj", "tower.blocks.*.attn.out"),
    Rename("layers.*.fc1", "tower.blocks.*.mlp.up"),
    Rename("layers.*.fc2", "tower.blocks.*.mlp.down"),
)
"""Names below the encoder."""
