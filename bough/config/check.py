"""Ranges of settings, and combinations that can't work: refused before anything starts."""

from __future__ import annotations

import ipaddress
import json

from bough.config.concerns import AUTO, Auto, Config
from bough.config.flags import settings, show_value
from bough.core.errors import ConfigError


def check(config: Config) -> None:
    """Raises `ConfigError` for the first setting outside its range."""
    _ranges(config)
    _model(config)
    _parallel(config)


def check_exposure(config: Config) -> None:
    """Raises `ConfigError` if the server would be open to the network without a key."""
    server = config.server
    if is_loopback(server.host) or server.api_key or server.insecure:
        return
    raise ConfigError(
        what=f"refusing to listen on {server.host} without a key",
        why="anybody who can reach this address could use the model",
        fix="add --api-key SECRET, or listen on 127.0.0.1, or add --insecure if the network is trusted",
        param="host",
    )


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _ranges(config: Config) -> None:
    device, cache, scheduler, server, log = config.device, config.cache, config.scheduler, config.server, config.log
    for name, value, low, high in (
        ("context_length", config.model.context_length, 1, None),
        ("mem_fraction_static", device.mem_fraction_static, 0.01, 0.99),
        ("cuda_graph_max_tokens", device.cuda_graph_max_tokens, 1, 8192),
        ("cpu_threads", device.cpu_threads, 1, 4096),
        ("page_size", cache.page_size, 1, 4096),
        ("max_total_tokens", cache.max_total_tokens, 1, None),
        ("max_running_requests", scheduler.max_running_requests, 1, 65_536),
        ("max_queued_requests", scheduler.max_queued_requests, 1, None),
        ("max_queued_tokens", scheduler.max_queued_tokens, 1, None),
        ("schedule_conservativeness", scheduler.schedule_conservativeness, 0.0, 100.0),
        ("tpot_target_ms", scheduler.tpot_target_ms, 0.0, None),
        ("small_request_share", scheduler.small_request_share, 0.0, 0.9),
        ("stream_interval", scheduler.stream_interval, 1, None),
        ("port", server.port, 0, 65_535),
        ("grpc_port", server.grpc_port, 0, 65_535),
        ("api_workers", server.api_workers, 1, 64),
        ("json_max_whitespace", server.json_max_whitespace, 0, 1024),
        ("max_body_bytes", server.max_body_bytes, 1024, 2**31),
        ("drain_timeout_s", server.drain_timeout_s, 0.0, None),
        ("watchdog_timeout_s", server.watchdog_timeout_s, 0.1, None),
        ("client_timeout_s", server.client_timeout_s, 0.1, None),
        ("response_store_size", server.response_store_size, 0, None),
        ("max_media_bytes", config.media.max_media_bytes, 1024, 2**31),
        ("max_media_pixels", config.media.max_media_pixels, 1, 2**31),
        ("max_media_frames", config.media.max_media_frames, 1, 65_535),
        ("media_timeout_s", config.media.media_timeout_s, 0.1, 3600.0),
        ("decode_log_interval_s", log.decode_log_interval_s, 0.0, None),
    ):
        _in_range(name, value, low, high)
    for name, chunk in (
        ("chunked_prefill_size", scheduler.chunked_prefill_size),
        ("unwatched_prefill_size", scheduler.unwatched_prefill_size),
    ):
        if chunk is not AUTO and chunk != -1 and chunk < 1:
            raise ConfigError(
                what=f"{name} is {chunk}",
                why="it must be a positive number of tokens, or -1 for whole prompts",
                fix=f"for example --{name.replace('_', '-')} 2048",
                param=name,
            )
    chunk, unwatched = scheduler.chunked_prefill_size, scheduler.unwatched_prefill_size
    if unwatched is not AUTO and (unwatched == -1) != (chunk == -1):
        raise ConfigError(
            what=f"unwatched_prefill_size is {unwatched}, chunked_prefill_size {'auto' if chunk is AUTO else chunk}",
            why="prompts are computed whole (-1) in all steps or in none",
            fix="leave --unwatched-prefill-size out",
            param="unwatched_prefill_size",
        )


def _model(config: Config) -> None:
    override = config.model.json_model_override_args
    if override:
        try:
            parsed = json.loads(override)
        except ValueError as error:
            raise ConfigError(
                what="json_model_override_args is not JSON",
                why=str(error),
                fix="""for example --json-model-override-args '{"num_hidden_layers": 2}'""",
                param="json_model_override_args",
            ) from error
        if not isinstance(parsed, dict):
            raise ConfigError(
                what=f"json_model_override_args is a JSON {type(parsed).__name__}",
                why="it is merged over the model's config, so it must be an object",
                fix="""for example --json-model-override-args '{"num_hidden_layers": 2}'""",
                param="json_model_override_args",
            )
    if config.model.dummy_weights != "normal" and config.model.load_format != "dummy":
        raise ConfigError(
            what=f"dummy_weights is {config.model.dummy_weights}, the weights are no dummies",
            why=f"load_format is {config.model.load_format}",
            fix="add --load-format dummy, or leave --dummy-weights out",
            param="dummy_weights",
        )


def _parallel(config: Config) -> None:
    parallel = config.parallel
    for name, value in (("tp_size", parallel.tp_size), ("nnodes", parallel.nnodes)):
        _in_range(name, value, 1, 1024)
    _in_range("node_rank", parallel.node_rank, 0, parallel.nnodes - 1)
    if parallel.nnodes > 1 or parallel.dist_init_addr:
        raise ConfigError(
            what="a model can't be spread over several machines",
            why="its ranks meet on one machine only so far",
            fix="leave out --nnodes and --dist-init-addr; --tp-size spreads it over the devices of this machine",
            param="nnodes" if parallel.nnodes > 1 else "dist_init_addr",
        )


def _in_range(name: str, value: float | Auto, low: float, high: float | None) -> None:
    if value is AUTO or (value >= low and (high is None or value <= high)):
        return
    setting = settings()[name]
    bounds = f"at least {low}" if high is None else f"between {low} and {high}"
    raise ConfigError(
        what=f"{name} is {value}",
        why=f"it must be {bounds}",
        fix=f"for example {setting.flag} {show_value(setting.default)}",
        param=name,
    )
