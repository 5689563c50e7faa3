"""How each `auto` setting is decided: one function per decision, which also returns the reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from bough.config.concerns import AUTO, Config, DType, KvDType, Quantization
from bough.config.hosts import ranks_per_node
from bough.config.memory_plan import GIB, MemoryPlan, show_bytes
from bough.config.resolve_facts import MachineFacts, ModelPlanFacts
from bough.config.step_memory import (
    ITEM_BYTES,
    MOST_RUNNING,
    SMALL_GRAPHS,
    STEP_PATCHES,
    most_running,
    num_snapshots,
    state_bytes,
)
from bough.core.errors import ConfigError

T = TypeVar("T")

MOST_GRAPHS = 1280
"""Tokens of the largest graph of a model whose steps are limited by kernel launches."""
LAUNCH_BOUND = 1.1e11
"""(Tokens of a step) x (weights of a layer that a token is multiplied with) up to which launching a layer takes longer than
computing it: 0.35 ms at 650 TFLOP/s. Prompts of 600 and of 1,000 tokens take an H200 19.3 and 9.2 ms kernel by kernel with
28 layers of 2,048, and 4.9 and 6.8 in graphs; with 32 layers of 4,096, 15.3 and 25.9 beside 16.7 and 25.5."""
EIGHT_BITS_BOUND = 3.0
"""How many times LAUNCH_BOUND it is with weights of 8 bits, whose products take half the time and half as many launches
more: 1,000 tokens of 32 layers of 4,096 take 21.1 ms kernel by kernel, of which the kernels take 12.7."""
MIXTURE_BOUND = 1.5
"""The same of mixtures of experts, whose tokens are sorted by expert first: 1,000 tokens of gpt-oss-20b take 26.3 ms kernel
by kernel, of which the kernels take 20.0."""
ROOMY_BYTES = 120 * GIB
"""Device memory from which larger steps are worth their activations (see `UNWATCHED_TOKENS`)."""
UNWATCHED_TOKENS = 132 * 128
"""Prompt tokens of such larger steps. On the 132 multiprocessors of an H200, products of this many tokens in tiles of
128 end in full waves; with 16,384 tokens each token costs 0.5 % more."""
ROOMY_SHARE = 16
"""The larger steps are used only if their activations take at most 1/16 of the KV cache."""
TABLE_SHARE = 32
"""A table of the first layer is used only if it takes at most 1/32 of the KV cache."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A value, and why it was chosen."""

    value: T
    because: str


def choose_device(config: Config, machine: MachineFacts) -> Decision[str]:
    wanted = config.device.device
    if wanted not in ("auto", machine.device):
        raise ConfigError(
            what=f"--device {wanted} was asked for, this machine has none",
            why=f"the only device found is {machine.name or machine.device}",
            fix="leave --device out, or run where one is (`bough doctor` says what is missing)",
            param="device",
        )
    if machine.device == "cuda":
        return Decision("cuda", f"found {machine.num_devices} x {machine.name}")
    return Decision("cpu", "no CUDA device was found")


def choose_kv_dtype(machine: MachineFacts, model: ModelPlanFacts, dtype: DType) -> Decision[KvDType]:
    if model.kv_format and machine.device == "cuda":
        return Decision(model.kv_format, "the checkpoint has scales for it")
    return Decision(dtype, "that of the activations")


def choose_dtype(machine: MachineFacts, model: ModelPlanFacts) -> Decision[DType]:
    if machine.device == "cpu":
        return Decision(machine.fastest_dtype, "measured fastest on this CPU")
    if model.checkpoint_dtype == "bfloat16" and not machine.has_bfloat16:
        half: DType = "float16"
        return Decision(half, f"the checkpoint is bfloat16, which {machine.arch} lacks")
    if model.checkpoint_dtype == "float32":
        return Decision(
            "bfloat16" if machine.has_bfloat16 else "float16", "16 bits serve a float32 checkpoint at twice the speed"
        )
    return Decision(model.checkpoint_dtype, "the checkpoint's own")


def choose_quantization(machine: MachineFacts, model: ModelPlanFacts, dtype: str) -> Decision[Quantization]:
    if not model.quantization:
        return Decision("none", "the checkpoint is not quantised")
    unpacked = (model.dense_params + model.packed_params) * ITEM_BYTES[dtype]
    if machine.device == "cpu" and "cpu" not in machine.attention_backends and unpacked <= machine.free_bytes // 2:
        return Decision(
            "none", "without custom kernels (--no-custom-kernels, or no C++ compiler) packed weights are slow"
        )
    if model.quantization == "gguf" and machine.device == "cuda" and "triton" not in machine.attention_backends:
        return Decision("none", "without Triton kernels (--no-custom-kernels, or an older GPU) blocks are dequantised")
    return Decision(model.quantization, model.weight_format or "the checkpoint says so")


