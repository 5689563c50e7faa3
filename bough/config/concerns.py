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
EvictionPolicy = Literal["lru", "lfu", "slru", "fifo", "filo", "mru", "priority"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DummyWeights = Literal["normal", "even"]
ModelImpl = Literal["auto", "bough", "transformers"]
DummyRouting = Literal["router", "uniform"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
KvDType = Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
Quantization = Literal[
    "auto", "none", "gguf", "gguf-exact",
    "fp8", "fp8_block", "int8", "w8a16", "int4", "mxfp8", "mxfp4",
    "awq", "gptq", "auto-round", "compressed-tensors", "modelopt", "bitsandbytes", "torchao",
    "fbgemm_fp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8",
]  # fmt: skip
LoadBalance = Literal["prefix", "round_robin", "total_requests", "total_tokens"]
MoeDispatch = Literal["none", "allgather", "alltoall"]
CopyChoice = Literal["dynamic", "static"]
LogLevel = Literal["debug", "info", "warning", "error"]
SpeculativeAlgorithm = Literal[
    "none", "NGRAM", "SUFFIX", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "MEDUSA", "DFLASH"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and its format."""

    model: str = ""
    """Directory, hub id or .gguf file. Empty: the embedded default model, SmolLM2-135M-Instruct."""
    tokenizer: str = ""
    """Directory, hub id or .gguf file of the tokenizer, if it is not the model's."""
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    """`slow`: use the Python tokenizer of transformers instead of the fast one."""
    revision: str = ""
    """Branch, tag or commit of a hub model."""
    download_dir: str = ""
    """Directory for models from the hub. Default: the hub's cache (HF_HOME)."""
    served_model_name: str = ""
    """Name that clients use, or several, separated by commas; the first one is shown. `*` matches any characters and
    `?` one: claude-*,gpt-* accepts the names that Claude Code and Codex send. Default: the model's name."""
    load_format: LoadFormat = "auto"
    """Format of the weights. `dummy`: seeded random weights with the shapes of the config."""
    dummy_weights: DummyWeights = "normal"
    """Distribution of dummy weights: `normal`, as for training, or `even`, uniform within 0.001 of zero, as in vLLM and
    SGLang. For comparisons with them use `even`, because a GPU's power and so its clock depend on the values."""
    dummy_routing: DummyRouting = "router"
    """How experts are chosen with dummy weights: by the `router`, which sends most tokens to few experts because a
    random model hardly distinguishes tokens, or `uniform`, at random per token, which is closer to a trained model. The
    router is computed in both cases."""
    model_impl: ModelImpl = "auto"
    """Implementation of the model: `bough`, `transformers`, or `auto`: bough's if it has the architecture, else the
    module of transformers with bough's attention, cache, batching and sampling. Code from checkpoints is never run."""
    dtype: DType = "auto"
    """Type of weights and activations. `half` means float16, `float` means float32."""
    quantization: Quantization = "auto"
    """Weight scheme: `auto` follows the checkpoint, `none` dequantises on load. A checkpoint in floats is quantised
    while it is loaded by `fp8` (a scale per channel), `fp8_block` (per 128 x 128), `int8`, `w8a16`, `int4`, `mxfp8` and
    `mxfp4`; dummy weights take any format. `gguf` keeps a GGUF file's blocks packed; so does `gguf-exact` (CPU only),
    which does not round activations and has about half the speed. Other names are those of checkpoint formats: the
    checkpoint must have that format."""
    kv_cache_dtype: KvDType = "auto"
    """Type of cached keys and values. auto: FP8 on a GPU if the checkpoint has scales for it, else that of activations.
    `int8` and `int4` store a scale per token and head, and need no calibration."""
    quantization_param_path: str = ""
    """JSON file with the scales of keys and values cached in FP8. Default: those of the checkpoint, or 1."""
    calculate_kv_scales: bool = False
    """Measure the scales of keys and values cached in FP8 on the first prompts, instead of using the checkpoint's. CUDA
    graphs are captured after that."""
    first_layer_table: Literal["auto", "on", "off"] = "auto"
    """Keep a table with the first layer's projections for every token of the vocabulary, instead of computing them in
    each step."""
    context_length: int | Auto = AUTO
    """Maximum of prompt plus answer, in tokens. auto: the model's maximum, or less if memory is short."""
    chat_template: str = ""
    """File with a Jinja chat template, or the name of a built-in one. Default: the model's template."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's tokenizer, if it needs it. Other code of a model is never run."""
    skip_tokenizer_init: bool = False
    """Accept and return token ids only."""
    mm_processor_kwargs: str = ""
    """JSON object of settings of the model's media processor, which override the checkpoint's: {"max_pixels": 1003520}.
    Requests can lower these limits, not raise them."""
    language_model_only: bool = False
    """Serve only the language model of a multimodal model, without its vision and audio encoders."""
    enable_lora: bool = True
    """Serve the adapters (LoRA) of --lora-paths."""
    lora_paths: tuple[str, ...] = ()
    """Adapters that requests may name, as name=directory: PEFT's adapter_config.json and adapter_model.safetensors. All
    of them are loaded at the start, and stay on the device."""
    max_loras_per_batch: int = 8
    """Most adapters, all of which may be in one batch."""
    max_lora_rank: int = 512
    """Largest rank of an adapter; one with a larger rank is refused."""
    is_embedding: bool = False
    """Serve as a pooling model (embeddings, rerank, classification) even if the checkpoint does not say that it is
    one."""
    pooling: Literal["auto", "cls", "last", "mean", "max", "sparse"] = "auto"
    """How a pooling model combines the token vectors of a text into one. auto: as the checkpoint says."""
    json_model_override_args: str = ""
    """JSON object merged into the model's config."""
    logit_processors: tuple[str, ...] = ()
    """Functions on logits that requests may name, as name=module:attribute. Installed packages can add more."""
    seed: int = 0
    """Seed of dummy weights, and (mixed with the request id) of requests without a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device and its kernels."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on."""
    mem_fraction_static: float | Auto = AUTO
    """Share of the device's memory for weights and KV cache together."""
    attention_backend: str = "auto"
    """Attention kernels: auto, torch; on a CPU also cpu; on a GPU also triton, and hopper on Hopper GPUs."""
    cuda_graph: bool = True
    """Replay captured CUDA graphs for small steps."""
    cuda_graph_max_tokens: int | Auto = AUTO
    """Largest step, in tokens, that is captured. auto: 512, or more for narrow models, whose steps are limited by
    kernel launches."""
    cpu_threads: int | Auto = AUTO
    """Threads that compute on the CPU. auto: one per physical core."""
    custom_kernels: bool = True
    """Use bough's compiled kernels; otherwise only those of PyTorch."""
    deterministic: bool = False
    """Return the same bits for a request regardless of other requests: one request at a time, no cached prefixes, no
    graphs. Much slower."""
    safe_mode: bool = False
    """Turn off overlap, graphs and custom kernels, to find out whether one of them causes a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over devices."""

    tp_size: int = 1
    """Tensor parallelism: number of ranks that split each layer."""
    auto_parallel: bool = False
    """Choose --tp-size, --pp-size, --dp-size, --attn-dp-size and --ep-size automatically: by what fits on the GPUs of
    this machine (and of the others of --nnodes, which must be identical) and by estimated step times. The log gives the
    reason."""
    ep_size: int = 1
    """Expert parallelism: number of groups, within the ranks of --tp-size, that hold different experts. The ranks of a
    group split each of its experts."""
    moe_a2a_backend: MoeDispatch = "none"
    """How tokens reach the ranks of their experts. `none`: every rank computes its experts for all tokens, and an
    all-reduce combines the results. `allgather`: results are gathered by token and added in the order of the router's
    choice. `alltoall`: the same, but tokens are sent only to the ranks of their experts."""
    ep_num_redundant_experts: int = 0
    """Number of extra expert slots per layer, over all ranks, for copies of busy experts."""
    ep_dispatch_algorithm: CopyChoice = "dynamic"
    """Which copy of an expert computes a token. `dynamic`: round robin. `static`: each rank always uses the same copy,
    its own if it has one."""
    init_expert_location: str = "trivial"
    """Initial placement of experts. `trivial`: in order. Or a JSON file (or object) with `physical_to_logical_map`, the
    expert of each slot per layer, or with `logical_count`, the number of tokens per expert, from which an even
    placement is computed."""
    eplb: bool = False
    """Expert load balancing: count tokens per expert, and periodically move experts between ranks to balance the
    load."""
    eplb_rebalance_num_iterations: int = 1000
    """Steps between two rebalancings of experts."""
    eplb_rebalance_layers_per_chunk: int = 0
    """Number of layers whose experts are moved in one step, to bound the delay of each step; 0: all layers."""
    eplb_min_rebalancing_utilization_threshold: float = 1.0
    """Rebalance only if the mean load of the ranks divided by the largest load is at most this."""
    expert_distribution_recorder_mode: Literal["none", "stat"] = "none"
    """`stat`: count tokens per expert for metrics and /dump_expert_distribution_record, even without --eplb."""
    pp_size: int = 1
    """Pipeline parallelism: number of stages. Each holds a part of the layers and their KV cache, and has --tp-size
    ranks."""
    pp_layer_partition: str = ""
    """Number of layers of each stage, separated by commas, for example 14,16,16,14. Default: evenly; earlier stages get
    one more if the layers do not divide."""
    pp_max_micro_batch_size: int = 0
    """With --pp-size: maximum number of requests that decode in one step. 0: the running requests divided by the number
    of stages."""
    pp_async_batch_depth: int = 0
    """With --pp-size: number of steps queued before the first stage, beyond one per stage."""
    dp_size: int = 1
    """Data parallelism: number of replicas of the whole engine behind one server, each with its own KV cache."""
    attn_dp_size: int = 1
    """Data-parallel attention: number of groups, within the ranks of --tp-size, that compute attention for different
    requests, each with its own scheduler and KV cache. Feed-forward blocks and experts are split over all ranks."""
    attn_cp_size: int = 1
    """Context parallelism: number of groups, within the ranks that compute the same requests, that share their KV
    cache. Each keeps every n-th token of a sequence and computes a part of each long prompt."""
    custom_all_reduce: bool = False
    """For small messages between GPUs of one machine, use an all-reduce that reads the memory of the other GPUs (CUDA
    IPC) and applies the norm in the same kernel, instead of NCCL. If that is not possible, the log says why and NCCL is
    used."""
    enable_dp_attention: bool = False
    """Treat --dp-size as --attn-dp-size: replicas of attention within one engine instead of replicas of the engine."""
    load_balance_method: LoadBalance = "prefix"
    """How a replica is chosen for a request: the one with the longest cached prefix, unless it is much busier than
    another; round robin; the one with the fewest requests; or the one with the fewest tokens."""
    nnodes: int = 1
    """Number of machines; each runs the same number of ranks."""
    node_rank: int = 0
    """Index of this machine, from 0; machine 0 accepts the requests."""
    use_ray: bool = False
    """Let Ray allocate the other machines of --nnodes and start this command on each; needs `bough[ray]`. Steps and
    results are not sent through Ray."""
    dist_init_addr: str = ""
    """host:port of machine 0, to which the others connect. Machine 0 listens on this host."""
    dist_secret: str = ""
    """Shared secret with which the machines authenticate each other; at least 8 characters."""
    dist_timeout_s: float = 600.0
    """Seconds that ranks and machines wait for one another at the start."""

    @property
    def num_schedulers(self) -> int:
        """Replicas that requests are spread over: those of the engine, and those of attention within each."""
        return self.dp_size * self.attn_dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache and the prefix tree."""

    page_size: int | Auto = AUTO
    """Tokens per KV page."""
    max_total_tokens: int | Auto = AUTO
    """KV capacity in tokens. auto: what the memory plan leaves."""
    radix_cache: bool = True
    """Keep the KV cache of finished requests for reuse by prompts with the same prefix."""
    radix_eviction_policy: EvictionPolicy = "lru"
    """Which cached prefix is evicted first when memory is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Queue limits and the order of requests."""

    max_running_requests: int | Auto = AUTO
    """Maximum number of requests in a batch."""
    max_queued_requests: int = 4096
    """Maximum number of waiting requests; above it clients get 429."""
    max_queued_tokens: int = 8_388_608
    """Maximum number of prompt tokens of waiting requests; above it clients get 429."""
    max_queue_wait_s: float = 60.0
    """Maximum expected wait of a new request in seconds, at the rate at which requests have recently started; above it
    clients get 429. 0: no limit."""
    chunked_prefill_size: int | Auto = AUTO
    """Maximum number of prompt tokens per step; -1: whole prompts."""
    unwatched_prefill_size: int | Auto = AUTO
    """Maximum number of prompt tokens per step, if larger, while no running request streams: larger steps cost less per
    token, and no client sees tokens arrive late."""
    max_prefill_tokens: int = 0
    """Upper limit of the two sizes above; 0: none. It does not apply to whole prompts (-1)."""
    schedule_policy: SchedulePolicy = "auto"
    """Order of waiting requests."""
    schedule_conservativeness: float = 1.0
    """Above 1, admit fewer requests at once (fewer retractions); below 1, more."""
    overlap_schedule: bool = True
    """Plan the next step while the device computes the current one."""
    tpot_target_ms: float | Auto = AUTO
    """Shrink prefill chunks so that running requests wait no longer than this between two tokens; 0: no such limit."""
    small_request_share: float = 0.25
    """Share of the prefill budget of each step that is kept for short prompts while long ones are computed."""
    priority_scheduling: bool = False
    """Order requests by their priority, and let urgent ones preempt others."""
    priority_preemption_threshold: int = 10
    """Minimum difference in priority for a waiting request to preempt a running one."""
    priority_preemption: bool = True
    """With --priority-scheduling, let urgent requests preempt running ones; otherwise they are only first in the
    queue."""
    stream_interval: int = 1
    """Tokens per streamed delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: several tokens per step, drafted and then verified by the model."""

    speculative_algorithm: SpeculativeAlgorithm = "none"
    """Source of drafts. NGRAM searches the request's text and earlier texts for its last tokens, and drafts what
    followed them; SUFFIX does the same and drafts what followed most often, as long as that is likely; STANDALONE is a
    small model with the same tokenizer; EAGLE (1 and 2), EAGLE3 and MEDUSA are heads on the model's hidden states;
    NEXTN uses the draft layers that some checkpoints contain (MTP); DFLASH drafts a block in one pass."""
    speculative_draft_model_path: str = ""
    """Directory or hub id of the draft model or heads. NEXTN: by default, the layers of the model itself."""
    speculative_draft_model_revision: str = ""
    """Branch, tag or commit of the draft model on the hub."""
    speculative_draft_load_format: LoadFormat = "auto"
    """Format of the draft model's weights; `dummy`: random weights. auto: as --load-format."""
    speculative_draft_model_quantization: Quantization = "auto"
    """Weight scheme of the draft model or heads, like --quantization."""
    speculative_draft_kv_cache_dtype: KvDType = "auto"
    """Type of the draft model's KV cache. auto: as --kv-cache-dtype. MEDUSA has no KV cache."""
    speculative_token_map: str = ""
    """EAGLE, EAGLE3, NEXTN, MEDUSA: JSON file with the ids of frequent tokens. Heads that share the model's output head
    draft only these tokens, which is faster."""
    speculative_draft_window_size: int = 0
    """STANDALONE, EAGLE, EAGLE3: number of last tokens that the draft model attends to; 0: all. Heads are often trained
    on short texts, and fewer of their drafts are accepted in long contexts."""
    speculative_num_steps: int | Auto = AUTO
    """Number of drafts made one after the other on the device. auto: 3 or 4 depending on the model; the number of heads
    for MEDUSA, of a block's tokens for DFLASH."""
    speculative_eagle_topk: int | Auto = AUTO
    """EAGLE, EAGLE3, NEXTN, MEDUSA: above 1, drafts form a tree: each node has this number of children, and this number
    of nodes per level is expanded. auto: 1, a chain."""
    speculative_num_draft_tokens: int | Auto = AUTO
    """Maximum number of tokens per request that a step verifies: the newest token and the drafts after it. auto: NGRAM
    12, SUFFIX 17, others one more than --speculative-num-steps, 16 for trees."""
    speculative_adaptive: bool = True
    """Choose the number of drafts by how often they are accepted and what a step costs; otherwise always verify all of
    them."""
    speculative_accept_threshold_single: float = 1.0
    """Below 1, a draft with at least this probability is accepted even if another token was sampled. Answers then
    differ from those of the model without drafts."""
    speculative_accept_threshold_acc: float = 1.0
    """Below 1, a draft with probability p is accepted with probability min(1, p / this number). Answers then differ
    from those of the model without drafts."""
    speculative_use_rejection_sampling: bool = False
    """Accept a sampled draft with probability p(model) / p(draft). The distribution of answers is the same as with the
    default rule; slightly more drafts are accepted, and a step is slower. A request with a seed gets another answer
    than without drafts."""
    speculative_use_block_verification: bool = False
    """Like --speculative-use-rejection-sampling, but decided for all drafts of a request together; never accepts
    fewer."""
    speculative_ngram_min_match_window_size: int = 1
    """NGRAM: minimum number of matching tokens before a draft."""
    speculative_ngram_max_match_window_size: int = 24
    """NGRAM: maximum number of tokens compared; the longest match is used."""
    speculative_ngram_capacity: int = 1_000_000
    """NGRAM, SUFFIX: number of tokens of earlier texts kept for the search, 16 bytes each; 0: search only the request's
    own text."""
    speculative_suffix_max_tree_depth: int = 24
    """SUFFIX: maximum number of tokens compared."""
    speculative_suffix_max_spec_factor: float = 1.0
    """SUFFIX: maximum number of drafts per matching token."""
    speculative_suffix_min_token_prob: float = 0.1
    """SUFFIX: drafting stops when the estimated probability of the next token falls below this."""
    speculative_ngram_external_corpus_max_tokens: int = 10_000_000
    """NGRAM: maximum number of tokens of all corpora of /add_external_corpus together, 16 bytes each."""
    speculative_config: str = ""
    """vLLM's JSON object, translated to the settings above. Fields: method (ngram, suffix, draft_model, eagle, eagle3,
    medusa, dflash, mtp), num_speculative_tokens, model, revision, quantization, prompt_lookup_min, prompt_lookup_max
    and suffix_decoding_max_tree_depth, _max_spec_factor and _min_token_prob. Explicit settings take precedence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP and gRPC server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on."""
    uds: str = ""
    """Unix socket to listen on, instead of an address and a port. Its file permissions decide who can connect."""
    root_path: str = ""
    """Path prefix under which a reverse proxy serves this server, for example /llm. The proxy may strip it or not."""
    ssl_certfile: str = ""
    """PEM file with the server's certificate chain. The server then serves HTTPS only."""
    ssl_keyfile: str = ""
    """PEM file with the private key, if it is not in the certificate's file."""
    ssl_keyfile_password: str = ""
    """Password of the private key. Other users of the machine can see flags: prefer the environment variable."""
    ssl_ca_certs: str = ""
    """PEM file with certificates of authorities. Clients must present a certificate signed by one of them."""
    grpc_port: int = 0
    """Port for gRPC, on the same address; 0: no gRPC. Needs the extra `grpc`."""
    api_workers: int = 1
    """Number of processes that serve HTTP."""
    api_key: tuple[str, ...] = ()
    """Key that clients must send as a bearer token: KEY, or NAME=KEY. Can be given several times, for several clients,
    each with separate files, batches, responses, sessions and request ids."""
    api_keys_file: str = ""
    """YAML file with more keys: `name: key`, or `name: {key: ..., requests_per_minute: ..., tokens_per_minute: ...}`;
    `sha256` can replace `key`. SIGHUP reloads it."""
    admin_api_key: str = ""
    """Key for admin routes (pause, profile, logging), which do not exist without it."""
    admin_with_api_key: bool = False
    """Allow the ordinary key on admin routes, too."""
    metrics_api_key: str = ""
    """Key that is valid for /metrics only, for Prometheus. The ordinary key is valid there, too."""
    metrics_port: int = 0
    """Also serve /metrics, without a key, on this port; 0: no."""
    insecure: bool = False
    """Allow a public address without a key."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server."""
    max_body_bytes: int = 16 * 1024 * 1024
    """Largest request body, in bytes."""
    max_media_body_bytes: int = 64 * 1024 * 1024
    """Largest request body for models that take images, video or audio, which arrive as base64 in the body; used if
    larger than --max-body-bytes."""
    max_body_bytes_in_flight: int = 256 * 1024 * 1024
    """Maximum bytes of request bodies that an API worker receives at the same time; bodies of up to 64 KiB do not
    count. Above it clients get 503."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    watchdog_timeout_s: float = 300.0
    """Seconds without a heartbeat of the engine's loop after which it counts as stuck."""
    supervise: bool = False
    """Restart an engine that died or is stuck, and refuse requests that were running in two crashes."""
    client_timeout_s: float = 30.0
    """Seconds that a client has to send the headers of a request, and then again to send its body. A body may take
    longer if it arrives at 16 KiB per second or more."""
    skip_server_warmup: bool = False
    """Report ready without running a first request."""
    strict_api: bool = False
    """Refuse unknown request fields instead of warning."""
    enable_cache_report: bool = True
    """Report cached tokens in `usage`."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning sections: a name, auto (from the chat template) or none."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls: a name, auto (from the chat template) or none."""
    drop_unknown_tools: bool = False
    """Drop calls of tools that the request does not offer, instead of returning them."""
    completion_template: str = "auto"
    """Special tokens for filling in the middle (`suffix`): deepseek_coder, star_coder, qwen_coder, auto (from the
    tokenizer) or none."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Source of sampling parameters that a request does not set: `model`, the recommendation of the model's authors, or
    `openai`, OpenAI's defaults."""
    preferred_sampling_params: str = ""
    """JSON object of native sampling parameters for requests that do not set them; takes precedence over
    --sampling-defaults."""
    default_chat_template_kwargs: str = ""
    """JSON object of variables for the chat template, for requests that do not set them: {"enable_thinking": false}."""
    stream_usage: bool = False
    """Report usage in every OpenAI stream, even if stream_options does not ask for it."""
    allow_auto_truncate: bool = False
    """Truncate prompts that are too long at their end, and limit answers to the rest of the context, instead of
    refusing the request."""
    weight_version: str = "default"
    """Version of the weights, as meta_info and /model_info report it."""
    grammar_backend: Literal["auto", "xgrammar", "llguidance", "none"] = "auto"
    """Engine for constrained output. auto: xgrammar, and llguidance (if installed) for grammars that count characters."""
    json_max_whitespace: int = 8
    """Maximum number of consecutive white space characters between the parts of constrained JSON; 0: none, so that more
    tokens are forced."""
    isolate_cache: bool = False
    """Share cached prefixes only between requests with the same name of API key."""
    rerank_template: str = "auto"
    """Prompt for reranking with a generative model: qwen3, qwen3-vl, plain, or a Jinja file that uses query, document and
    instruct."""
    embedding_template: str = "auto"
    """Prompt around each input of an embedding model: gme-qwen2-vl, qwen3-vl, none, or a Jinja file that uses instruct,
    media and text. auto: by the model's name."""
    multi_item_scoring_delimiter: int = -1
    """Token id between the query and each item of a /v1/score request that does not set one; -1: none."""
    moderation_categories: str = ""
    """JSON object, or a file with one, that maps the labels of a classifier to the categories of /v1/moderations."""
    ui: bool = True
    """Serve the playground, a web page, at /ui."""
    batch_dir: str = ""
    """Directory for /v1/files and /v1/batches, which are off without it. Batches continue after a restart."""
    response_store_size: int = 1024
    """Number of responses kept in memory for previous_response_id, retrieval and background runs; 0: none."""
    incremental_streaming_output: bool = False
    """Stream only new text on /generate, instead of the whole text so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Images, video and audio: where they may be fetched from, their limits and caches."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts that media may be fetched from: example.com, *.example.com, addresses, networks, or * for every public
    host."""
    allowed_local_media_path: str = ""
    """Directory from which file: URLs may be read. Default: file: URLs are refused."""
    max_media_bytes: int = 64 * 1024 * 1024
    """Maximum size of one image, video or audio file, in bytes."""
    max_media_pixels: int = 50_000_000
    """Maximum number of pixels of an image, all frames together; checked before it is decoded."""
    max_media_frames: int = 128
    """Maximum number of frames of an animated image."""
    max_video_frames: int = 768
    """Maximum number of frames taken from a video, even if the model's processor would take more."""
    max_audio_s: float = 3600.0
    """Maximum length in seconds of audio for /v1/audio/transcriptions and /v1/audio/translations."""
    media_timeout_s: float = 10.0
    """Seconds that fetching a medium may take, including redirects."""
    media_cpu_s: float = 20.0
    """CPU seconds that preparing one medium may take; above it the request is refused."""
    limit_mm_data_per_request: str = ""
    """JSON object with the maximum number of media per request, by kind: {"image": 8}. Default: 64 of each."""
    mm_workers: int | Auto = AUTO
    """Processes per API worker that decode and resize media. auto: a quarter of the cores, 1 to 8."""
    mm_processor_cache_size: int = 1024 * 1024 * 1024
    """Bytes of shared memory per API worker for prepared media (pixels), including those of running requests."""
    mm_cache_size: int | Auto = AUTO
    """Bytes of device memory for embeddings of media: those that prefills need now, and a cache of others. auto: 512
    MiB on a GPU, 256 MiB on a CPU, or more if the largest medium needs it."""
    mm_encoder_step_tokens: int | Auto = AUTO
    """Maximum number of patches that one step encodes, unless a single item has more. Larger values delay the tokens of
    other requests. auto: 16384 on a GPU, 4096 on a CPU."""
    enable_mm_embeds: bool = False
    """Accept embeddings computed by clients (safetensors files) in place of images. The model gets them unchecked: only
    for trusted clients."""
    mm_enable_dp_encoder: bool = False
    """Data-parallel encoder: the tensor-parallel ranks (--tp-size) each encode some of a step's images, balanced by
    size, and exchange the embeddings. Without it every rank encodes all images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logs, metrics and traces."""

    log_level: LogLevel = "info"
    """Minimum severity of messages that are logged."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines."""
    log_file: str = ""
    """File for log lines, instead of standard error. It can be renamed at any time: the next line opens a new file."""
    log_file_max_bytes: int = 100 * 1024 * 1024
    """Size at which the log file is renamed to FILE.1 and a new one is started; 0: no limit."""
    log_file_backups: int = 5
    """Number of old log files kept: FILE.1, the newest, to FILE.N."""
    log_requests: bool = False
    """Log each request (but never its text)."""
    log_requests_level: int = 1
    """What --log-requests logs: 0: ids, counts and times; 1: also the sampling parameters."""
    decode_log_interval_s: float = 5.0
    """Seconds between two log lines about throughput."""
    decode_log_interval: int = 0
    """Decode steps between two log lines about throughput, instead of seconds; 0: use seconds."""
    metrics: bool = True
    """Serve Prometheus metrics at /metrics."""
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector for traces, for example http://localhost:4318. Needs opentelemetry-sdk and its
    exporter."""
    crash_dir: str = ""
    """Directory for crash reports: shapes and ids of the last steps, settings, the cause; no text of requests."""
    dump_dir: str = ""
    """Directory for the bodies of all requests, including their text, for `bough replay`. Off by default."""
    dump_media: bool = False
    """Keep media in dumped bodies. By default, media in bodies are replaced by their size and digest, and such requests
    can't be replayed."""
    tensor_dump_dir: str = ""
    """Directory for the outputs of all layers for requests whose rid begins with "dump-", for `bough debug compare`."""
    profile_dir: str = ""
    """Directory for profiles. Default: bough-profiles-UID in the directory for temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a server or an Engine is started with."""

    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    log: LogConfig = field(default_factory=LogConfig)
