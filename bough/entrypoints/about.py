"""What the server tells about itself, whatever the protocol: the model, the settings, the load."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from bough.config.server_args import public_json
from bough.core.errors import BoughError
from bough.entrypoints.service import Service

Json = dict[str, Any]


async def loads(service: Service) -> Json:
    """The load of each replica (this server is one), and their sum, in SGLang's words. Raises if the engine is silent."""
    info = await service.intake.info()
    pages, admission = info["pages"], service.admission
    used = (pages["total"] - pages["free"] - pages["evictable"]) * pages["page_size"]
    running = info["running"] + info["prefilling"]
    waiting = info["queued"] + info["compiling"]
    most = int(service.served.facts["max_running_requests"])
    counters, told = info["counters"], service.telemetry.readings(service.beat(), up=True)
    load: Json = {
        "dp_rank": 0,
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
        "gen_throughput": round(told.get("gen_throughput", 0.0), 2),
        "prompt_throughput": round(told.get("prompt_throughput", 0.0), 2),
        "decode_step_seconds": info["decode_step_ms"] / 1e3,
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
            "refused": int(told.get("refused_requests_total", 0)),
        },
    }
    return {
        "timestamp": time.time(),
        "version": import_module("bough").__version__,
        "model": service.served.name,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": load["token_usage"],
            "avg_utilization": load["utilization"],
        },
    }


async def server_info(service: Service) -> Json:
    """Every setting, the decisions behind them, memory, and the engine's numbers."""
    served, health = service.served, service.health()
    try:
        states = [await service.intake.info()]
    except BoughError as error:
        states = [{"error": error.what}]
    return {
        **public_json(service.config),
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
    """The model as a client must know it, `role_affixes` included."""
    served, model = service.served, service.config.model
    template = served.tokenizer.chat_template if served.tokenizer is not None else None
    affixes = None
    if template is not None:
        try:
            affixes = template.role_affixes()
        except BoughError:
            affixes = None  # a template that refuses the probes has none that could be told
    return {
        "model_path": model.model or served.name,
        "tokenizer_path": model.tokenizer or model.model or served.name,
        "served_model_name": served.name,
        "is_generation": served.facts.get("pooling") is None,
        "architectures": [served.facts["architecture"]] if "architecture" in served.facts else [],
        "max_model_len": served.context_length,
        "vocab_size": served.facts.get("vocab_size"),
        "preferred_sampling_params": dict(served.sampling_defaults),
        "weight_version": "default",
        "reasoning_parser": served.reasoning_parser,
        "tool_call_parser": served.tool_parser,
        "has_chat_template": template is not None,
        "role_affixes": affixes,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
