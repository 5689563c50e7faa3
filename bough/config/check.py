"""Checks ranges and combinations of settings before anything starts."""

from __future__ import annotations

import ipaddress
import json

from bough.config.concerns import AUTO, Auto, Config, ParallelConfig, ServerConfig, SpeculativeConfig
from bough.config.experts import TRIVIAL
from bough.config.flags import settings, show_value
from bough.config.hosts import LEAST_SECRET
from bough.config.layout import Layout
from bough.config.speculation import KEEPS_KV, MOST_DRAFT_TOKENS, ON_DEVICE, TREES, WINDOWED, draft_numbers
from bough.core.bounds import MOST_REPLICAS
from bough.core.errors import ConfigError


def check(config: Config) -> None:
    """Raises `ConfigError` for the first setting outside its range."""
    _ranges(config)
    _metrics(config)
    _model(config)
    _media(config)
    _parallel(config)
    _speculative(config)
    _way_in(config.server)


def _way_in(server: ServerConfig) -> None:
    if server.root_path and not server.root_path.startswith("/"):
        raise ConfigError(
            what=f"--root-path is {server.root_path!r}", why="a path begins with /", fix=f"write /{server.root_path}",
            param="root_path",
        )  # fmt: skip


def check_exposure(config: Config) -> None:
    """Raises `ConfigError` if the server or its admin routes would be reachable on a public address without a key, or
    if caches are to be isolated by key and there are no keys."""
    server = config.server
    if server.admin_with_api_key and not has_keys(server):
        raise ConfigError(
            what="--admin-with-api-key without --api-key",
            why="the admin routes would be open to all clients",
            fix="add --api-key SECRET, or leave it out",
            param="admin_with_api_key",
        )
    if server.isolate_cache and not has_keys(server):
        raise ConfigError(
            what="isolate_cache is on, and there are no keys",
            why="cached prefixes are kept apart by the names of keys",
            fix="add --api-key NAME=KEY for each client, or --api-keys-file; or leave --isolate-cache out",
            param="isolate_cache",
        )
    if server.uds or is_loopback(server.host) or has_keys(server) or server.insecure:
        return
    raise ConfigError(
        what=f"refusing to listen on {server.host} without a key",
        why="every client that can reach this address could use the model",
        fix="add --api-key SECRET, or listen on 127.0.0.1, or add --insecure if the network is trusted",
        param="host",
    )


def has_keys(server: ServerConfig) -> bool:
    """Whether clients need a key."""
    return bool(server.api_key or server.api_keys_file)