def choose_attention(machine: MachineFacts, config: Config) -> Decision[str]:
    wanted = config.device.attention_backend
    if wanted not in ("auto", *machine.attention_backends):
        raise ConfigError(
            what=f"attention backend {wanted} does not work here",
            why=f"on this {machine.device.upper()} there are: {', '.join(machine.attention_backends)}",
            fix="leave --attention-backend out, or choose one of them",
            param="attention_backend",
        )
    best = machine.attention_backends[0]
    return Decision(best, f"best of {', '.join(machine.attention_backends)} on {machine.arch or machine.device}")


def choose_page_size(machine: MachineFacts, backend: str, model: ModelPlanFacts) -> Decision[int]:
    size = 64 if machine.device == "cuda" else 16
    if size % model.kv_page_multiple:
        size = model.kv_page_multiple
        return Decision(size, "the model's cache layout needs this multiple")
    return Decision(size, f"{backend} attention on {machine.arch or machine.device} reads pages of {size}")


def choose_chunk(machine: MachineFacts) -> Decision[int]:
    if machine.device == "cpu":
        return Decision(1024, "a CPU gains nothing from larger steps")
    for at_least, chunk in ((80 * GIB, 8192), (35 * GIB, 4096), (0, 2048)):
        if machine.total_bytes >= at_least:
            return Decision(chunk, f"suits {show_bytes(machine.total_bytes)} of device memory")
    raise AssertionError("unreachable")


def choose_unwatched(
    config: Config, machine: MachineFacts, chunk: int, planned: Callable[[int], MemoryPlan]
) -> Decision[int]:
    """`planned`: the memory plan for a given number of tokens per step."""
    if config.device.deterministic:
        return Decision(chunk, "--deterministic: answers are computed in the same steps, streamed or whole")
    given = config.scheduler.chunked_prefill_size is not AUTO
    if given or machine.device == "cpu" or machine.total_bytes < ROOMY_BYTES:
        return Decision(chunk, "as --chunked-prefill-size")
    if affordable(lambda: planned(UNWATCHED_TOKENS), lambda: planned(chunk), ROOMY_SHARE) is None:
        return Decision(chunk, "as --chunked-prefill-size: the KV cache needs the memory")
    return Decision(UNWATCHED_TOKENS, "larger steps cost less a token, and there is memory for them")


def choose_first_layer(
    config: Config, machine: MachineFacts, planned: Callable[[bool], MemoryPlan]
) -> Decision[Literal["on", "off"]]:
    """`planned`: the memory plan with the table, or without."""
    wanted = config.model.first_layer_table
    reason = ""
    if config.model.is_embedding:
        reason = "models that pool have none"
    elif config.parallel.pp_size > 1:
        reason = "stages compute their own layers only"
    elif machine.device == "cpu":
        reason = "on a CPU blocks are computed as one"
    if reason and wanted == "on":
        raise ConfigError(
            what="--first-layer-table on was asked for, it can't be had here",
            why=reason,
            fix="leave it out",
            param="first_layer_table",
        )
    if not reason and config.device.safe_mode:
        reason = "--safe-mode"
    if not reason and machine.total_bytes < ROOMY_BYTES:
        reason = f"the memory serves better as KV cache on {show_bytes(machine.total_bytes)}"
    if reason or wanted != "auto":
        return Decision("off", reason)
    took = affordable(lambda: planned(True), lambda: planned(False), TABLE_SHARE)
    if took is None:
        return Decision("off", "the KV cache needs the memory")
    size = show_bytes(took.weight_bytes - planned(False).weight_bytes)
    return Decision("on", f"{size} instead of a product")


def affordable(wanted: Callable[[], MemoryPlan], without: Callable[[], MemoryPlan], share: int) -> MemoryPlan | None:
    """A plan with an optional feature, if that takes at most one in `share` tokens of the KV cache."""
    try:
        plan = wanted()
    except ConfigError:
        return None
    return plan if plan.kv_tokens >= without().kv_tokens * (share - 1) // share else None


