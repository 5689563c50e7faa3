"""Information about the server, for all protocols: the model, the settings, the load."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from bough.config.server_args import public_json
from bough.core.errors import BoughError, InvalidRequest
from bough.entrypoints.service import Service

Json = dict[str, Any]

_DECIDED = ("page_size", "max_running_requests", "device", "dtype")
"""`auto` settings that are reported with their decided value."""


async def loads(service: Service) -> Json:
    """The load of each replica, and their sum, in SGLang's format. Raises if an engine does not answer."""
    every = [_load(service, number, info) for number, info in (await service.engine_client.infos()).items()]
    running, waiting = (sum(load[name] for load in every) for name in ("num_running_reqs", "num_waiting_reqs"))
    return {
        "timestamp": time.time(),
        "version": import_module("bough").__version__,
        "model": service.served.name,
        "dp_rank_count": service.config.parallel.num_schedulers,
        "loads": every,
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": sum(load["token_usage"] for load in every) / max(1, len(every)),
            "avg_utilization": sum(load["utilization"] for load in every) / max(1, len(every)),
        },
    }


def _load(service: Service, number: int, info: Json) -> Json:
    """The load of one replica. Counts of the API workers are for all replicas."""
    pages, admission = info["pages"], service.admission
    used = (pages["total"] - pages["free"] - pages["evictable"]) * pages["page_size"]
    running = info["running"] + info["prefilling"]
    waiting = info["queued"] + info["compiling"]
    most = int(service.served.facts["max_running_requests"])
    counters, metrics_now = info["counters"], service.telemetry.readings(service.beat(), up=True)
    return {
        "dp_rank": number,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_tokens": info["queued_tokens"],
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": pages["total"] * pages["page_size"],
        "token_usage": info["token_usage"],
        "cache_hit_rate": info["cache_hit_rate"],
        "utilization": running / most,
        "max_running_requests": most,
        "paused": info["paused"],
        "num_cached_tokens": pages["evictable"] * pages["page_size"],
        "gen_throughput": round(metrics_now.get("gen_throughput", 0.0), 2),
        "prompt_throughput": round(metrics_now.get("prompt_throughput", 0.0), 2),
        "decode_step_seconds": info["decode_step_ms"] / 1e3,
        "speculative": {
            "accept_length": round(metrics_now.get("spec_accept_length", 0.0), 3),
            "accept_rate": round(metrics_now.get("spec_accept_rate", 0.0), 3),
            "draft_tokens": counters["draft_tokens"],
            "accepted_tokens": counters["accepted_tokens"],
            "accepted_by_position": counters["accepted_at"],
        },
        "totals": {
            "requests": counters["accepted"],
            "prompt_tokens": counters["prompt_tokens"] + counters["cached_tokens"],
            "cached_tokens": counters["cached_tokens"],
            "generation_tokens": counters["output_tokens"],
            "aborted": counters["aborted"],
            "failed": counters["failed"],
            "retractions": counters["retractions"],
            "oom": counters["oom_steps"],
        },
        "memory": {"pages": pages},
        "queues": {
            **{name: info[name] for name in ("queued", "compiling", "prefilling", "running", "leaving")},
            "admitted": admission.requests,
            "admitted_waiting_tokens": admission.waiting_tokens,
            "refused": int(metrics_now.get("refused_requests_total", 0)),
        },
    }


def tokenizer_info(service: Service) -> Json:
    """The served model's tokenizer: special tokens and chat template. Raises `InvalidRequest` where there is none."""
    tokenizer = service.served.tokenizer
    if tokenizer is None:
        raise InvalidRequest(
            what="this server has no tokenizer",
            why="it was started with --skip-tokenizer-init",
            fix="ask a server that has one",
        )
    template, eos = tokenizer.chat_template, tokenizer.eos_id
    named = template.special_tokens if template is not None else {}
    return {
        "tokenizer_class": type(tokenizer.codebook).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.served.context_length,
        **{name: named.get(name) for name in ("bos_token", "pad_token", "unk_token")},
        "eos_token": named.get("eos_token") or (tokenizer.token_of(eos) if eos is not None else None),
        "eos_token_id": eos,
        "chat_template": template.source if template is not None else None,
    }


async def server_info(service: Service) -> Json:
    """Every setting, the decisions behind them, memory, and the engine's numbers."""
    served, health = service.served, service.health()
    try:
        states = list((await service.engine_client.infos()).values())
    except BoughError as error:
        states = [{"error": error.what}]
    decided = {name: served.facts[name] for name in _DECIDED if name in served.facts}
    return {
        **public_json(service.config),
        **decided,
        "version": import_module("bough").__version__,
        "served_model_name": served.name,
        "model_path": service.config.model.model or served.name,
        "tokenizer_path": service.config.model.tokenizer or service.config.model.model or served.name,
        "max_total_num_tokens": served.facts.get("kv_tokens"),
        "context_length": served.context_length,
        "kv_join": bool(served.facts.get("kv_join")),
        "num_running": health.num_running,
        "num_waiting": health.num_waiting,
        "admission": {
            "requests": service.admission.requests,
            "waiting_tokens": service.admission.waiting_tokens,
            "refused": service.admission.refused,
            "max_requests": service.admission.max_requests,
            "max_tokens": service.admission.max_tokens,
        },
        "engine": dict(served.facts),
        "internal_states": states,
    }


def model_info(service: Service) -> Json:
    """Facts about the model for clients, including `role_affixes`."""
    served, model = service.served, service.config.model
    template = served.tokenizer.chat_template if served.tokenizer is not None else None
    affixes = None
    if template is not None:
        try:
            affixes = template.role_affixes()
        except BoughError:
            affixes = None  # a template that refuses the probes has none that could be reported
    return {
        "model_path": model.model or served.name,
        "tokenizer_path": model.tokenizer or model.model or served.name,
        "served_model_name": served.name,
        "is_generation": served.facts.get("pooling") is None,
        "has_image_understanding": "image" in served.facts.get("media", ()),
        "has_audio_understanding": "audio" in served.facts.get("media", ()),
        "architectures": [served.facts["architecture"]] if "architecture" in served.facts else [],
        "max_model_len": served.context_length,
        "vocab_size": served.facts.get("vocab_size"),
        "preferred_sampling_params": dict(served.sampling_defaults),
        "weight_version": service.config.server.weight_version,
        "reasoning_parser": served.reasoning_parser,
        "tool_call_parser": served.tool_parser,
        "has_chat_template": template is not None,
        "role_affixes": affixes,
        **{f"{kind}_token": text for kind, text in served.markers.items()},
    }