def _metrics(config: Config) -> None:
    server = config.server
    if server.metrics_port and not config.log.metrics:
        raise ConfigError(
            what="--metrics-port with --no-metrics",
            why="there would be nothing to serve on it",
            fix="leave one of them out",
            param="metrics_port",
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
        ("max_loras_per_batch", config.model.max_loras_per_batch, 1, 1024),
        ("max_lora_rank", config.model.max_lora_rank, 1, 8192),
        ("mem_fraction_static", device.mem_fraction_static, 0.01, 0.99),
        ("cuda_graph_max_tokens", device.cuda_graph_max_tokens, 1, 8192),
        ("cpu_threads", device.cpu_threads, 1, 4096),
        ("page_size", cache.page_size, 1, 4096),
        ("max_total_tokens", cache.max_total_tokens, 1, None),
        ("max_running_requests", scheduler.max_running_requests, 1, 65_536),
        ("max_queued_requests", scheduler.max_queued_requests, 1, None),
        ("max_queued_tokens", scheduler.max_queued_tokens, 1, None),
        ("max_queue_wait_s", scheduler.max_queue_wait_s, 0.0, None),
        ("schedule_conservativeness", scheduler.schedule_conservativeness, 0.0, 100.0),
        ("tpot_target_ms", scheduler.tpot_target_ms, 0.0, None),
        ("small_request_share", scheduler.small_request_share, 0.0, 0.9),
        ("stream_interval", scheduler.stream_interval, 1, None),
        ("metrics_port", server.metrics_port, 0, 65_535),
        ("port", server.port, 0, 65_535),
        ("grpc_port", server.grpc_port, 0, 65_535),
        ("api_workers", server.api_workers, 1, 64),
        ("json_max_whitespace", server.json_max_whitespace, 0, 1024),
        ("max_body_bytes", server.max_body_bytes, 1024, 2**31),
        ("max_media_body_bytes", server.max_media_body_bytes, 1024, 2**31),
        ("max_body_bytes_in_flight", server.max_body_bytes_in_flight, 1024, None),
        ("drain_timeout_s", server.drain_timeout_s, 0.0, None),
        ("watchdog_timeout_s", server.watchdog_timeout_s, 0.1, None),
        ("client_timeout_s", server.client_timeout_s, 0.1, None),
        ("response_store_size", server.response_store_size, 0, None),
        ("max_media_bytes", config.media.max_media_bytes, 1024, 2**31),
        ("max_media_pixels", config.media.max_media_pixels, 1, 2**31),
        ("max_media_frames", config.media.max_media_frames, 1, 65_535),
        ("max_video_frames", config.media.max_video_frames, 1, 65_535),
        ("media_timeout_s", config.media.media_timeout_s, 0.1, 3600.0),
        ("media_cpu_s", config.media.media_cpu_s, 0.1, 3600.0),
        ("mm_workers", config.media.mm_workers, 1, 1024),
        ("mm_processor_cache_size", config.media.mm_processor_cache_size, 1024, None),
        ("mm_cache_size", config.media.mm_cache_size, 0, None),
        ("mm_encoder_step_tokens", config.media.mm_encoder_step_tokens, 1, None),
        ("decode_log_interval_s", log.decode_log_interval_s, 0.0, None),
        ("decode_log_interval", log.decode_log_interval, 0, None),
        ("log_requests_level", log.log_requests_level, 0, 1),
        ("log_file_max_bytes", log.log_file_max_bytes, 0, None),
        ("log_file_backups", log.log_file_backups, 0, 10_000),
        ("max_prefill_tokens", scheduler.max_prefill_tokens, 0, None),
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
    for name, text, example in (
        ("json_model_override_args", config.model.json_model_override_args, '{"num_hidden_layers": 2}'),
        ("preferred_sampling_params", config.server.preferred_sampling_params, '{"temperature": 0.7}'),
        ("default_chat_template_kwargs", config.server.default_chat_template_kwargs, '{"enable_thinking": false}'),
        ("mm_processor_kwargs", config.model.mm_processor_kwargs, '{"max_pixels": 1003520}'),
        ("limit_mm_data_per_request", config.media.limit_mm_data_per_request, '{"image": 8}'),
    ):
        _json_object(name, text, example)
    if config.model.calculate_kv_scales and config.model.quantization_param_path:
        raise ConfigError(
            what="--calculate-kv-scales with --quantization-param-path",
            why="the scales of keys and values come from the first prompts or from a file",
            fix="leave one of them out",
            param="calculate_kv_scales",
        )
    if config.model.calculate_kv_scales and config.parallel.attn_cp_size > 1:
        raise ConfigError(
            what="--calculate-kv-scales with --attn-cp-size",
            why="ranks that share the tokens of a sequence would measure different ones",
            fix="use the scales of a file (--quantization-param-path), or --kv-cache-dtype int8 without --attn-cp-size",
            param="calculate_kv_scales",
        )
    if config.model.dummy_weights != "normal" and config.model.load_format != "dummy":
        raise ConfigError(
            what=f"dummy_weights is {config.model.dummy_weights}, the weights are no dummies",
            why=f"load_format is {config.model.load_format}",
            fix="add --load-format dummy, or leave --dummy-weights out",
            param="dummy_weights",
        )
    if config.model.dummy_routing != "router" and config.model.load_format != "dummy":
        raise ConfigError(
            what=f"dummy_routing is {config.model.dummy_routing}, the weights are no dummies",
            why=f"load_format is {config.model.load_format}: answers of a real model would mean nothing",
            fix="add --load-format dummy, or leave --dummy-routing out",
            param="dummy_routing",
        )


def _media(config: Config) -> None:
    text = config.media.limit_mm_data_per_request
    for kind, most in (json.loads(text) if text else {}).items():
        if kind not in ("image", "video", "audio") or isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise ConfigError(
                what=f"limit_mm_data_per_request has {kind!r}: {most!r}",
                why="it must map image, video and audio to how many of them a request may have",
                fix="""for example --limit-mm-data-per-request '{"image": 8}'""",
                param="limit_mm_data_per_request",
            )


def _json_object(name: str, text: str, example: str) -> None:
    if not text:
        return
    why = ""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = str(error)
    else:
        if not isinstance(parsed, dict):
            why = f"it is a JSON {type(parsed).__name__}"
    if why:
        raise ConfigError(
            what=f"{name} is no JSON object",
            why=why,
            fix=f"for example {settings()[name].flag} '{example}'",
            param=name,
        )


def _parallel(config: Config) -> None:
    parallel = config.parallel
    for name in ("tp_size", "pp_size", "ep_size", "attn_dp_size", "attn_cp_size", "nnodes"):
        _in_range(name, getattr(parallel, name), 1, 1024)
    chosen = {
        "tp_size": parallel.tp_size, "pp_size": parallel.pp_size, "dp_size": parallel.dp_size, "ep_size": parallel.ep_size,
        "attn_dp_size": parallel.attn_dp_size, "attn_cp_size": parallel.attn_cp_size,
    }  # fmt: skip
    given = [name for name, size in chosen.items() if size > 1]
    if parallel.auto_parallel and given:
        raise ConfigError(
            what=f"auto_parallel is set, and so is {given[0]}",
            why="it chooses all sizes itself",
            fix=f"leave out --auto-parallel, or --{given[0].replace('_', '-')}",
            param="auto_parallel",
        )
    _in_range("node_rank", parallel.node_rank, 0, parallel.nnodes - 1)
    _in_range("dist_timeout_s", parallel.dist_timeout_s, 1, None)
    size = Layout.of(parallel).size
    if size % parallel.nnodes and not parallel.auto_parallel:
        raise ConfigError(
            what=f"{size} ranks can't be spread evenly over {parallel.nnodes} machines",
            why="each machine runs the same number of ranks",
            fix=f"choose --tp-size and --pp-size so that their product is a multiple of {parallel.nnodes}",
            param="nnodes",
        )
    _experts(parallel)
    _in_range("pp_max_micro_batch_size", parallel.pp_max_micro_batch_size, 0, None)
    _in_range("pp_async_batch_depth", parallel.pp_async_batch_depth, 0, 64)
    if parallel.pp_size > 1:
        _stages(config)
    elif parallel.pp_async_batch_depth or parallel.pp_max_micro_batch_size or parallel.pp_layer_partition:
        raise ConfigError(
            what="stages are described, there are none",
            why="pp_size is 1",
            fix="add --pp-size, or leave them out",
            param="pp_size",
        )
    _in_range("dp_size", parallel.dp_size, 1, MOST_REPLICAS)
    if parallel.num_schedulers > MOST_REPLICAS:
        raise ConfigError(
            what=f"{parallel.dp_size} replicas of {parallel.attn_dp_size} replicas of attention were asked for",
            why=f"a server has at most {MOST_REPLICAS} of them",
            fix="choose a smaller --dp-size or --attn-dp-size",
            param="attn_dp_size",
        )
    if parallel.attn_dp_size > 1 or parallel.attn_cp_size > 1:
        _spread_tokens(config)
    if parallel.attn_dp_size == 1 and parallel.enable_dp_attention:
        raise ConfigError(
            what="enable_dp_attention is set, there is one replica of attention",
            why="attn_dp_size (or dp_size) is 1",
            fix="add --attn-dp-size, or leave it out",
            param="attn_dp_size",
        )
    if parallel.dp_size > 1 and parallel.nnodes > 1:
        raise ConfigError(
            what=f"{parallel.dp_size} replicas can't be spread over {parallel.nnodes} machines",
            why="a server's replicas run on its own machine",
            fix="start a server on each machine behind a load balancer, or leave out --dp-size",
            param="dp_size",
        )
    if parallel.use_ray and parallel.nnodes == 1:
        raise ConfigError(
            what="use_ray is set, there is one machine",
            why="Ray finds the other machines of --nnodes",
            fix="add --nnodes, or leave out --use-ray",
            param="use_ray",
        )
    placed = parallel.use_ray and parallel.node_rank == 0
    if parallel.nnodes == 1 and parallel.dist_init_addr:
        raise ConfigError(
            what="dist_init_addr is given, there is one machine",
            why="ranks of one machine meet without a port",
            fix="leave out --dist-init-addr, or add --nnodes",
            param="dist_init_addr",
        )
    if parallel.nnodes > 1 and not parallel.dist_init_addr and not placed:
        raise ConfigError(
            what=f"{parallel.nnodes} machines don't know where to meet",
            why="dist_init_addr is empty",
            fix="on every machine: --dist-init-addr HOST:PORT with the address of machine 0",
            param="dist_init_addr",
        )
    if parallel.nnodes > 1 and len(parallel.dist_secret) < LEAST_SECRET and not (placed and not parallel.dist_secret):
        raise ConfigError(
            what=f"{parallel.nnodes} machines need a secret of at least {LEAST_SECRET} characters",
            why="otherwise every process that reaches the port could take part",
            fix="set the same BOUGH_DIST_SECRET (or --dist-secret) on every machine",
            param="dist_secret",
        )


def _experts(parallel: ParallelConfig) -> None:
    _in_range("ep_num_redundant_experts", parallel.ep_num_redundant_experts, 0, 4096)
    _in_range("eplb_rebalance_num_iterations", parallel.eplb_rebalance_num_iterations, 1, None)
    _in_range("eplb_rebalance_layers_per_chunk", parallel.eplb_rebalance_layers_per_chunk, 0, None)
    name = "eplb_min_rebalancing_utilization_threshold"
    _in_range(name, parallel.eplb_min_rebalancing_utilization_threshold, 0, 1)
    spread = {
        "moe_a2a_backend": parallel.moe_a2a_backend != "none",
        "ep_num_redundant_experts": parallel.ep_num_redundant_experts > 0,
        "eplb": parallel.eplb,
        "init_expert_location": parallel.init_expert_location not in ("", TRIVIAL),
    }
    asked = [name for name, is_asked in spread.items() if is_asked]
    if asked and parallel.ep_size == 1:
        raise ConfigError(
            what=f"{asked[0]} is set, all experts are on every rank",
            why="ep_size is 1",
            fix="add --ep-size, or leave it out",
            param=asked[0],
        )
    if parallel.ep_dispatch_algorithm == "static" and parallel.moe_a2a_backend != "alltoall":
        raise ConfigError(
            what="ep_dispatch_algorithm is static, all ranks compute the same tokens",
            why=f"with --moe-a2a-backend {parallel.moe_a2a_backend} they must choose the same copy of an expert",
            fix="use --moe-a2a-backend alltoall, or leave it out",
            param="ep_dispatch_algorithm",
        )


def _speculative(config: Config) -> None:
    asked = config.speculative
    _in_range("speculative_num_draft_tokens", asked.speculative_num_draft_tokens, 2, MOST_DRAFT_TOKENS)
    _in_range("speculative_ngram_min_match_window_size", asked.speculative_ngram_min_match_window_size, 1, 64)
    low = asked.speculative_ngram_min_match_window_size
    _in_range("speculative_ngram_max_match_window_size", asked.speculative_ngram_max_match_window_size, low, 1024)
    _in_range("speculative_suffix_max_tree_depth", asked.speculative_suffix_max_tree_depth, 2, 1024)
    _in_range("speculative_suffix_max_spec_factor", asked.speculative_suffix_max_spec_factor, 0.1, 64)
    _in_range("speculative_suffix_min_token_prob", asked.speculative_suffix_min_token_prob, 0, 1)
    _in_range("speculative_ngram_capacity", asked.speculative_ngram_capacity, 0, 2**31)
    _in_range(
        "speculative_ngram_external_corpus_max_tokens", asked.speculative_ngram_external_corpus_max_tokens, 0, 2**31
    )
    _in_range("speculative_eagle_topk", asked.speculative_eagle_topk, 1, 32)
    _in_range("speculative_num_steps", asked.speculative_num_steps, 1, MOST_DRAFT_TOKENS - 1)
    _in_range("speculative_draft_window_size", asked.speculative_draft_window_size, 0, 2**31)
    if asked.speculative_draft_window_size and asked.speculative_algorithm not in WINDOWED:
        raise ConfigError(
            what=f"--speculative-draft-window-size with --speculative-algorithm {asked.speculative_algorithm}",
            why="it has no attention of its own that could see less",
            fix=f"leave it out, or choose one of {', '.join(sorted(WINDOWED))}",
            param="speculative_draft_window_size",
        )
    if asked.speculative_draft_kv_cache_dtype != "auto" and asked.speculative_algorithm not in KEEPS_KV:
        raise ConfigError(
            what=f"--speculative-draft-kv-cache-dtype with --speculative-algorithm {asked.speculative_algorithm}",
            why="what drafts has no layers that keep KV",
            fix=f"leave it out, or choose one of {', '.join(sorted(KEEPS_KV))}",
            param="speculative_draft_kv_cache_dtype",
        )
    if asked.speculative_token_map and asked.speculative_algorithm not in TREES:
        raise ConfigError(
            what=f"--speculative-token-map with --speculative-algorithm {asked.speculative_algorithm}",
            why="it has no head that shares the model's output head",
            fix=f"leave it out, or choose one of {', '.join(sorted(TREES))}",
            param="speculative_token_map",
        )
    if asked.speculative_token_map and config.parallel.tp_size > 1:
        raise ConfigError(
            what="--speculative-token-map and --tp-size can't both be had",
            why="each rank has a part of the output head",
            fix="leave one of them out",
            param="speculative_token_map",
        )
    _in_range("speculative_accept_threshold_single", asked.speculative_accept_threshold_single, 0.01, 1)
    _in_range("speculative_accept_threshold_acc", asked.speculative_accept_threshold_acc, 0.01, 1)
    _draft_model(config)
    _accept_rule(asked)
    if asked.speculative_algorithm == "none":
        return
    if config.model.is_embedding:
        raise ConfigError(
            what=f"--speculative-algorithm {asked.speculative_algorithm} and --is-embedding can't both be had",
            why="a pooling model generates no tokens",
            fix="leave one of them out",
            param="speculative_algorithm",
        )
    if config.device.deterministic:
        raise ConfigError(
            what=f"--speculative-algorithm {asked.speculative_algorithm} and --deterministic can't both be had",
            why="a step that verifies drafts adds numbers up in another order than one that does not",
            fix="leave one of them out",
            param="speculative_algorithm",
        )
    if config.parallel.pp_size > 1:
        raise ConfigError(
            what=f"--speculative-algorithm {asked.speculative_algorithm} and --pp-size can't both be had",
            why="what the last stage verifies is not known to the first when the next step begins",
            fix="use --tp-size, or leave one of them out",
            param="speculative_algorithm",
        )
    if config.log.tensor_dump_dir:
        raise ConfigError(
            what=f"--speculative-algorithm {asked.speculative_algorithm} and --tensor-dump-dir can't both be had",
            why="a dump has one entry a token, and drafts that are wrong would be among them",
            fix="leave one of them out: tokens are the same with and without drafts",
            param="tensor_dump_dir",
        )


def _accept_rule(asked: SpeculativeConfig) -> None:
    """Checks that the acceptance rules for drafts fit the algorithm, and do not contradict each other."""
    judged = asked.speculative_use_rejection_sampling or asked.speculative_use_block_verification
    flag = "block-verification" if asked.speculative_use_block_verification else "rejection-sampling"
    loose = min(asked.speculative_accept_threshold_single, asked.speculative_accept_threshold_acc) < 1
    name = f"speculative_use_{flag.replace('-', '_')}"
    if judged and asked.speculative_algorithm not in ON_DEVICE:
        raise ConfigError(
            what=f"--speculative-use-{flag} with --speculative-algorithm {asked.speculative_algorithm}",
            why="only drafts that were drawn have probabilities; for others the usual rule does the same",
            fix=f"leave it out, or choose one of {', '.join(sorted(ON_DEVICE))}",
            param=name,
        )
    if judged and asked.speculative_eagle_topk not in (AUTO, 1):
        raise ConfigError(
            what=f"--speculative-use-{flag} with --speculative-eagle-topk {asked.speculative_eagle_topk}",
            why="the nodes of a tree are the likeliest ones, and are not drawn",
            fix="use --speculative-eagle-topk 1",
            param=name,
        )
    if judged and loose:
        raise ConfigError(
            what=f"--speculative-use-{flag} and --speculative-accept-threshold-* can't both be had",
            why="the one is exact, the other is not",
            fix="leave one of them out",
            param=name,
        )
    if loose and asked.speculative_algorithm == "none":
        raise ConfigError(
            what="--speculative-accept-threshold-* without --speculative-algorithm",
            why="there are no drafts to accept",
            fix="choose an algorithm, or leave it out",
            param="speculative_accept_threshold_single",
        )


def _draft_model(config: Config) -> None:
    """Checks that a draft model is given if, and only if, the algorithm needs one."""
    asked = config.speculative
    method, path = asked.speculative_algorithm, asked.speculative_draft_model_path
    if method in ON_DEVICE:
        draft_numbers(asked)
        if not path and method != "NEXTN":
            raise ConfigError(
                what=f"--speculative-algorithm {method} without --speculative-draft-model-path",
                why="its drafts come from a checkpoint of its own",
                fix="name one that was made for this model, or choose NGRAM, which needs none",
                param="speculative_draft_model_path",
            )
    elif path:
        raise ConfigError(
            what=f"--speculative-draft-model-path with --speculative-algorithm {method}",
            why="nothing would load it",
            fix=f"choose one of {', '.join(sorted(ON_DEVICE))}, or leave the path out",
            param="speculative_draft_model_path",
        )
    else:
        given = {
            "speculative_num_steps": asked.speculative_num_steps,
            "speculative_eagle_topk": asked.speculative_eagle_topk,
        }
        for name, value in given.items():
            if value not in (AUTO, 1):
                raise ConfigError(
                    what=f"--{name.replace('_', '-')} with --speculative-algorithm {method}",
                    why="nothing drafts step by step",
                    fix="use --speculative-num-draft-tokens",
                    param=name,
                )


def _stages(config: Config) -> None:
    """Refuses settings that do not work with pipeline parallelism."""
    for asked, what in (
        (config.speculative.speculative_algorithm != "none", "speculative decoding"),
        (bool(config.log.tensor_dump_dir), "dumping tensors"),
        (config.model.first_layer_table == "on", "the first layer's table"),
        (config.model.is_embedding, "pooling"),
    ):
        if asked:
            raise ConfigError(
                what=f"{what} does not work with {config.parallel.pp_size} stages",
                why="it needs all layers in one process",
                fix="use --tp-size instead of --pp-size, or leave it out",
                param="pp_size",
            )


def _spread_tokens(config: Config) -> None:
    """Refuses settings that do not work if ranks hold different tokens."""
    parallel, drafts = config.parallel, config.speculative.speculative_algorithm
    replicas, sharers = parallel.attn_dp_size, parallel.attn_cp_size
    having = f"--attn-dp-size {replicas}" if replicas > 1 else f"--attn-cp-size {sharers}"
    for asked, what, why in (
        (parallel.pp_size > 1, "--pp-size", "stages would have to agree on the tokens of each step, too"),
        (parallel.nnodes > 1 and replicas > 1, "--nnodes", "requests reach schedulers on the first machine only"),
        (bool(config.log.tensor_dump_dir), "--tensor-dump-dir", "rank 0 sees a part of the tokens only"),
        (config.model.is_embedding, "--is-embedding", "models that pool see all tokens of a text"),
        (drafts in ON_DEVICE, f"--speculative-algorithm {drafts}", "drafts would be made at different times"),
    ):
        if asked:
            raise ConfigError(
                what=f"{what} and {having} can't both be had",
                why=why,
                fix="leave one of them out",
                param="attn_dp_size" if replicas > 1 else "attn_cp_size",
            )
    if parallel.moe_a2a_backend != "none" and parallel.ep_size % (replicas * sharers):
        raise ConfigError(
            what=f"tokens of {replicas * sharers} groups can't be dispatched to {parallel.ep_size} groups of experts",
            why="ranks that split an expert would hold different tokens",
            fix=f"choose an --ep-size that is a multiple of {replicas * sharers}, or --moe-a2a-backend none",
            param="ep_size",
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
