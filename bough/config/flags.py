"""Flags, environment variables and YAML keys, all generated from the dataclasses in `concerns`.

A setting is one field of one concern. Its flag is the field's name with dashes, its variable `BOUGH_` and the name in
capitals, its help the field's docstring. SGLang's (and vLLM's) spellings are aliases of settings, kept in one table.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from bough.config import concerns, sglang
from bough.config.concerns import AUTO, Auto, Config
from bough.core.errors import ConfigError

Kind = Literal["text", "int", "float", "bool", "choice", "list"]
Value = bool | int | float | str | tuple[str, ...] | Auto

ENV_PREFIX = "BOUGH_"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_UNITS = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of one concern, as a user sees it."""

    group: str
    """Name of the concern in `Config`."""
    name: str
    kind: Kind
    takes_auto: bool
    default: Value
    choices: tuple[str, ...]
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Alias:
    """Another spelling of a setting. `inverted` aliases turn a boolean off; `note` is logged if the alias is used."""

    target: str
    inverted: bool = False
    note: str = ""


ALIASES: Mapping[str, Alias] = {
    "model_path": Alias("model"),
    "tokenizer_path": Alias("tokenizer"),
    "tp": Alias("tp_size"),
    "tensor_parallel_size": Alias("tp_size"),
    "ep": Alias("ep_size"),
    "expert_parallel_size": Alias("ep_size"),
    "enable_eplb": Alias("eplb"),
    "pp": Alias("pp_size"),
    "pipeline_parallel_size": Alias("pp_size"),
    "max_micro_batch_size": Alias("pp_max_micro_batch_size"),
    "attention_data_parallel_size": Alias("attn_dp_size"),
    "attention_context_parallel_size": Alias("attn_cp_size"),
    "dp": Alias("dp_size"),
    "data_parallel_size": Alias("dp_size"),
    "nccl_init_addr": Alias("dist_init_addr"),
    "fastapi_root_path": Alias("root_path"),
    "dist_timeout": Alias("dist_timeout_s"),
    "random_seed": Alias("seed"),
    "max_model_len": Alias("context_length"),
    "max_num_seqs": Alias("max_running_requests"),
    "tokenizer_worker_num": Alias("api_workers"),
    "api_server_count": Alias("api_workers"),
    "watchdog_timeout": Alias("watchdog_timeout_s"),
    "drain_timeout": Alias("drain_timeout_s"),
    "tpot_target": Alias("tpot_target_ms"),
    "enable_metrics": Alias("metrics"),
    "enable_deterministic_inference": Alias("deterministic"),
    "enable_priority_scheduling": Alias("priority_scheduling"),
    "priority_scheduling_preemption_threshold": Alias("priority_preemption_threshold"),
    "cuda_graph_max_bs": Alias("cuda_graph_max_tokens"),
    "cuda_graph_max_bs_decode": Alias("cuda_graph_max_tokens"),
    "constrained_json_max_whitespace_cnt": Alias("json_max_whitespace"),
    "debug_tensor_dump_output_folder": Alias("tensor_dump_dir"),
    "disable_radix_cache": Alias("radix_cache", inverted=True),
    "disable_overlap_schedule": Alias("overlap_schedule", inverted=True),
    "disable_custom_all_reduce": Alias("custom_all_reduce", inverted=True),
    "disable_cuda_graph": Alias("cuda_graph", inverted=True),
    "enforce_eager": Alias("cuda_graph", inverted=True),
    "enable_prefix_caching": Alias("radix_cache"),
    "block_size": Alias("page_size"),
    "crash_dump_folder": Alias("crash_dir"),
    "enable_overlap_schedule": Alias("overlap_schedule"),
    "stream_output": Alias("incremental_streaming_output"),
    "stream_response_default_include_usage": Alias("stream_usage"),
    "disable_priority_preemption": Alias("priority_preemption", inverted=True),
    "speculative_algo": Alias("speculative_algorithm"),
    "speculative_draft_model": Alias("speculative_draft_model_path"),
}

NEARLY: Mapping[str, str] = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enable_trace": "otlp_endpoint",
    "otlp_traces_endpoint": "otlp_endpoint",
    "allowed_origins": "cors_origins",
    "enable_custom_logit_processor": "logit_processors",
    "ctx_size": "context_length",
    "threads": "cpu_threads",
    "parallel": "max_running_requests",
    "enable_expert_parallel": "ep_size",
    "alias": "served_model_name",
    "lora_modules": "lora_paths",
    "max_loras": "max_loras_per_batch",
}
"""Flags of other servers with a similar but different meaning here. They are refused, with the name of the similar
setting."""

