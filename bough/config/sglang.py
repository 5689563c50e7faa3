"""How SGLang's flags are treated: supported, translated to another setting, or refused. A flag that is a setting here,
or an alias of one, is supported and does not depend on this file: if a setting is added, it takes precedence over a
refusal below. All other flags are looked up here, for command lines, files and keyword arguments. No flag is ignored
silently: one that changes nothing is logged as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from bough.config.sglang_refused import REFUSALS
from bough.core.errors import ConfigError

Fate = Literal["acts", "mapped", "refused"]

_ACTING: Final = """
    admin_api_key allow_auto_truncate allowed_media_domains api_key attention_backend chat_template
    chunked_prefill_size completion_template config constrained_json_max_whitespace_cnt context_length
    crash_dump_folder cuda_graph_max_bs_decode debug_tensor_dump_output_folder decode_log_interval
    default_chat_template_kwargs device disable_cuda_graph disable_custom_all_reduce disable_overlap_schedule
    disable_priority_preemption disable_radix_cache dist_init_addr download_dir dtype enable_cache_report
    enable_deterministic_inference
    enable_metrics enable_priority_scheduling grammar_backend grpc_port fastapi_root_path host incremental_streaming_output
    enable_lora is_embedding json_model_override_args kv_cache_dtype limit_mm_data_per_request load_format log_level
    log_requests log_requests_level lora_paths max_lora_rank max_loras_per_batch
    max_prefill_tokens max_queued_requests max_running_requests max_total_tokens mem_fraction_static model model_impl
    model_path nccl_init_addr nnodes node_rank page_size port preferred_sampling_params
    priority_scheduling_preemption_threshold quantization quantization_param_path radix_eviction_policy random_seed
    reasoning_parser revision sampling_defaults schedule_conservativeness schedule_policy served_model_name
    speculative_adaptive speculative_algorithm speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens
    speculative_draft_load_format speculative_draft_model speculative_draft_model_path speculative_eagle_topk
    speculative_draft_kv_cache_dtype speculative_draft_model_quantization speculative_draft_model_revision
    speculative_num_draft_tokens
    speculative_draft_window_size speculative_token_map speculative_accept_threshold_single speculative_accept_threshold_acc
    speculative_use_rejection_sampling speculative_use_block_verification
    speculative_num_steps
    skip_server_warmup skip_tokenizer_init ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password
    stream_interval stream_response_default_include_usage tensor_parallel_size tokenizer_mode
    tokenizer_path tokenizer_worker_num tool_call_parser tp_size trust_remote_code use_ray
    watchdog_timeout weight_version
"""
ACTING: Final = frozenset(_ACTING.split())
"""SGLang's names that are settings here, or aliases of them."""

_OFF_SWITCH: Final = (False, "false", "no", "off", "0")
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Mapped:
    """A flag that is translated to another setting, or that has no effect."""

    said: str
    """Message for the user."""
    target: str = ""
    """The setting; empty: the flag has no effect."""
    is_switch: bool = False
    values: Mapping[str, object] = field(default_factory=dict)
    """Its values and the corresponding values of the setting, if it has a fixed set of values."""
    read: Callable[[str], object] = str
    """Otherwise: converts its value to the setting's. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag of a feature that does not exist here."""

    why: str
    fix: str
    is_switch: bool
    default: str
    """The default value, with which the flag is accepted; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The result for one SGLang flag."""

    said: str
    target: str = ""
    value: object = None


