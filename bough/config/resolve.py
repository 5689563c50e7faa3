"""Turns "auto" into values, each with its reason. Pure: facts in, a configuration and the list of decisions out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from bough.config.concerns import AUTO, Config, DType, KvDType, MediaConfig, Quantization, SpeculativeConfig
from bough.config.hosts import ranks_per_node
from bough.config.kv_groups import KvPlan
from bough.config.layout import Layout
from bough.config.media_facts import TowerFacts
from bough.config.memory_plan import GIB, MIB, SMALL_STEP, MemoryPlan, PlanFacts, plan_memory, show_bytes
from bough.config.speculation import KEEPS_KV, ON_DEVICE, draft_numbers, draft_tokens, drafts_of_row, drafts_of_step
from bough.core.errors import ConfigError
from bough.core.kv import Grows, KvGroup, KvLayout

T = TypeVar("T")

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}

KV_CODE_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Of keys and values that are kept in whole numbers, by --kv-cache-dtype."""
_RANGE_BYTES = 4
"""Of the scale and the lowest number of a head's key, or value, that is kept so."""

GRAPH_BYTES_PER_SIZE = 24 * MIB
"""What a captured graph keeps, beyond the buffers that all of them share."""
SMALL_GRAPHS, MOST_GRAPHS = 512, 1280
"""Tokens of the largest graph: of any model, and of one whose steps are bound by launching."""
LAUNCH_BOUND = 1.1e11
"""(Tokens of a step) x (weights of a layer that a token is multiplied with) up to which launching a layer takes longer than
computing it: 0.35 ms at 650 TFLOP/s. Prompts of 600 and of 1,000 tokens take an H200 19.3 and 9.2 ms kernel by kernel with
28 layers of 2,048, and 4.9 and 6.8 in graphs; with 32 layers of 4,096, 15.3 and 25.9 beside 16.7 and 25.5."""
MOST_RUNNING: Mapping[str, int] = {"cuda": 1024, "cpu": 64}
"""Requests computed at the same time, by device: more would not be faster."""
SCORED_AT_ONCE: Mapping[str, int] = {"cuda": 512, "cpu": 128}
"""Prompt positions whose logits exist at the same time, by device."""
PENALISED_AT_ONCE = 1 << 22
"""Logits for which penalties are worked out at the same time."""
INDEX_PAIRS = 1 << 24
"""Scores of (query, token) pairs that exist at once where queries choose tokens."""
GATHERED_KEYS = 1 << 16
"""Maximum number of keys that attention in plain torch copies out of their pages at the same time, unless one row has
more."""
MOST_UNPACKED_EXPERTS = 2048 * MIB
"""Maximum size of a layer's gate and up matrices, of all experts and as 16-bit floats, that are dequantised together for
steps of many tokens (Hopper). gpt-oss-20b has 1,013 MiB, Qwen3-30B-A3B 768."""
ATTENTION_MASK_BYTES = 96 * MIB
"""Memory of the masks of attention in plain torch."""
ROOMY_BYTES = 120 * GIB
"""Device memory from which larger steps are worth their activations (see `UNWATCHED_TOKENS`)."""
UNWATCHED_TOKENS = 132 * 128
"""Prompt tokens of such larger steps. On the 132 multiprocessors of an H200, products of this many tokens in tiles of
128 end in full waves; with 16,384 tokens each token costs 0.5 % more."""
ROOMY_SHARE = 16
"""The larger steps are used only if their activations take at most 1/16 of the KV cache."""
MEDIA_BYTES: Mapping[str, int] = {"cuda": 512 * MIB, "cpu": 256 * MIB}
"""Memory of the embedding store, by device, unless the largest item needs more."""
MEDIA_BLOCK_ROWS = 16
"""Rows of the embedding store that are handed out together (`scheduler.media`)."""
TABLE_SHARE = 32
"""A table of the first layer is used only if it takes at most 1/32 of the KV cache."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A value, and why it was chosen."""

    value: T
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The device that will be used, and its host."""

    device: Literal["cpu", "cuda"]
    name: str = ""
    arch: str = ""
    """Instruction set or compute capability, say "avx512" or "sm90"."""
    total_bytes: int
    free_bytes: int
    host_free_bytes: int = 0
    num_devices: int = 1
    physical_cores: int = 1
    has_bfloat16: bool = True
    fastest_dtype: DType = "bfloat16"
    """The type with the fastest matrix product (measured, on CPUs)."""
    attention_backends: tuple[str, ...] = ("torch",)
    """What works here, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlanFacts:
    """What a checkpoint's config and headers say. Counts are of the whole model, not of one rank."""

    name: str
    """As given on the command line; empty: the default model."""
    context_length: int
    checkpoint_dtype: DType
    dense_params: int
    """Parameters kept in the compute type."""
    packed_bytes: int = 0
    """Bytes of weights that stay quantized."""
    packed_params: int = 0
    """Number of parameters of those weights, in case that they are dequantized on load."""
    quantization: Quantization | Literal[""] = ""
    """How the weights are quantized."""
    weight_format: str = ""
    """The quantization in a few words."""
    kv_format: Literal["", "fp8_e4m3"] = ""
    """What the checkpoint has scales for, of cached keys and values."""
    kv_values_per_token: int
    """Keys and values of one token in all layers."""
    num_kv_heads: int
    hidden_size: int
    ffn_size: int
    """Width of the widest feed-forward activation of a token (experts per token x their width, for mixtures)."""
    attention_width: int
    """Query, key and value widths together."""
    expert_values: int = 0
    """Values of the gate and up matrices of all experts of the largest mixture."""
    vocab_size: int
    kv_page_multiple: int = 1
    no_kv_codes: str = ""
    """Why its keys and values can't be kept in whole numbers; empty: they can."""
    topk: int = 0
    """Tokens that a query reads at most, in layers that choose them; 0: none does."""
    tower: TowerFacts | None = None
    """What turns media into embeddings, if the model does."""
    weight_share: float | None = None
    """Share of all weights on the rank with the most; None: an equal part."""
    kv: Callable[[int, int], KvPlan] | None = None
    """How its layers share pages, given the tokens of a column and of the longest request; None: each token takes those of
    `kv_values_per_token` that are of a rank's part of the key-value heads."""
    state_values: int = 0
    """Values of a request's state, in layers that keep one, on the rank with the most."""
    table_values: int = 0
    """Values for each position in tables of rotary positions, which every rank has in float32."""
    state_layer_values: int = 0
    """Of these, values of the largest layer..."""
    draft_values: int = 0
    """...and what such layers keep of a draft until it is known to be right."""
    tapped_values: int = 0
    """Values of a token that are kept beside the stream, for what drafts from them."""
    most_draft_steps: int | None = None
    """Drafts that what drafts on the device can make; None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration without "auto", the decisions that led to it, and the memory plan they share."""

    config: Config
    decisions: Mapping[str, Decision[object]]
    """Setting -> what was decided. Settings that the user fixed are not here."""
    plan: MemoryPlan

    def lines(self) -> list[str]:
        """The start-up log: one decision a line."""
        width = max((len(name) for name in self.decisions), default=0)
        return [f"{name:<{width}} = {each.value}  ({each.because})" for name, each in self.decisions.items()]


