"""`--auto-parallel` on machines that are not here: what it chooses fits, is possible, and has reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.config.concerns import Config
from bough.config.hf import checkpoint_of
from bough.config.server_args import build_config
from bough.core.errors import ConfigError
from bough.engine.auto_parallel import Chosen, choose_parallel, hardware_of
from bough.engine.decide import decide
from bough.platform import DeviceFacts
from bough.platform.facts import detect

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
GB = 10**9


def machine(gpus: int, name: str = "NVIDIA H200", gigabytes: int = 141) -> DeviceFacts:
    return replace(
        detect("cpu"), kind="cuda", name=name, arch="sm90", capability=(9, 0), num_sms=132, num_devices=gpus,
        total_bytes=gigabytes * GB, free_bytes=(gigabytes - 1) * GB,
    )  # fmt: skip


def choose(model: str, device: DeviceFacts, **settings: Any) -> tuple[Config, Chosen]:
    config = build_config(model=str(MODELS / model), load_format="dummy", auto_parallel=True, **settings)
    chosen = choose_parallel(config, device, checkpoint_of(config.model))
    return replace(config, parallel=chosen.parallel), chosen


def sizes(chosen: Chosen) -> tuple[int, int, int]:
    return chosen.parallel.tp_size, chosen.parallel.pp_size, chosen.parallel.dp_size


def test_a_small_model_is_replicated() -> None:
    config, chosen = choose("llama-3.1-8b", machine(8))
    assert sizes(chosen) == (1, 1, 8)
    assert not chosen.parallel.auto_parallel
    assert "--dp-size 8, of" in chosen.because[0]
    assert any(line.startswith("instead of") for line in chosen.because)
    decide(config, machine(8))


def test_a_large_model_is_split_as_far_as_it_must() -> None:
    config, chosen = choose("llama-3.1-70b", machine(8))
    tp, pp, dp = sizes(chosen)
    assert tp * pp * dp == 8
    assert tp * pp >= 2
    assert any("can't be had" in line for line in chosen.because), "replicas of one GPU don't fit"
    plan = decide(config, machine(8)).resolved.plan
    assert plan.weight_bytes < 100 * GB
    small, _ = choose("llama-3.1-70b", machine(4, "NVIDIA H100 80GB HBM3", 80))
    assert small.parallel.tp_size * small.parallel.pp_size == 4


def test_machines_get_stages_or_experts_not_replicas() -> None:
    far = {"nnodes": 2, "dist_init_addr": "10.0.0.1:20000", "dist_secret": "a long secret"}
    _, chosen = choose("llama-3.1-70b", machine(8), **far)
    assert chosen.parallel.dp_size == 1
    assert chosen.parallel.tp_size * chosen.parallel.pp_size == 16
    assert chosen.parallel.tp_size <= 8


def test_one_device_and_unknown_ones() -> None:
    assert sizes(choose("llama-3.1-8b", machine(1))[1]) == (1, 1, 1)
    _, cpu = choose("llama-3.1-8b", detect("cpu"))
    assert "share its cores" in cpu.because[0]
    hardware, remark = hardware_of(machine(2, "Some Accelerator 9000", 64))
    assert hardware.memory_bytes == 64 * GB
    assert "not known" in remark[0]
    assert hardware_of(machine(2))[1] == ()


def test_what_fits_in_no_way_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not fit|not enough|fit"):
        choose("llama-3.1-70b", machine(2, "NVIDIA L40S", 48))
    far = {"nnodes": 2, "dist_init_addr": "10.0.0.1:20000", "dist_secret": "a long secret"}
    with pytest.raises(ConfigError, match="2 machines without GPUs"):
        choose("llama-3.1-70b", detect("cpu"), **far)
    with pytest.raises(ConfigError, match="auto_parallel is set, and so is tp_size"):
        build_config(auto_parallel=True, tp_size=2)