MAPPED: Final[Mapping[str, Mapped]] = {
    "constrained_json_disable_any_whitespace": Mapped(
        "read as --json-max-whitespace 0", "json_max_whitespace", is_switch=True, values={"": 0}
    ),
    "cuda_graph_backend_decode": Mapped(
        "read as --cuda-graph (full) or --no-cuda-graph (disabled)",
        "cuda_graph",
        values={"full": True, "disabled": False},
    ),
    "file_storage_path": Mapped("read as --batch-dir", "batch_dir"),
    "log_requests_format": Mapped("read as --log-format, for all lines", "log_format"),
    "media_url_max_file_size_mb": Mapped(
        "read as --max-media-bytes, in MiB", "max_media_bytes", read=lambda text: int(text) * _MIB
    ),
    "mm_preprocess_cache_size_mb": Mapped(
        "read as --mm-processor-cache-size, in MiB", "mm_processor_cache_size", read=lambda text: int(text) * _MIB
    ),
    "mm_processor_worker_num": Mapped("read as --mm-workers", "mm_workers"),
    "enable_multimodal": Mapped("changes nothing: models that see are served so anyway", is_switch=True),
    "enable_prefix_mm_cache": Mapped("changes nothing: prefixes with media are cached anyway", is_switch=True),
    "sampling_backend": Mapped(
        "changes nothing: each device has one way of sampling, and all draw the same",
        values={"flashinfer": None, "pytorch": None},
    ),
    "enable_mis": Mapped(
        "changes nothing: the items of a score request are computed in one pass anyway", is_switch=True
    ),
    "enable_mixed_chunk": Mapped("changes nothing: prefill chunks and decodes share steps anyway", is_switch=True),
    "enable_response_store": Mapped(
        "changes nothing: responses are kept anyway (--response-store-size)", is_switch=True
    ),
    "enable_return_hidden_states": Mapped("changes nothing: every request may ask for them", is_switch=True),
    "return_hidden_states_mode": Mapped(
        "changes nothing: every request may ask for them", values={"last": None, "full": None}
    ),
    "enable_streaming_session": Mapped("changes nothing: sessions keep their prefixes anyway", is_switch=True),
    "sleep_on_idle": Mapped("changes nothing: an idle engine sleeps anyway", is_switch=True),
    "enable_dynamic_batch_tokenizer": Mapped(
        "changes nothing: texts are tokenized side by side anyway", is_switch=True
    ),
    "enable_tokenizer_batch_encode": Mapped(
        "changes nothing: the texts of a request are tokenized together anyway", is_switch=True
    ),
    "disable_outlines_disk_cache": Mapped("changes nothing: compiled grammars are kept in memory only", is_switch=True),
    "uvicorn_access_log_exclude_prefixes": Mapped("changes nothing: there is no access log"),
}


@lru_cache(maxsize=1)
def refused() -> Mapping[str, Refused]:
    """Every refused flag by its name."""
    found: dict[str, Refused] = {}
    for why, fix, flags in REFUSALS:
        for flag in flags.split():
            name, takes_value, default = flag.partition("=")
            found[name] = Refused(why, fix, not takes_value, default)
    return found


def is_switch(name: str) -> bool | None:
    """Whether a flag takes no value; None if it is not in this table."""
    known = MAPPED.get(name) or refused().get(name)
    return None if known is None else known.is_switch


def take(name: str, raw: object, origin: str) -> Taken | None:
    """The meaning of a flag of SGLang; None if it is not in this table. Raises `ConfigError` if it is refused.

    `origin` says where it came from.
    """
    if (mapped := MAPPED.get(name)) is not None:
        return _mapped(mapped, raw, origin, name)
    if (entry := refused().get(name)) is None:
        return None
    off = raw in _OFF_SWITCH if entry.is_switch else bool(entry.default) and str(raw) == entry.default
    if raw is None or raw in ((), []) or off:
        return Taken(f"{origin} changes nothing: it is at its default")
    raise ConfigError(what=f"{origin} is not supported", why=entry.why, fix=entry.fix, param=name)


def _mapped(mapped: Mapped, raw: object, origin: str, name: str) -> Taken:
    if raw is None or (mapped.is_switch and raw in _OFF_SWITCH):
        return Taken(f"{origin} changes nothing: it is at its default")
    said = f"{origin} {mapped.said}"
    if mapped.is_switch:
        return Taken(said, mapped.target, mapped.values.get("", True))
    if mapped.values:
        if str(raw) not in mapped.values:
            raise ConfigError(
                what=f"{origin} is {raw!r}",
                why=f"it must be one of: {', '.join(mapped.values)}",
                fix="leave it out" if not mapped.target else f"use --{mapped.target.replace('_', '-')}",
                param=name,
            )
        return Taken(said, mapped.target, mapped.values[str(raw)])
    try:
        return Taken(said, mapped.target, mapped.read(str(raw)))
    except ValueError as error:
        raise ConfigError(what=f"{origin} is {raw!r}", why=str(error), fix="give a valid value", param=name) from error