def resolve(config: Config, machine: MachineFacts, model: ModelPlanFacts) -> Resolved:
    """Decides all settings that are `AUTO`. Raises `ConfigError` if a setting cannot work on this machine."""
    decisions: dict[str, Decision[object]] = {}

    def settle(name: str, given: object, open_value: object, decide: Decision[T]) -> T:
        if given != open_value:
            return given  # type: ignore[return-value]
        decisions[name] = Decision(decide.value, decide.because)
        return decide.value

    if config.device.deterministic:
        config, alone = one_at_a_time(config)
        decisions.update(alone)
    device = config.device
    settle("device", device.device, "auto", choose_device(config, machine))
    dtype = settle("dtype", config.model.dtype, "auto", choose_dtype(machine, model))
    kv_dtype = settle("kv_cache_dtype", config.model.kv_cache_dtype, "auto", choose_kv_dtype(machine, model, dtype))
    check_scales(config, kv_dtype)
    quantization = settle("quantization", config.model.quantization, "auto", choose_quantization(machine, model, dtype))
    backend = settle("attention_backend", device.attention_backend, "auto", choose_attention(machine, config))
    page_size = settle("page_size", config.cache.page_size, AUTO, choose_page_size(machine, backend, model))
    chunk = settle("chunked_prefill_size", config.scheduler.chunked_prefill_size, AUTO, choose_chunk(machine))
    bound = config.scheduler.max_prefill_tokens if chunk != -1 else 0
    if bound and chunk > bound:
        chunk = bound
        decisions["chunked_prefill_size"] = Decision(chunk, "--max-prefill-tokens")
    threads = settle("cpu_threads", device.cpu_threads, AUTO, choose_threads(machine, config))
    tpot = settle("tpot_target_ms", config.scheduler.tpot_target_ms, AUTO, choose_tpot_target(machine))
    drafted, passes = config.speculative.speculative_num_draft_tokens, config.speculative.speculative_num_steps
    if config.speculative.speculative_algorithm in ON_DEVICE:
        numbers = draft_numbers(config.speculative, model.most_draft_steps)
        passes = settle("speculative_num_steps", passes, AUTO, Decision(numbers.steps, numbers.because))
        drafted = settle("speculative_num_draft_tokens", drafted, AUTO, Decision(numbers.tokens, numbers.because))
    topk = config.speculative.speculative_eagle_topk
    if config.speculative.speculative_algorithm in KEEPS_KV:
        drafted_in = config.speculative.speculative_draft_kv_cache_dtype
        same = Decision(kv_dtype, "--kv-cache-dtype")
        draft_kv = settle("speculative_draft_kv_cache_dtype", drafted_in, "auto", same)
        config = replace(config, speculative=replace(config.speculative, speculative_draft_kv_cache_dtype=draft_kv))
    settled = replace(
        config.speculative, speculative_num_steps=0 if passes is AUTO else passes, speculative_num_draft_tokens=drafted,
        speculative_eagle_topk=1 if topk is AUTO else topk,
    )  # fmt: skip
    config = replace(config, speculative=settled)
    if config.speculative.speculative_algorithm != "none":
        drafted = settle("speculative_num_draft_tokens", drafted, AUTO, Decision(*draft_tokens(config.speculative)))
    elif drafted is AUTO:
        drafted = draft_tokens(config.speculative)[0]
    switches = {
        "overlap_schedule": config.scheduler.overlap_schedule,
        "cuda_graph": device.cuda_graph,
        "custom_kernels": device.custom_kernels,
    }
    for name, switched_off in switch_offs(config, machine, backend).items():
        if switches[name]:
            switches[name] = False
            decisions[name] = Decision(False, switched_off)

    captured = device.cuda_graph_max_tokens
    if switches["cuda_graph"]:
        captured = settle("cuda_graph_max_tokens", captured, AUTO, choose_captured(model))
    captured = SMALL_GRAPHS if captured is AUTO else captured

    def planned(unwatched: int, table: bool) -> MemoryPlan:
        facts = memory_facts(
            config, machine, model, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, chunk=chunk,
            unwatched=unwatched, captured=captured if switches["cuda_graph"] else 0, packed=quantization != "none",
            backend=backend, table=table,
        )  # fmt: skip
        return plan_memory(facts)

    given = config.model.first_layer_table
    larger = choose_unwatched(config, machine, chunk, lambda tokens: planned(tokens, given == "on"))
    unwatched = settle("unwatched_prefill_size", config.scheduler.unwatched_prefill_size, AUTO, larger)
    if bound and unwatched > bound:
        unwatched = bound
        decisions["unwatched_prefill_size"] = Decision(unwatched, "--max-prefill-tokens")
    looked_up = choose_first_layer(config, machine, lambda table: planned(unwatched, table))
    table = settle("first_layer_table", given, "auto", looked_up)
    plan = planned(unwatched, table == "on")
    settle("context_length", config.model.context_length, AUTO, choose_context(plan, model))
    settle("max_total_tokens", config.cache.max_total_tokens, AUTO, Decision(plan.kv_tokens, plan.because))
    fraction = settle("mem_fraction_static", device.mem_fraction_static, AUTO, choose_fraction(plan))
    media = replace(
        config.media,
        mm_workers=choose_workers(machine) if config.media.mm_workers is AUTO else config.media.mm_workers,
        mm_cache_size=plan.media_bytes,
        mm_encoder_step_tokens=0,
    )
    if model.tower is not None:
        rows = media_rows(plan.media_bytes, model.tower, dtype)
        kept = Decision(plan.media_bytes, f"{rows:,} positions of {model.tower.width:,} values")
        given_patches = config.media.mm_encoder_step_tokens
        patches = settle("mm_encoder_step_tokens", given_patches, AUTO, choose_step_patches(machine))
        settle("mm_cache_size", config.media.mm_cache_size, AUTO, kept)
        media = replace(media, mm_encoder_step_tokens=patches)
    most = choose_running(machine, plan, model)
    running = settle("max_running_requests", config.scheduler.max_running_requests, AUTO, most)

    resolved = replace(
        config,
        model=replace(
            config.model, dtype=dtype, kv_cache_dtype=kv_dtype, quantization=quantization,
            context_length=plan.context_length, first_layer_table=table,
        ),
        device=replace(
            device, device=machine.device, mem_fraction_static=fraction, attention_backend=backend, cpu_threads=threads,
            cuda_graph=switches["cuda_graph"], cuda_graph_max_tokens=captured, custom_kernels=switches["custom_kernels"],
        ),
        cache=replace(config.cache, page_size=page_size, max_total_tokens=plan.kv_tokens),
        scheduler=replace(
            config.scheduler, max_running_requests=running, chunked_prefill_size=chunk,
            unwatched_prefill_size=unwatched, tpot_target_ms=tpot, overlap_schedule=switches["overlap_schedule"],
        ),
        speculative=replace(config.speculative, speculative_num_draft_tokens=drafted),
        media=media,
    )  # fmt: skip
    return Resolved(config=resolved, decisions=decisions, plan=plan)