def choose_threads(machine: MachineFacts, config: Config) -> Decision[int]:
    ranks = ranks_per_node(config.parallel) * config.parallel.dp_size if machine.device == "cpu" else 1
    threads = max(1, machine.physical_cores // max(1, ranks))
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    return Decision(threads, f"{machine.physical_cores} physical cores{shared}")


def choose_captured(model: ModelPlanFacts) -> Decision[int]:
    """Largest step that is captured: graphs are faster if launching a layer kernel by kernel takes longer than its
    matrix products, padded to the size of a graph."""
    multiplied = 2 * model.hidden_size * model.attention_width + 3 * model.hidden_size * model.ffn_size
    times = MIXTURE_BOUND if model.expert_values else 1.0
    if model.packed_params and model.quantization != "gguf" and model.packed_bytes >= 0.9 * model.packed_params:
        times *= EIGHT_BITS_BOUND
    bound = int(times * LAUNCH_BOUND / multiplied) // 128 * 128
    if bound <= SMALL_GRAPHS:
        return Decision(SMALL_GRAPHS, "larger steps take the device longer than the host")
    return Decision(min(bound, MOST_GRAPHS), "a layer this narrow takes longer to launch than to compute")


def choose_tpot_target(machine: MachineFacts) -> Decision[float]:
    if machine.device == "cpu":
        return Decision(250.0, "four tokens a second keep a reader busy while a CPU computes prompts")
    return Decision(50.0, "twenty tokens a second while prompts are computed")


def choose_context(plan: MemoryPlan, model: ModelPlanFacts) -> Decision[int]:
    if plan.context_length == model.context_length:
        return Decision(plan.context_length, "the model's own limit")
    return Decision(plan.context_length, f"as much of the model's {model.context_length:,} as the memory holds")


def choose_fraction(plan: MemoryPlan) -> Decision[float]:
    taken = plan.weight_bytes + plan.kv_bytes
    return Decision(math.ceil(taken * 1000 / plan.total_bytes) / 1000, f"weights and KV take {show_bytes(taken)}")


def choose_running(machine: MachineFacts, plan: MemoryPlan, model: ModelPlanFacts) -> Decision[int]:
    most = most_running(machine, model)
    if most < MOST_RUNNING[machine.device] and plan.kv_tokens // 256 >= most:
        each = show_bytes(state_bytes(model) * (1 + num_snapshots(1)))
        return Decision(most, f"the states of each take {each}, with snapshots")
    by_memory = max(1, plan.kv_tokens // 256)
    if by_memory < most:
        return Decision(by_memory, f"{plan.kv_tokens:,} tokens of KV cache, at 256 each")
    return Decision(most, f"more at once would not be faster on a {machine.device.upper()}")


def one_at_a_time(config: Config) -> tuple[Config, dict[str, Decision[object]]]:
    """Settings for --deterministic: a request is computed in the same steps regardless of other requests, so that all
    sums are added in the same order."""
    running = config.scheduler.max_running_requests
    if running is not AUTO and running != 1:
        raise ConfigError(
            what=f"--deterministic and --max-running-requests {running} can't both be had",
            why="kernels sum differently for batches of different sizes, so requests are computed one at a time",
            fix="leave one of them out",
            param="deterministic",
        )
    decisions: dict[str, Decision[object]] = {
        "max_running_requests": Decision(1, "--deterministic: no batch, no difference"),
        "radix_cache": Decision(False, "--deterministic: a cached prefix would change the steps of what follows"),
    }
    if config.device.cuda_graph:
        decisions["cuda_graph"] = Decision(False, "--deterministic: graphs pad steps, and come when there is time")
    return replace(
        config,
        device=replace(config.device, cuda_graph=False),
        cache=replace(config.cache, radix_cache=False),
        scheduler=replace(config.scheduler, max_running_requests=1, unwatched_prefill_size=AUTO),
    ), decisions


def switch_offs(config: Config, machine: MachineFacts, backend: str) -> dict[str, str]:
    """Settings that are turned off regardless of the configuration, and why."""
    off: dict[str, str] = {}
    if config.device.safe_mode:
        off = dict.fromkeys(("overlap_schedule", "cuda_graph", "custom_kernels"), "--safe-mode")
    if backend == "torch":
        off.setdefault("cuda_graph", "torch attention looks at lengths on the host, which no graph can")
    if config.parallel.attn_dp_size > 1 or config.parallel.attn_cp_size > 1:
        off.setdefault("cuda_graph", "ranks that hold different tokens agree on sizes step by step")
    if machine.device == "cpu":
        off["cuda_graph"] = "a CPU has no CUDA graphs"
        off.setdefault(
            "overlap_schedule", "a CPU computes a step while it is launched: there is nothing to overlap with"
        )
    return off


def choose_workers(machine: MachineFacts) -> int:
    """Processes of an API worker that prepare media."""
    return max(1, min(8, machine.physical_cores // 4))


def choose_step_patches(machine: MachineFacts) -> Decision[int]:
    gain = (
        "about as long as a large prefill step" if machine.device == "cuda" else "a CPU gains nothing from larger steps"
    )
    return Decision(STEP_PATCHES[machine.device], gain)
