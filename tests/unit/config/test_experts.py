"""Settings of spread experts: what is refused, and what a location says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bough.config.concerns import ParallelConfig
from bough.config.experts import ExpertPlan, read_location
from bough.config.server_args import build_config
from bough.core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"moe_a2a_backend": "alltoall"}, "all experts are on every rank"),
        ({"ep_num_redundant_experts": 2}, "all experts are on every rank"),
        ({"enable_eplb": True}, "all experts are on every rank"),
        ({"tp_size": 2, "ep_size": 2, "eplb_rebalance_num_iterations": 0}, "eplb_rebalance_num_iterations is 0"),
        ({"tp_size": 2, "ep_size": 2, "ep_dispatch_algorithm": "static"}, "ep_dispatch_algorithm is static"),
        ({"tp_size": 2, "ep_size": 2, "eplb_min_rebalancing_utilization_threshold": 1.5}, "is 1.5"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build_config(**settings)


@pytest.mark.parametrize("name", ["deepep", "mooncake", "flashinfer", "pplx"])
def test_other_exchanges_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(tp_size=2, ep_size=2, moe_a2a_backend=name)
    assert "never run" in caught.value.why
    assert "alltoall" in caught.value.fix


def test_slots_at_the_start() -> None:
    assert ExpertPlan().slots_of(3, 4) == [0, 1, 2, 3]
    assert ExpertPlan(redundant=2).slots_of(0, 4) == [0, 1, 2, 3, 0, 1]
    plan = ExpertPlan.of(ParallelConfig(tp_size=2, ep_size=2, eplb=True))
    assert plan.moves
    assert plan.records


def test_a_location_is_a_file_or_an_object(tmp_path: Path) -> None:
    assert read_location("trivial") is None
    slots = {"physical_to_logical_map": [[1, 0], [0, 1]]}
    file = tmp_path / "location.json"
    file.write_text(json.dumps(slots))
    for given in (str(file), json.dumps(slots)):
        location = read_location(given)
        assert location is not None
        assert location.slots == ((1, 0), (0, 1))
    location = read_location('{"logical_count": [[[1, 2]], [[3, 4]]]}')
    assert location is not None
    assert location.counts == ((4.0, 6.0),), "passes are summed"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("/nowhere.json", "can't be read"),
        ("experts.pt", "can't be read"),
        ("{", "can't be read"),
        ("{}", "has neither"),
        ('{"logical_count": []}', "no table"),
        ('{"logical_count": [[1], [1, 2]]}', "no table"),
        ('{"physical_to_logical_map": [[0, -1]]}', "no table"),
        ('{"physical_to_logical_map": [["a"]]}', "no table"),
    ],
)
def test_a_location_that_says_nothing_is_refused(given: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        read_location(given)
    assert caught.value.param == "init_expert_location"
