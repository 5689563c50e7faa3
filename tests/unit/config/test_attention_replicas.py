"""Settings of attention replicas and of shared contexts: SGLang's spellings, and what can't be had with them."""

from __future__ import annotations

import pytest

from bough.cli.config_flags import parse
from bough.config.hosts import crew_of
from bough.config.server_args import build_config
from bough.core.errors import ConfigError


def test_the_old_spelling_means_the_new_one() -> None:
    loaded = parse(["--tp-size", "8", "--dp-size", "4", "--enable-dp-attention"], environ={}).loaded
    parallel = loaded.config.parallel
    assert (parallel.dp_size, parallel.attn_dp_size, parallel.num_schedulers) == (1, 4, 4)
    assert any("--dp-size 4 is read as --attn-dp-size 4" in note for note in loaded.notes)
    assert build_config(tp_size=8, attn_dp_size=4).parallel.attn_dp_size == 4
    both = build_config(tp_size=4, dp_size=2, attn_dp_size=2, enable_dp_attention=True).parallel
    assert (both.dp_size, both.attn_dp_size, both.num_schedulers) == (2, 2, 4)
    shared = parse(["--attention-context-parallel-size", "2", "--tp-size", "2"], environ={}).loaded.config.parallel
    assert shared.attn_cp_size == 2


def test_a_scheduler_has_the_ranks_of_its_replica() -> None:
    parallel = build_config(tp_size=4, attn_dp_size=2).parallel
    assert [crew_of(parallel, rank) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert crew_of(build_config(tp_size=2, pp_size=2).parallel, 3) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"tp_size": 4, "attn_dp_size": 3}, "can't be cut into 3 parts"),
        ({"tp_size": 4, "attn_dp_size": 2, "pp_size": 2}, "--pp-size and --attn-dp-size 2"),
        ({"tp_size": 4, "enable_dp_attention": True}, "there is one replica of attention"),
        ({"tp_size": 4, "attn_dp_size": 4, "ep_size": 2, "moe_a2a_backend": "alltoall"}, "can't be dispatched"),
        ({"tp_size": 4, "attn_dp_size": 2, "is_embedding": True}, "--is-embedding and --attn-dp-size 2"),
        ({"tp_size": 6, "attn_dp_size": 2, "attn_cp_size": 2}, "can't be cut into 4 parts"),
        ({"tp_size": 2, "attn_cp_size": 2, "pp_size": 2}, "--pp-size and --attn-cp-size 2"),
        ({"tp_size": 2, "attn_cp_size": 2, "is_embedding": True}, "--is-embedding and --attn-cp-size 2"),
        ({"tp_size": 2, "attn_cp_size": 2, "tensor_dump_dir": "/dumps"}, "--tensor-dump-dir and --attn-cp-size 2"),
        ({"tp_size": 4, "attn_cp_size": 4, "ep_size": 2, "moe_a2a_backend": "alltoall"}, "can't be dispatched"),
        ({"tp_size": 256, "attn_dp_size": 256, "dp_size": 2}, "2 replicas of 256 replicas"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build_config(**settings)