NOT_THERE: Mapping[str, str] = {
    "disaggregation": "disaggregated prefill",
    "two_batch_overlap": "two-batch overlap",
}
"""Parts of names of other servers' flags without a counterpart here, and what they are about, for the error message."""


@dataclass(frozen=True, slots=True)
class Word:
    """Another server's name for a value. `note` is logged if it is used."""

    value: str
    note: str = ""


_OUR_KERNELS = "its kernels are not used here; those of this device are chosen"
VALUE_WORDS: Mapping[str, Mapping[str, Word]] = {
    "dtype": {"half": Word("float16"), "float": Word("float32")},
    "kv_cache_dtype": {"bf16": Word("bfloat16")},
    "load_balance_method": {
        "shortest_queue": Word("total_requests"), "minimum_tokens": Word("total_tokens"), "auto": Word("prefix"),
    },
    "quantization": {
        "awq_marlin": Word("awq", _OUR_KERNELS),
        "gptq_marlin": Word("gptq", _OUR_KERNELS),
        "compressed_tensors": Word("compressed-tensors"),
        "auto_round": Word("auto-round"),
        "modelopt_fp8": Word("modelopt"),
        "modelopt_fp4": Word("modelopt"),
        "fp8_per_block": Word("fp8_block"),
        "fp8_per_channel": Word("fp8"),
        "bnb": Word("bitsandbytes"),
    },
    "attention_backend": {
        "torch_native": Word("torch"),
        "intel_amx": Word("cpu"),
        **{
            name: Word("auto", _OUR_KERNELS)
            for name in ("flashinfer", "fa3", "fa4", "flashmla", "trtllm_mha", "trtllm_mla", "cutlass_mla", "aiter",
                         "flex_attention")
        },
    },
    "grammar_backend": {"outlines": Word("auto", "the same constraints are enforced by xgrammar or llguidance")},
    "speculative_algorithm": {
        "NONE": Word("none"),
        **{
            name.lower(): Word(name)
            for name in ("NGRAM", "SUFFIX", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "MEDUSA", "DFLASH")
        },
        **{name: Word("EAGLE", "both are the same head") for name in ("EAGLE2", "eagle2")},
        **{name: Word("NEXTN", "that is its name here") for name in ("MTP", "mtp")},
    },
    "speculative_draft_model_quantization": {"unquant": Word("none")},
    "speculative_draft_kv_cache_dtype": {"bf16": Word("bfloat16")},
    "log_requests_level": {
        level: Word("1", "texts are never logged; --dump-dir keeps whole requests") for level in ("2", "3")
    },
}  # fmt: skip
"""Other servers' names for values, by setting."""

REFUSED_VALUES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "moe_a2a_backend": {
        name: (f"{what}, which is not part of bough and was never run with it", "use allgather or alltoall")
        for name, what in {
            "deepep": "DeepEP's kernels need NVSHMEM or NCCL Gin and Hopper GPUs",
            "deepep_v2": "DeepEP's kernels need NVSHMEM or NCCL Gin and Hopper GPUs",
            "mooncake": "Mooncake's exchange needs RDMA",
            "nixl": "NIXL's exchange needs RDMA",
            "mori": "MoRI's kernels need AMD GPUs",
            "flashinfer": "FlashInfer's exchange needs NVLink between hosts",
            "megamoe": "that kernel needs Blackwell GPUs",
            "pplx": "Perplexity's kernels need NVSHMEM",
            "ascend_fuseep": "that kernel needs Ascend NPUs",
        }.items()
    }
}
"""Other servers' values that are refused: why, and what to use instead."""

NEVER_SPLIT = frozenset({"api_key"})
"""Lists whose members may contain commas: several members are given by several flags, or as a list in the file."""


@lru_cache(maxsize=1)
def settings() -> Mapping[str, Setting]:
    """Every setting by its field name, in the order of the dataclasses."""
    texts = _field_docstrings()
    found: dict[str, Setting] = {}
    for concern in dataclasses.fields(Config):
        cls = _concern_class(concern.name)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind, takes_auto, choices = _read_type(hints[field.name])
            default: Any = field.default
            found[field.name] = Setting(
                group=concern.name,
                name=field.name,
                kind=kind,
                takes_auto=takes_auto,
                default=default,
                choices=choices,
                help=texts[cls.__name__, field.name],
            )
    return found


