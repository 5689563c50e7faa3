"""Profiles: named sets of settings. Flags, variables and files take precedence over them, and they over the
defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from bough.config.concerns import Profile
from bough.config.flags import Value
from bough.core.errors import ConfigError

PRESETS: Mapping[Profile, Mapping[str, Value]] = {
    "balanced": {},
    "dev": {
        "cuda_graph": False,
        "skip_server_warmup": True,
        "max_running_requests": 16,
        "mem_fraction_static": 0.5,
        "decode_log_interval_s": 2.0,
    },
    "latency": {
        "chunked_prefill_size": 2048,
        "max_running_requests": 64,
        "tpot_target_ms": 20.0,
        "schedule_policy": "fcfs",
    },
    "throughput": {
        "chunked_prefill_size": 16384,
        "tpot_target_ms": 2000.0,
        "schedule_policy": "lpm",
        "schedule_conservativeness": 0.8,
        "stream_interval": 4,
    },
}

PURPOSES: Mapping[Profile, str] = {
    "balanced": "the defaults",
    "dev": "starts fast and leaves memory to others: no graphs, no warm-up, half the memory",
    "latency": "short waits between tokens: small prefill chunks, few requests at once",
    "throughput": "most tokens a second: large chunks, cache-friendly order, tokens streamed in fours",
}


def preset(name: str) -> Mapping[str, Value]:
    """The settings of a profile. Raises `ConfigError` for an unknown one."""
    for known, values in PRESETS.items():
        if known == name:
            return values
    raise ConfigError(
        what=f"unknown profile {name!r}",
        why=f"the profiles are: {', '.join(get_args(Profile))}",
        fix="choose one of them with --profile",
        param="profile",
    )