# -- one decision a function ----------------------------------------------------------------------


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
    """A plan with something that is nice to have, if it takes no more than one in `share` tokens of the KV cache."""
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
    """Up to which size steps are captured: graphs are faster if launching a layer kernel by kernel takes longer than
    its products, padded to the size of a graph."""
    multiplied = 2 * model.hidden_size * model.attention_width + 3 * model.hidden_size * model.ffn_size
    bound = int(LAUNCH_BOUND / multiplied) // 128 * 128
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


STATE_SHARE = 0.125
"""Of free memory, what states of rows and snapshots of them may take by default."""


def state_bytes(model: ModelPlanFacts) -> int:
    """Of one request's state, which is kept in float32."""
    return 4 * model.state_values


def states_bytes(model: ModelPlanFacts, rows: int, drafts: int) -> int:
    """Of the states of all rows, of one that begins and one for padding, and of snapshots. Where rows may have `drafts`,
    with what is kept of these, and a copy of one layer's states that they are tried on."""
    if not model.state_values:
        return 0
    kept = 4 * drafts * (rows + 1) * model.draft_values + (4 * rows * model.state_layer_values if drafts else 0)
    return state_bytes(model) * (2 + rows + num_snapshots(rows)) + kept


def num_snapshots(rows: int) -> int:
    """Places for states beside those of rows: for each row one while it decodes, and one for its prompt."""
    return 2 * rows