@lru_cache(maxsize=1)
def groups() -> Mapping[str, str]:
    """Concern -> its one-line description."""
    return {
        concern.name: (_concern_class(concern.name).__doc__ or "").strip() for concern in dataclasses.fields(Config)
    }


def lookup(name: str) -> tuple[Setting, Alias | None]:
    """The setting behind a field name or an alias (dashes or underscores). Raises `ConfigError` with the nearest match."""
    plain = name.strip().removeprefix("--").replace("-", "_")
    known = settings()
    if plain in known:
        return known[plain], None
    alias = ALIASES.get(plain)
    if alias is not None:
        return known[alias.target], alias
    raise unknown_name(name)


def is_setting(name: str) -> bool:
    """Whether `name` (dashes or underscores) is a setting or an alias of one."""
    plain = name.strip().removeprefix("--").replace("-", "_")
    return plain in settings() or plain in ALIASES


def unknown_name(name: str) -> ConfigError:
    """The error for an unknown setting, with a suggestion."""
    shown = name if not name.startswith("--") else name.split("=")[0]
    missing = next((what for part, what in NOT_THERE.items() if part in name.replace("-", "_")), None)
    if missing:
        return ConfigError(
            what=f"unknown option {shown}",
            why=f"it is about {missing}, which is not there yet",
            fix="leave it out",
            param=name,
        )
    near = nearest(name)
    if near and shown.startswith("-"):
        near = "--" + near.replace("_", "-")
    return ConfigError(
        what=f"unknown option {shown}",
        why="no setting has this name",
        fix=f"did you mean {near}?" if near else "see `bough serve --help` for every option",
        param=name,
    )


def nearest(name: str, cutoff: float = 0.6) -> str | None:
    """The setting or alias spelled most like `name`, if any is close."""
    plain = name.strip().lstrip("-").split("=")[0].replace("-", "_").lower()
    if plain in NEARLY:
        return NEARLY[plain]
    plain = plain.removeprefix("no_")
    names = [*settings(), *ALIASES, "config", "profile", "dump_config"]
    close = difflib.get_close_matches(plain, names, n=1, cutoff=cutoff)
    if close:
        return close[0]
    within = [known for known in names if plain and (plain in known or known in plain)]
    return min(within, key=len) if within else None


def parse_value(setting: Setting, raw: object, origin: str) -> Value:
    """`raw` as the setting's type. Text is read as on a command line. `origin` says in errors where it came from."""
    word = value_word(setting, raw)
    raw = raw if word is None else word.value
    if setting.takes_auto and (raw is AUTO or (isinstance(raw, str) and raw.lower() == "auto")):
        return AUTO
    match setting.kind:
        case "bool":
            return _parse_bool(setting, raw, origin)
        case "int":
            return _parse_int(setting, raw, origin)
        case "float":
            return _parse_float(setting, raw, origin)
        case "list":
            return _parse_list(setting, raw, origin)
        case "choice":
            if isinstance(raw, str) and raw in setting.choices:
                return raw
            refused = REFUSED_VALUES.get(setting.name, {}).get(str(raw))
            if refused is not None:
                raise ConfigError(what=f"{origin} is {raw!r}", why=refused[0], fix=refused[1], param=setting.name)
            near = difflib.get_close_matches(str(raw), setting.choices, n=1)
            raise ConfigError(
                what=f"{origin} is {raw!r}",
                why=f"it must be one of: {', '.join(setting.choices)}",
                fix=f"did you mean {near[0]}?" if near else f"for example {setting.flag} {setting.choices[0]}",
                param=setting.name,
            )
        case "text":
            if isinstance(raw, str):
                return raw
            raise _wrong(setting, raw, origin, "text", "a string")


def value_word(setting: Setting, raw: object) -> Word | None:
    """Another server's word that the setting is given, if it is one."""
    return VALUE_WORDS.get(setting.name, {}).get(str(raw)) if isinstance(raw, str | int) else None


def abbreviated(name: str) -> str | None:
    """The only name that begins with `name`, among settings, aliases and SGLang's flags; None if there is no such name
    or several.

    Names of the same setting count as one. If several remain, only those of SGLang are considered, as SGLang does.
    """
    theirs = {*sglang.MAPPED, *sglang.refused(), *sglang.ACTING}
    for names in ({*settings(), *ALIASES, *theirs}, theirs):
        meant = {ALIASES[each].target if each in ALIASES else each for each in names if each.startswith(name)}
        if len(meant) == 1:
            return min(each for each in names if each.startswith(name))
    return None


