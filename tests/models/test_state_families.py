"""Families with layers that keep a state against transformers: see `families.check_family`; broken configs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import STATES, check_family
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.config.server_args import build_config
from bough.core.errors import ConfigError, UnsupportedModel
from bough.engine.decide import check_servable
from bough.models.registry import facts_of

LONG = {
    "bamba-limits", "falcon_h1-norm", "granite4-dense", "jamba-dense", "lfm2_moe-plain", "mamba-untied", "mamba2-bias",
    "nemotron_h", "qwen3_next-dense",
}  # fmt: skip
"""Further variants of families, which `make test` shows once."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in STATES])
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*STATES[case], tmp_path, cached=28)  # in whole pages of 4


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"attn_cp_size": 2, "tp_size": 2}, "attn_cp_size"),
        ({"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 4}, "--speculative-eagle-topk"),
    ],
)
def test_what_states_do_not_allow_is_refused(changes: dict[str, Any], flag: str, tmp_path: Path) -> None:
    prefix, extra = STATES["qwen3_next"]
    make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    config = build_config(model=str(tmp_path), **changes)
    with pytest.raises(ConfigError, match=f"{flag}.* Qwen3NextForCausalLM"):
        check_servable(config, checkpoint, facts_of(checkpoint.config), None)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"mamba_n_heads": 5}, "5 Mamba heads of 16 inputs, which are not 96"),
        ({"mamba_n_groups": 4}, "6 Mamba heads in 4 groups"),
        ({"time_step_limit": [0.0]}, "time_step_limit"),
        ({"mamba_d_state": 0}, "mamba_d_state"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_broken_configs_are_named(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    prefix, extra = STATES["bamba"]
    make_tiny(prefix, tmp_path, **extra)
    with pytest.raises((ConfigError, UnsupportedModel), match=error):
        facts_of({**open_checkpoint(str(tmp_path)).config, **changes})


def test_kimi_linear_as_published(tmp_path: Path) -> None:
    """Sizes in an object of their own, layers by number."""
    prefix, extra = STATES["kimi_linear"]
    make_tiny(prefix, tmp_path, **extra)
    config = open_checkpoint(str(tmp_path)).config
    renamed = {"linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types", "mlp_layer_types"}
    own = {
        "head_dim": 12,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
    }
    published = {key: value for key, value in config.items() if key not in renamed}
    published |= {"linear_attn_config": own, "first_k_dense_replace": 1, "mla_use_nope": True}
    assert facts_of(published).layers == facts_of(config).layers
    with pytest.raises(ConfigError, match="kda_layers are not all"):
        facts_of({**published, "linear_attn_config": {**own, "kda_layers": [1, 3]}})
    with pytest.raises(UnsupportedModel, match="rotated latents"):
        facts_of({**published, "mla_use_nope": False})
