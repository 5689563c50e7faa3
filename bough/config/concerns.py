"""The configuration, nested by concern. Each field's docstring is its `--help` text; each field is a flag.

`AUTO` means: decided once by `bough.config.resolve`, which gives its reason. Sizes take human forms on the command line
(`32k`, `2GiB`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal


class Auto(Enum):
    """The type of `AUTO`, so that `int | Auto` type-checks."""

    AUTO = "auto"

    def __repr__(self) -> str:
        return "auto"


AUTO: Final = Auto.AUTO

Profile = Literal["balanced", "dev", "latency", "throughput"]
SchedulePolicy = Literal["auto", "fcfs", "lpm", "dfs-weight", "lof", "random", "shortest-prefill-first"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "mru", "priority"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DummyWeights = Literal["normal", "even"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
KvDType = Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"]
Quantization = Literal["auto", "none", "gguf", "gguf-exact"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which form."""

    model: str = ""
    """Directory, hub id or .gguf file. Empty: the embedded default model, SmolLM2-135M-Instruct."""
    tokenizer: str = ""
    """Directory, hub id or .gguf file of the tokenizer, if it is not the model's."""
    revision: str = ""
    """Branch, tag or commit of a hub model."""
    served_model_name: str = ""
    """Name that clients use. Default: the model's own."""
    load_format: LoadFormat = "auto"
    """Format of the weights; `dummy` makes seeded random ones of the config's shapes."""
    dummy_weights: DummyWeights = "normal"
    """How dummy weights are drawn: `normal`, as models begin their training, or `even`, within 0.001 of zero, as vLLM and
    SGLang draw theirs: for comparisons with them, since what a GPU may spend on a product depends on the numbers in it."""
    dtype: DType = "auto"
    """Type of weights and activations. `half` is float16, `float` float32."""
    quantization: Quantization = "auto"
    """Weight scheme: `auto` follows the checkpoint, `none` dequantises on load; on a CPU `gguf` keeps a GGUF file's blocks
    as they are packed, and `gguf-exact` rounds no activations for it, at about half the speed."""
    kv_cache_dtype: KvDType = "auto"
    """Type of cached keys and values."""
    first_layer_table: Literal["auto", "on", "off"] = "auto"
    """Keep what the first layer projects each token of the vocabulary to, instead of computing it again. Takes memory."""
    context_length: int | Auto = AUTO
    """Longest prompt plus answer, in tokens. auto: the model's own, or what fits the memory."""
    chat_template: str = ""
    """File with a Jinja chat template, or the name of a built-in one. Default: the model's own."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's tokenizer, where that needs it; other code of a model is never run."""
    skip_tokenizer_init: bool = False
    """Take and give token ids only."""
    is_embedding: bool = False
    """Serve as a pooling model (embeddings, rerank, classification), also where the checkpoint does not say it is one."""
    pooling: Literal["auto", "cls", "last", "mean", "max", "sparse"] = "auto"
    """How a pooling model makes one vector of a text's tokens. auto: as the checkpoint says."""
    json_model_override_args: str = ""
    """JSON object merged over the model's config."""
    logit_processors: tuple[str, ...] = ()
    """Functions over logits that requests may name, as name=module:attribute; installed packages may bring more."""
    seed: int = 0
    """Seed of dummy weights and of requests that bring none (mixed with their id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where it runs, and with which kernels."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on."""
    mem_fraction_static: float | Auto = AUTO
    """Share of the device's memory for weights and KV together."""
    attention_backend: str = "auto"
    """Attention kernels: auto, torch; on a CPU cpu; on a GPU triton, and hopper on Hopper GPUs."""
    cuda_graph: bool = True
    """Replay captured graphs for small steps."""
    cuda_graph_max_tokens: int = 512
    """Largest step, in tokens, that is captured."""
    cpu_threads: int | Auto = AUTO
    """Threads for computing on the CPU. auto: one a physical core."""
    custom_kernels: bool = True
    """Use kernels that are compiled on first use; otherwise PyTorch's own only."""
    deterministic: bool = False
    """The same bits for a request whatever else is asked: one at a time, no cached prefixes, no graphs. Much slower."""
    safe_mode: bool = False
    """Turn off overlap, graphs and custom kernels, to tell a bug of theirs from one of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over devices."""

    tp_size: int = 1
    """Ranks that split each layer."""
    nnodes: int = 1
    """Machines: one, so far."""
    node_rank: int = 0
    """Number of this machine."""
    dist_init_addr: str = ""
    """host:port of rank 0, for several machines: none, so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory and the prefix tree."""

    page_size: int | Auto = AUTO
    """Tokens per KV page."""
    max_total_tokens: int | Auto = AUTO
    """KV capacity in tokens. auto: what the memory plan leaves."""
    radix_cache: bool = True
    """Keep prefixes of finished requests for reuse."""
    radix_eviction_policy: EvictionPolicy = "lru"
    """Which cached prefix goes first when memory is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs when."""

    max_running_requests: int | Auto = AUTO
    """Requests computed at once."""
    max_queued_requests: int = 4096
    """Requests waiting at most; more get 429."""
    max_queued_tokens: int = 8_388_608
    """Prompt tokens waiting at most; more get 429."""
    chunked_prefill_size: int | Auto = AUTO
    """Prompt tokens computed in one step at most; -1: whole prompts."""
    unwatched_prefill_size: int | Auto = AUTO
    """Prompt tokens in one step, if more, while all answers are sent whole: nobody sees tokens arrive, and it costs less."""
    schedule_policy: SchedulePolicy = "auto"
    """Order of waiting requests."""
    schedule_conservativeness: float = 1.0
    """Above 1 admits fewer requests at once (fewer retractions), below 1 more."""
    overlap_schedule: bool = True
    """Plan the next step while this one runs."""
    tpot_target_ms: float | Auto = AUTO
    """Prefill chunks shrink so that running requests wait no longer than this between tokens; 0: they don't."""
    small_request_share: float = 0.25
    """Share of each step's prefill budget kept for short prompts while long ones are being computed."""
    priority_scheduling: bool = False
    """Order by the requests' priority, and let urgent ones preempt."""
    priority_preemption_threshold: int = 10
    """How much more urgent a waiting request must be to preempt a running one."""
    stream_interval: int = 1
    """Tokens between two streamed deltas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The way in."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on."""
    grpc_port: int = 0
    """Port for gRPC, on the same address; 0: none. Needs the extra `grpc`."""
    api_workers: int = 1
    """Front-end processes."""
    api_key: str = ""
    """Key that clients must send as a bearer token."""
    admin_api_key: str = ""
    """Key for admin routes (pause, profile, logging), which don't exist without it."""
    insecure: bool = False
    """Allow a public address without a key."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body."""
    drain_timeout_s: float = 30.0
    """On SIGTERM, seconds that running requests get to finish."""
    watchdog_timeout_s: float = 300.0
    """Seconds without a beat of the engine's loop after which it counts as stuck."""
    supervise: bool = False
    """Start a dead or stuck engine again, and refuse requests that it has died of twice."""
    client_timeout_s: float = 30.0
    """Seconds that a client gets to send a request's headers, and its body."""
    skip_server_warmup: bool = False
    """Don't run a request before reporting ready."""
    strict_api: bool = False
    """Refuse unknown request fields instead of warning."""
    enable_cache_report: bool = True
    """Report cached tokens in usage."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning sections: a name, auto (by chat template) or none."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls: a name, auto (by chat template) or none."""
    completion_template: str = "auto"
    """Marks for filling in the middle (`suffix`): deepseek_coder, star_coder, qwen_coder, auto (by tokenizer) or none."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Where unset sampling parameters come from: what the model's authors recommend, or OpenAI's defaults."""
    grammar_backend: Literal["auto", "xgrammar", "llguidance", "none"] = "auto"
    """Engine for constrained output. auto: xgrammar, and llguidance (if installed) for grammars that count characters."""
    json_max_whitespace: int = 8
    """White space in a row that constrained JSON may have between its parts; 0: none, and more is certain ahead of time."""
    isolate_cache: bool = False
    """Share cached prefixes within one API key only."""
    rerank_template: str = "auto"
    """Prompt with which a generative model reranks: qwen3, plain, or a Jinja file that uses query, document and instruct."""
    moderation_categories: str = ""
    """JSON object, or a file with one, that maps a classifier's labels to the categories of /v1/moderations."""
    ui: bool = True
    """Serve the playground, a page for browsers, at /ui."""
    batch_dir: str = ""
    """Directory for /v1/files and /v1/batches, which work only with one; batches go on after a restart."""
    response_store_size: int = 1024
    """Responses kept in memory for previous_response_id, retrieval and background runs; 0: none."""
    incremental_streaming_output: bool = False
    """/generate streams new text only, instead of all text so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Which pictures are fetched, and how large they may be."""

    allowed_media_domains: tuple[str, ...] = ()
    """Where pictures may be fetched from: example.com, *.example.com, addresses, networks, or * for every public host."""
    allowed_local_media_path: str = ""
    """Directory from which file: URLs may be read. Without one, none are."""
    max_media_bytes: int = 64 * 1024 * 1024
    """Largest picture, as it comes."""
    max_media_pixels: int = 50_000_000
    """Most pixels of a picture, all frames together; checked before it is decoded."""
    max_media_frames: int = 128
    """Most frames of an animation."""
    media_timeout_s: float = 10.0
    """Seconds that fetching a picture may take, redirects included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is said, and how."""

    log_level: LogLevel = "info"
    """Least severe message that is printed."""
    log_format: Literal["text", "json"] = "text"
    """Form of log lines."""
    log_requests: bool = False
    """Log each request's parameters (never its text)."""
    decode_log_interval_s: float = 5.0
    """Seconds between two lines about throughput."""
    metrics: bool = True
    """Serve Prometheus metrics at /metrics."""
    otlp_endpoint: str = ""
    """Where to send OpenTelemetry traces, for example http://localhost:4318. Needs opentelemetry-sdk and its exporter."""
    crash_dir: str = ""
    """Directory for crash bundles: shapes and ids of the last steps, settings, the cause; never text."""
    dump_dir: str = ""
    """Directory for every request's body, text included, for `bough replay`. Off unless it is given."""
    tensor_dump_dir: str = ""
    """Directory for what each layer makes of requests whose id (rid) begins with "dump-", for `bough debug compare`."""
    profile_dir: str = ""
    """Directory for profiles. Default: bough-profiles in the system's directory for temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a server or an Engine is started with."""

    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    log: LogConfig = field(default_factory=LogConfig)