def most_running(machine: MachineFacts, model: ModelPlanFacts) -> int:
    """Rows by default, at most: as many as a device gains from, and as many as there is room for their states."""
    most = MOST_RUNNING[machine.device]
    if model.state_values:
        each = state_bytes(model) * (1 + num_snapshots(1))
        most = max(1, min(most, int(STATE_SHARE * machine.free_bytes) // each))
    return most


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


# -- memory ---------------------------------------------------------------------------------------


def memory_facts(
    config: Config,
    machine: MachineFacts,
    model: ModelPlanFacts,
    *,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    chunk: int,
    unwatched: int,
    captured: int,
    packed: bool,
    backend: str,
    table: bool,
) -> PlanFacts:
    """The memory plan's inputs for one rank. `captured`: tokens of the largest graph, 0 without graphs."""
    layout = Layout.of(config.parallel)
    ranks = config.parallel.tp_size
    context = config.model.context_length
    if context is not AUTO and context > model.context_length:
        raise ConfigError(
            what=f"a context of {context:,} tokens was asked for, the model allows {model.context_length:,}",
            why="it was not trained on longer positions",
            fix=f"""use --context-length {model.context_length}, or override the model's limit with """
            f"""--json-model-override-args '{{"max_position_embeddings": {context}}}'""",
            param="context_length",
        )
    longest = model.context_length if context is AUTO else context
    draft_kv_dtype = config.speculative.speculative_draft_kv_cache_dtype
    running = config.scheduler.max_running_requests
    rows = most_running(machine, model) if running is AUTO else running
    step_tokens, small_step = largest_step(chunk, unwatched, longest, rows), largest_step(SMALL_STEP, 0, longest, rows)
    if model.kv is not None:
        kv = model.kv(page_size, longest)
    else:
        kv_heads = -(-model.num_kv_heads // ranks)
        kv = KvPlan((KvGroup(Grows()),), model.kv_values_per_token * kv_heads // max(1, model.num_kv_heads))
    if kv_dtype in KV_CODE_BITS or draft_kv_dtype in KV_CODE_BITS:
        check_codes(kv, kv_dtype, model, shares_context=layout.cp > 1, draft=draft_kv_dtype)
    share = 1 / ranks if model.weight_share is None else model.weight_share
    packed_bytes = model.packed_bytes if packed else 0
    dense = model.dense_params if packed else model.dense_params + model.packed_params
    if table:
        dense += model.vocab_size * model.attention_width
    fraction = config.device.mem_fraction_static
    total = config.cache.max_total_tokens
    gathers = longest if backend == "torch" or layout.cp > 1 else 0

    drafts = drafts_of_step(config.speculative, machine.device, rows)
    unpacked = 0
    if packed_bytes and machine.device == "cuda":  # with many tokens, one weight at a time is dequantised
        unpacked = max(2 * model.ffn_size, model.attention_width) * model.hidden_size * ITEM_BYTES[dtype] // ranks
        experts = model.expert_values * ITEM_BYTES[dtype] // ranks
        unpacked = max(unpacked, experts if experts <= MOST_UNPACKED_EXPERTS else 0)

    kept_bytes, tower_bytes = 0, 0
    if model.tower is not None:
        kept_bytes = media_bytes(config.media, machine, model.tower, longest, dtype)
        tower_bytes = tower_activations(config.media, machine, model.tower, longest, dtype)

    def activations(tokens: int) -> int:
        layers = unpacked + activation_bytes(
            model, machine.device, tokens, rows, ITEM_BYTES[dtype], layout.heads,
            gathers=gathers, drafts=drafts, owners=layout.dp * layout.cp,
        )  # fmt: skip
        layers += rule_bytes(config.speculative, model.vocab_size, rows, min(rows + drafts, tokens))
        return max(layers, tower_bytes)

    return PlanFacts(
        model=model.name,
        device=machine.device,
        total_bytes=machine.total_bytes,
        free_bytes=machine.free_bytes,
        weight_bytes=math.ceil((packed_bytes + dense * ITEM_BYTES[dtype]) * share) + 4 * model.table_values * longest,
        kv_bytes_per_token=kv_bytes(kv, kv_dtype, draft_kv_dtype) * KvLayout(kv.groups, page_size).column_pages,
        groups=kv.groups,
        kv_note=kv.because,
        activation_bytes=activations(step_tokens),
        small_activation_bytes=activations(small_step),
        step_tokens=step_tokens,
        small_step_tokens=small_step,
        graph_bytes=graph_bytes(captured) if captured else 0,
        media_bytes=kept_bytes,
        state_bytes=states_bytes(model, rows, drafts_of_row(config.speculative)),
        page_size=page_size * layout.cp,
        model_context=model.context_length,
        context_length=None if context is AUTO else context,
        max_total_tokens=None if total is AUTO else total,
        mem_fraction=None if fraction is AUTO else fraction,
        kv_item_bytes=ITEM_BYTES.get(kv_dtype, 1),
        weight_dtype=dtype,
        tp_size=ranks,
        num_devices=machine.num_devices,
        host_free_bytes=machine.host_free_bytes,
    )


def kv_bytes(kv: KvPlan, kv_dtype: str, draft_kv_dtype: str = "auto") -> int:
    """Of a token of a column, in one line. `draft_kv_dtype`: of what drafts, where it differs."""
    bits = KV_CODE_BITS.get(kv_dtype)
    if bits is not None:
        return kv.values_per_token * bits // 8 + kv.vectors_per_token * _RANGE_BYTES
    drafted = kv.draft_values * ITEM_BYTES[kv_dtype if draft_kv_dtype == "auto" else draft_kv_dtype]
    return (kv.values_per_token - kv.draft_values) * ITEM_BYTES[kv_dtype] + drafted


def check_codes(kv: KvPlan, kv_dtype: str, model: ModelPlanFacts, *, shares_context: bool, draft: str) -> None:
    """Raises ConfigError if keys and values of the model can't be kept in whole numbers. `draft`: the type for what
    drafts."""
    because = model.no_kv_codes
    if draft not in ("auto", kv_dtype):
        because = f"what drafts would keep them as {draft} beside {kv_dtype}: both, or neither, are in whole numbers"
    elif shares_context:
        because = "ranks that share the tokens of each sequence (--attn-cp-size) exchange floats"
    elif not because and not kv.even_vectors:
        because = (
            "layers with windows have heads of another width than others, and the scales of a page differ in number"
        )
    if because:
        raise ConfigError(
            what=f"keys and values of {model.name or 'this model'} can't be kept as {kv_dtype}",
            why=because,
            fix="use --kv-cache-dtype fp8_e4m3, or leave it out",
            param="kv_cache_dtype",
        )


def check_scales(config: Config, kv_dtype: str) -> None:
    """Raises ConfigError if scales of keys and values are given or asked for, and nothing would use them."""
    given = {
        "calculate_kv_scales": config.model.calculate_kv_scales,
        "quantization_param_path": bool(config.model.quantization_param_path),
    }
    for name in (name for name, is_given in given.items() if is_given and not kv_dtype.startswith("fp8")):
        raise ConfigError(
            what=f"--{name.replace('_', '-')} with keys and values in {kv_dtype}",
            why="only FP8 has a scale for each layer; int8 and int4 find one for every token and head",
            fix="add --kv-cache-dtype fp8_e4m3, or leave it out",
            param=name,
        )


def choose_workers(machine: MachineFacts) -> int:
    """Processes of an API worker that prepare media."""
    return max(1, min(8, machine.physical_cores // 4))


def choose_step_patches(machine: MachineFacts) -> Decision[int]:
    if machine.device == "cpu":
        return Decision(4096, "a CPU gains nothing from larger steps")
    return Decision(16_384, "about as long as a large prefill step")


def media_bytes(media: MediaConfig, machine: MachineFacts, tower: TowerFacts, context: int, dtype: str) -> int:
    """Bytes of the embedding store: those asked for, or the default and at least the largest item that fits a context."""
    row_bytes = tower.width * ITEM_BYTES[dtype]
    if media.mm_cache_size is not AUTO:
        wanted = media.mm_cache_size
    else:
        wanted = max(MEDIA_BYTES[machine.device], min(tower.max_positions, context) * row_bytes)
    blocks = max(1, -(-wanted // (row_bytes * MEDIA_BLOCK_ROWS)))
    return blocks * MEDIA_BLOCK_ROWS * row_bytes


def media_rows(num_bytes: int, tower: TowerFacts, dtype: str) -> int:
    """Positions that an embedding store of this size holds."""
    return num_bytes // (tower.width * ITEM_BYTES[dtype])


def tower_activations(media: MediaConfig, machine: MachineFacts, tower: TowerFacts, context: int, dtype: str) -> int:
    """Peak of the tower, for the largest item or the most that a step computes of several."""
    patches = media.mm_encoder_step_tokens
    step = choose_step_patches(machine).value if patches is AUTO else patches
    largest = min(tower.max_positions, context) * tower.tokens_per_position
    return max(step, largest) * tower.values_per_token * ITEM_BYTES[dtype]


def largest_step(chunk: int, unwatched: int, context: int, rows: int) -> int:
    """Tokens of a step: of prompts `chunk` (-1: a whole context) or `unwatched`, and of rows that decode beside them, while
    they are few against those; or those of all rows alone."""
    prompts = context if chunk < 0 else min(max(chunk, unwatched), context * rows)
    return max(rows, prompts + min(rows, prompts // 8))


def activation_bytes(
    model: ModelPlanFacts,
    device: Literal["cpu", "cuda"],
    step_tokens: int,
    rows: int,
    item_bytes: int,
    ranks: int,
    *,
    gathers: int = 0,
    drafts: int = 0,
    owners: int = 1,
) -> int:
    """Peak of any step: a layer's buffers for all its tokens beside logits with the sampler's copies; or the logits beside
    what penalties take; or the logits beside those of a prompt that is scored.

    `gathers`: longest context, where attention copies keys and values out of their pages. `drafts`: logits beyond one a row.
    `owners`: groups of `ranks` ranks with tokens of their own, which feed-forward blocks gather.
    """
    streams = 4 + (2 * owners if owners > 1 else 0)
    per_token = streams * model.hidden_size + (2 * model.attention_width + 3 * model.ffn_size) // ranks
    layer = step_tokens * (per_token + model.tapped_values) * item_bytes
    if gathers:
        keys = max(gathers, GATHERED_KEYS)
        layer += ATTENTION_MASK_BYTES + 2 * keys * (model.attention_width // ranks) * item_bytes
    if model.topk:
        layer += 4 * step_tokens * model.topk + 3 * 4 * INDEX_PAIRS
    hidden = 2 * step_tokens * model.hidden_size * item_bytes
    sampled = model.vocab_size * min(rows + drafts, step_tokens)
    copies = 4 * 4 * sampled
    penalties = 5 * model.vocab_size * rows + 36 * min(sampled, PENALISED_AT_ONCE)
    scores = 12 * model.vocab_size * min(SCORED_AT_ONCE[device], step_tokens) + 4 * sampled
    return max(layer + copies, hidden + copies + penalties, hidden + scores)


def rule_bytes(asked: SpeculativeConfig, vocab: int, rows: int, samples: int) -> int:
    """What rules by which drafts count take: probabilities of drafts by request, and of a step's samples."""
    if asked.speculative_use_rejection_sampling or asked.speculative_use_block_verification:
        return 4 * vocab * (rows * drafts_of_row(asked) + 4 * samples)
    loose = min(asked.speculative_accept_threshold_single, asked.speculative_accept_threshold_acc) < 1
    return 4 * vocab * samples if loose else 0


def graph_bytes(max_tokens: int) -> int:
    """Upper bound for the graphs of all sizes up to `max_tokens`: sizes grow by doubling, then in steps."""
    sizes = max_tokens.bit_length() + min(max_tokens, SMALL_GRAPHS) // 64 + max(0, max_tokens - SMALL_GRAPHS) // 128
    return 2 * sizes * GRAPH_BYTES_PER_SIZE