def parse_size(text: str) -> float:
    """A number with an optional unit: `k m g t` are powers of 1,000, `K M G T` of 1,024.

    A trailing `B` is allowed. `i`, as in `GiB`, means powers of 1,024 in upper and lower case; a plain `B`, as in `GB`,
    means powers of 1,000. Raises ValueError.
    """
    body = text.strip().replace("_", "").replace(",", "")
    has_b = body[-1:] in ("B", "b") and body[-2:-1].isalpha()
    if has_b:
        body = body[:-1]
    binary = body[-1:] == "i"
    if binary:
        body = body[:-1]
    letter = body[-1:]
    if letter not in _UNITS:
        if binary or has_b:
            raise ValueError(text)
        return float(body)
    if binary:
        factor = _UNITS[letter.upper()]
    elif has_b:
        factor = _UNITS[letter.lower()]
    else:
        factor = _UNITS[letter]
    return float(body[:-1]) * factor


def show_value(value: Value) -> str:
    """A value as it would be typed."""
    if value is AUTO:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


# -- reading the dataclasses ----------------------------------------------------------------------


def _concern_class(name: str) -> type[Any]:
    hints = typing.get_type_hints(Config)
    cls: type[Any] = hints[name]
    return cls


def _read_type(hint: Any) -> tuple[Kind, bool, tuple[str, ...]]:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not Auto]
        if len(members) != 1:
            raise TypeError(f"a setting's type is one type, or one type or Auto: {hint}")
        kind, _, choices = _read_type(members[0])
        return kind, True, choices
    if origin is Literal:
        return "choice", False, typing.get_args(hint)
    if origin is tuple:
        return "list", False, ()
    plain: dict[Any, Kind] = {str: "text", bool: "bool", int: "int", float: "float"}
    return plain[hint], False, ()


@lru_cache(maxsize=1)
def _field_docstrings() -> Mapping[tuple[str, str], str]:
    """(class, field) -> the string literal that follows the field in the source."""
    tree = ast.parse(Path(concerns.__file__).read_text(encoding="utf-8"))
    texts: dict[tuple[str, str], str] = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[cls.name, field.target.id] = " ".join(str(after.value.value).split())
    return texts


# -- reading values -------------------------------------------------------------------------------


def _wrong(setting: Setting, raw: object, origin: str, wanted: str, example: str) -> ConfigError:
    auto = ' or "auto"' if setting.takes_auto else ""
    return ConfigError(
        what=f"{origin} is {raw!r}",
        why=f"it must be {wanted}{auto}",
        fix=f"give {example}: {setting.help}",
        param=setting.name,
    )


def _parse_bool(setting: Setting, raw: object, origin: str) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE:
        return True
    if isinstance(raw, str) and raw.lower() in _FALSE:
        return False
    raise _wrong(setting, raw, origin, "true or false", "true or false")


def _parse_int(setting: Setting, raw: object, origin: str) -> int:
    error = _wrong(setting, raw, origin, "a whole number (units like 32k or 2GiB are fine)", "a number")
    if isinstance(raw, bool):
        raise error
    if isinstance(raw, int):
        return raw
    if isinstance(raw, float) and raw.is_integer():
        return int(raw)
    if isinstance(raw, str):
        try:
            number = parse_size(raw)
        except ValueError:
            raise error from None
        if number.is_integer():
            return int(number)
    raise error


def _parse_float(setting: Setting, raw: object, origin: str) -> float:
    error = _wrong(setting, raw, origin, "a number", "a number")
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise error
    try:
        number = float(raw)
    except ValueError:
        raise error from None
    if number != number or number in (float("inf"), float("-inf")):
        raise error
    return number


def _parse_list(setting: Setting, raw: object, origin: str) -> tuple[str, ...]:
    """A text with commas, or a list of texts (as a flag that was given several times is)."""
    if isinstance(raw, str):
        raw = [raw] if setting.name in NEVER_SPLIT else raw.split(",")
        return tuple(part.strip() for part in raw if part.strip())
    if isinstance(raw, list | tuple) and all(isinstance(part, str) for part in raw):
        return tuple(raw)
    raise _wrong(setting, raw, origin, "a list of strings", "values separated by commas")
