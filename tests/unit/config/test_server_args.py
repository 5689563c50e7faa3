"""Layers: flags over variables over the file over the profile over defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bough
from bough.config.concerns import AUTO, Config
from bough.config.flags import settings
from bough.config.presets import PRESETS
from bough.config.server_args import (
    ServerArgs,
    assemble,
    build_config,
    dump_yaml,
    flat,
    load_config,
    public,
    public_json,
    read_file,
)
from bough.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("BOUGH_")]:
        monkeypatch.delenv(name)


def test_nothing_given_is_the_default() -> None:
    assert build_config() == Config()


def test_sglang_names() -> None:
    config = build_config(
        model_path="m", tp_size=2, mem_fraction_static=0.8, disable_radix_cache=True, random_seed=7,
        enable_deterministic_inference=True, tokenizer_worker_num=2, watchdog_timeout=60, disable_overlap_schedule=True,
    )  # fmt: skip
    assert config.model.model == "m"
    assert config.parallel.tp_size == 2
    assert config.device.mem_fraction_static == 0.8
    assert config.cache.radix_cache is False
    assert config.model.seed == 7
    assert config.device.deterministic is True
    assert config.server.api_workers == 2
    assert config.server.watchdog_timeout_s == 60.0
    assert config.scheduler.overlap_schedule is False


def test_an_unknown_name_suggests() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(model_pth="m")
    assert "model_path" in caught.value.fix


def test_precedence_layer_by_layer(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("profile: latency\nscheduler:\n  chunked-prefill-size: 1k\n  tpot_target_ms: 30\n")
    environ = {"BOUGH_TPOT_TARGET_MS": "40", "BOUGH_PORT": "1"}
    loaded = load_config({"port": 2}, environ=environ, file=str(file))
    assert loaded.config.scheduler.max_running_requests == PRESETS["latency"]["max_running_requests"]  # profile
    assert loaded.config.scheduler.chunked_prefill_size == 1000  # file over profile
    assert loaded.config.scheduler.tpot_target_ms == 40.0  # variable over file
    assert loaded.config.server.port == 2  # argument over variable
    assert loaded.config.scheduler.stream_interval == 1  # default
    assert loaded.origins["max_running_requests"] == "profile latency"
    assert loaded.origins["chunked_prefill_size"] == "chunked_prefill_size in c.yaml"
    assert loaded.origins["tpot_target_ms"] == "BOUGH_TPOT_TARGET_MS"
    assert loaded.origins["port"] == "port"
    assert "stream_interval" not in loaded.origins


def test_profile_flag_wins_over_variable_and_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("profile: latency\n")
    loaded = load_config({}, environ={"BOUGH_PROFILE": "dev"}, file=str(file), profile="throughput")
    assert loaded.config.scheduler.schedule_policy == "lpm"
    loaded = load_config({}, environ={"BOUGH_PROFILE": "dev"}, file=str(file))
    assert loaded.config.server.skip_server_warmup is True


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_are_valid_configurations(name: str) -> None:
    loaded = load_config({}, environ={}, profile=name)
    assert all(loaded.origins[setting] == f"profile {name}" for setting in PRESETS[name])  # type: ignore[index]


def test_errors_name_their_origin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BOUGH_PORT"):
        load_config({}, environ={"BOUGH_PORT": "many"})
    file = tmp_path / "c.yaml"
    file.write_text("port: [1]\n")
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config({}, environ={}, file=str(file))
    with pytest.raises(ConfigError, match="--port"):
        load_config({"port": "x"}, environ={}, as_flags=True)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00"])
def test_files_that_are_no_settings(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(str(file))
    assert caught.value.fix


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        read_file(str(tmp_path / "none.yaml"))


def test_a_misspelt_variable_is_noticed_and_a_strange_one_is_not() -> None:
    loaded = load_config({}, environ={"BOUGH_CHUNKED_PREFIL_SIZE": "1", "BOUGH_SOMETHING_ELSE": "1"})
    assert len(loaded.notes) == 1
    assert "BOUGH_CHUNKED_PREFILL_SIZE" in loaded.notes[0]


def test_mixed_chunk_is_accepted_and_said() -> None:
    loaded = load_config({"enable_mixed_chunk": True}, environ={})
    assert loaded.config == Config()
    assert "changes nothing" in loaded.notes[0]


def test_dump_reads_back(tmp_path: Path) -> None:
    config = build_config(model="m", context_length="32K", cors_origins=["http://a", "http://b"], metrics=False, port=8)
    file = tmp_path / "dump.yaml"
    file.write_text(dump_yaml(config))
    assert load_config({}, environ={}, file=str(file)).config == config


def test_dump_keeps_secrets_out() -> None:
    text = dump_yaml(build_config(api_key="s3cret", admin_api_key="s4cret"))
    assert "s3cret" not in text
    assert "s4cret" not in text


def test_server_args_is_a_flat_immutable_view() -> None:
    args = bough.ServerArgs(model_path="m", tp_size=4, disable_cuda_graph=True)
    assert (args.model, args.model_path, args.tp_size, args.tp) == ("m", "m", 4, 4)
    assert args.cuda_graph is False
    assert args.disable_cuda_graph is True
    assert args.page_size is AUTO
    with pytest.raises(AttributeError, match="immutable"):
        args.tp_size = 2
    with pytest.raises(AttributeError, match="tp_size"):
        _ = args.tp_sise
    assert repr(args) == "ServerArgs(model='m', cuda_graph=False, tp_size=4)"
    again = args.replace(tp=2)
    assert again.tp_size == 2
    assert again.cuda_graph is False
    assert ServerArgs.of(args.config) == args
    assert set(args.to_dict()) == set(settings())


def test_flat_and_assemble_are_inverse() -> None:
    config = build_config(model="m", port=1, tp_size=2, page_size=8)
    assert assemble(flat(config)) == config


@pytest.mark.parametrize(
    "bad",
    [{"port": 70_000}, {"tp_size": 0}, {"context_length": 0}, {"chunked_prefill_size": 0}, {"mem_fraction_static": 1.5},
     {"nnodes": 2}, {"nnodes": 2, "dist_init_addr": "a:1", "tp_size": 3}, {"node_rank": 1}, {"page_size": -1},
     {"json_model_override_args": "{"}, {"json_model_override_args": "[1]"}, {"api_workers": 0},
     {"dummy_weights": "even"}, {"dummy_weights": "even", "load_format": "safetensors"},
     {"dummy_routing": "uniform"}, {"unwatched_prefill_size": 0}, {"unwatched_prefill_size": -1},
     {"unwatched_prefill_size": -1, "chunked_prefill_size": 2048},
     {"unwatched_prefill_size": 4096, "chunked_prefill_size": -1}],
)  # fmt: skip
def test_values_out_of_range(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(**bad)
    error = caught.value
    assert error.what
    assert error.why
    assert error.fix


def test_values_at_the_edge() -> None:
    edge = {"tpot_target_ms": 0.0, "chunked_prefill_size": -1, "small_request_share": 0.0, "response_store_size": 0}
    values = flat(build_config(**edge))
    assert {name: values[name] for name in edge} == edge


def test_keys_are_shown_to_nobody() -> None:
    config = build_config(api_key="s3cret", admin_api_key="s3cret too", context_length=77)
    words = ("key", "secret", "password")
    secret = {
        each.name
        for each in settings().values()
        if each.kind in ("text", "list") and any(word in each.name for word in words)
    } - {"ssl_keyfile"}
    assert secret, "there are keys"
    assert public(config).keys() == flat(config).keys() - secret
    shown = json.dumps(public_json(config))
    assert '"context_length": 77' in shown
    assert "s3cret" not in shown
    assert "s3cret" not in dump_yaml(config)
