"""SGLang's flags that are refused here, by reason. `name` is a switch, `name=VALUE` takes a value and has that default.

A flag with its default value is accepted; `name=` has no default. As of SGLang 0.5.23, with names of some releases
before it.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Refusal(NamedTuple):
    """Why flags are refused, and what to do instead."""

    why: str
    fix: str
    flags: str


REFUSALS: Final = (
    Refusal(
        "prefill and decode run in one process here",
        "leave it out",
        """
        disaggregation_mode=null disaggregation_decode_allocation_policy=early disaggregation_transfer_backend=mooncake
        disaggregation_enable_kv_checksum disaggregation_bootstrap_port=8998 disaggregation_ib_device=
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup= num_reserved_decode_tokens=512 disaggregation_decode_extra_slots=
        disaggregation_decode_polling_interval=1 enable_pd_role_switch optimistic_prefill_attempts=0 enable_pdmux
        pdmux_config_path= sm_group_num=8 disaggregation_decode_host_receive_threshold=1.0
        """,
    ),
    Refusal(
        "media encoders run in the engine: they are not served separately",
        "leave it out",
        """
        encoder_only language_only language_model_only encoder_transfer_backend=auto encoder_urls=
        encoder_bootstrap_port=8997 encoder_register_urls= enable_adaptive_dispatch_to_encoder
        """,
    ),
    Refusal(
        "there is no such way of drafting here",
        "choose another --speculative-algorithm, or leave it out",
        """
        decoupled_spec_bind_endpoint= decoupled_spec_connect_endpoints= decoupled_spec_rank= decoupled_spec_role=null
        uno_lora_path= speculative_dflash_block_size= speculative_domino_candidate_pool_size=2048
        speculative_dspark_block_size= speculative_dspark_sps_table_path= speculative_dspark_confidence_sts_path=
        speculative_dspark_align_verify_tokens_to_graph_tier
        speculative_draft_attention_backend= speculative_dsa_topk_backend=sgl-kernel
        speculative_draft_sink_size= speculative_moe_runner_backend=
        speculative_moe_a2a_backend= speculative_enable_w4a4_mxfp4_megamoe
        enable_multi_layer_eagle
        """,
    ),
    Refusal(
        "n-gram drafts are one chain, as long as --speculative-num-draft-tokens says",
        "use --speculative-num-draft-tokens",
        """
        speculative_ngram_min_bfs_breadth=1
        speculative_ngram_max_bfs_breadth=1 speculative_ngram_match_type=BFS
        """,
    ),
    Refusal(
        "a step that verifies drafts is a decode step of several tokens, whatever else it has",
        "leave it out",
        "speculative_attention_mode=prefill",
    ),
    Refusal(
        "how many drafts pay is learned from the steps themselves",
        "use --speculative-adaptive or --no-speculative-adaptive",
        "speculative_adaptive_config=",
    ),
    Refusal(
        "corpora are added while the server runs",
        "send the file to /add_external_corpus",
        "speculative_ngram_external_corpus_path=",
    ),
    Refusal(
        "matches are found by an index over tokens, whose size --speculative-ngram-capacity bounds",
        "use --speculative-ngram-max-match-window-size and --speculative-ngram-capacity",
        "speculative_ngram_max_trie_depth=18 speculative_ngram_external_sam_budget=0 spec_trace_dir=",
    ),
    Refusal(
        "adapters (LoRA) are loaded at the start, with every tensor or not at all, and stay on the device",
        "leave it out, and give --lora-paths",
        """
        enable_lora_overlap_loading lora_target_modules= max_loaded_loras= lora_eviction_policy=lru lora_backend=csgmv
        max_lora_chunk_size=16 experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
        lora_drain_wait_threshold=0.0
        """,
    ),
    Refusal(
        "cached prefixes stay on the device: there are no further tiers yet",
        "leave it out",
        """
        enable_hierarchical_cache enable_hicache hicache_host_memory_mode=cache hicache_ratio= hicache_size=0
        hicache_host_memory_fraction=0.8 hicache_write_policy=write_through hicache_io_backend=kernel
        hicache_mem_layout=page_first hicache_storage_backend= hicache_storage_prefetch_policy=timeout
        hicache_storage_backend_extra_config= hicache_storage_prefetch_retry_poll_interval=8
        hicache_storage_prefetch_retry_max_attempts=8 enable_unified_cache_external_linker
        unified_cache_external_linker_backend=mooncake unified_cache_external_linker_config= enable_linker_mla_dedup
        enable_lmcache lmcache_config_file= enable_flexkv flexkv_config_file=
        """,
    ),
    Refusal(
        "there is one prefix tree with one layout of pages",
        "leave it out",
        """
        radix_eviction_policy_config= enable_page_major_kv_layout enable_unified_memory enable_session_radix_cache
        radix_cache_backend=
        """,
    ),
    Refusal(
        "media are prepared in one way, and computed on the engine's own device",
        "leave it out",
        """
        mm_attention_backend= enable_broadcast_mm_inputs_process
        mm_enable_dp_encoder mm_process_config= mm_io_worker_num=0
        trust_mm_content_hashes enable_mm_global_cache
        image_processor_backend=auto mm_global_cache_backend=mooncake disable_fast_image_processor mm_feature_transport=
        """,
    ),
    Refusal(
        "this way of spreading a model is not there yet",
        "use --tp-size to split its layers",
        """
        dcp_size=1 decode_context_parallel_size=1 pp_size=1 pipeline_parallel_size=1 pp_max_micro_batch_size=
        pp_async_batch_depth=0 dp_size=1 data_parallel_size=1 attn_dp_size=1 attention_data_parallel_size=1
        load_balance_method=auto attn_cp_size=1 attention_context_parallel_size=1 dwdp_size=1 dcp_comm_backend=
        dcp_replicate_q_proj enable_prefill_cp cp_strategy= enable_cp_decode_attn_tp enable_kv_cache_sharding
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all
        enable_attn_tp_input_scattered enable_dense_mlp_attn_tp enable_layernorm_sp disable_attn_tp_gather
        enable_dp_attention max_micro_batch_size=
        """,
    ),
    Refusal(
        "collectives are chosen from what the machine has",
        "leave it out",
        """
        enable_nccl_nvls enable_symm_mem enable_mscclpp enable_torch_symm_mem pre_warm_nccl
        boundary_reduction=auto enable_quant_communications enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend= enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_fused_moe_sum_all_reduce nccl_port= dist_timeout=
        gated_launch_port= enable_p2p_check enable_flashinfer_allreduce_fusion
        """,
    ),
    Refusal(
        "experts are not spread over devices this way yet",
        "leave it out",
        """
        enable_return_routed_experts moe_a2a_backend=none enable_w4a4_mxfp4_megamoe deepep_v2_mode=direct
        moe_runner_backend=auto flashinfer_mxfp4_moe_precision=default deepep_mode=auto fuseep_mode=2
        deepep_dispatcher_output_dtype=auto flashinfer_a2a_dispatch_type= ep_num_redundant_experts=0
        ep_dispatch_algorithm= init_expert_location=trivial enable_eplb eplb_algorithm=auto
        eplb_rebalance_num_iterations=1000 eplb_rebalance_layers_per_chunk=
        eplb_min_rebalancing_utilization_threshold=1.0 expert_distribution_recorder_mode=
        expert_distribution_recorder_buffer_size= expert_balancedness_report_mode=off deepep_config= elastic_ep_backend=
        enable_elastic_expert_backup mooncake_ib_device= enable_waterfill elastic_ep_join_mode=
        elastic_ep_scale_timeout=600 disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion enable_single_batch_overlap moe_dp_size=1 moe_data_parallel_size=1
        enable_shared_experts_attn_tp
        shared_experts_tp_size= enable_megamoe_for_layernorm_sp ep_size=1 expert_parallel_size=1 ep=1 moe_dense_tp_size=
        elastic_ep_join_rank_offset=0 elastic_ep_initial_size= max_ep_size=
        """,
    ),
    Refusal(
        "it was the name of what a number says now",
        "use --ep-size with as many groups as --tp-size, and --moe-a2a-backend to choose how tokens reach their experts",
        "enable_ep_moe enable_deepep_moe",
    ),
    Refusal(
        "a step is computed as a whole: halves that overlap need exchanges that don't wait, and GPUs to gain from it",
        "leave it out",
        """
        enable_two_batch_overlap tbo_token_distribution_threshold=0.48
        """,
    ),
    Refusal(
        "kernels are chosen by device and shape",
        "leave it out; --attention-backend and --no-custom-kernels are what can be chosen",
        """
        decode_attention_backend= enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel
        prefill_attention_backend= prefill_kv_cache_dequant_dtype=auto fp8_gemm_backend=auto fp4_gemm_backend=auto
        bf16_gemm_backend=auto disable_flashinfer_autotune flashinfer_autotune_skip_ops= triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits=8 triton_attention_split_tile_size= flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope enable_flashinfer_mla disable_flashinfer disable_flashinfer_sampling disable_mla
        enable_hip_attention enable_double_sparsity monokernel_backend=
        """,
    ),
    Refusal(
        "graphs are captured when a size is first used, for prefill and decode steps alike",
        "use --no-cuda-graph or --cuda-graph-max-tokens",
        """
        cuda_graph_config= cuda_graph_backend_prefill= cuda_graph_max_bs_prefill= cuda_graph_max_seq_len_prefill=
        cuda_graph_bs_decode= cuda_graph_bs_prefill= cuda_graph_prefill_max_context= context_bucket=
        disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph
        enable_cudagraph_gc debug_cuda_graph cuda_graph_bs=
        """,
    ),
    Refusal(
        "nothing goes through torch.compile: kernels are fused by hand, and steps are captured as graphs",
        "leave it out",
        """
        enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs=32
        """,
    ),
    Refusal(
        "recurrent states are kept in one way, in float32",
        "leave it out",
        """
        mamba_backend=triton mamba_ssm_dtype= mamba_max_states_per_path=-1 enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds=0 mamba_radix_cache_strategy=auto mamba_track_interval=256
        enable_int8_mamba_checkpoint int8_mamba_ckpt_size= linear_attn_backend=triton linear_attn_decode_backend=
        linear_attn_prefill_backend= linear_attn_verify_backend= enable_linear_replayssm linear_replayssm_cache_len=16
        enable_linear_replayssm_spec max_mamba_cache_size= mamba_full_memory_ratio=
        """,
    ),
    Refusal(
        "no model that has it is served yet",
        "leave it out",
        """
        enable_return_indexer_topk enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
        dsa_prefill_backend= dsv4_prefill_backend=auto dsa_triton_union=0 dsa_decode_backend= dsv4_attn_backend=auto
        dsa_paged_mqa_logits_backend=auto dsa_topk_backend=sgl-kernel enable_precise_embedding_interpolation
        enable_deepseek_v4_fp4_indexer enable_dsa_fused_indexer enable_scattered_sconv enable_hisparse hisparse_config=
        hierarchical_sparse_attention_extra_config= qsa_indexer_dtype=auto enable_dsa_cache_layer_split
        c128_page_size=16 swa_full_tokens_ratio= swa_prefix_tails= disable_hybrid_swa_memory
        """,
    ),
    Refusal(
        "weights stay on the device",
        "leave it out, or serve a smaller or quantised checkpoint",
        """
        enable_paged_experts paged_experts_num_resident= kt_weight_path= kt_method=AMXINT4 kt_cpuinfer=
        kt_threadpool_count=2 kt_num_gpu_experts= kt_max_deferred_experts_per_token= cpu_offload_gb=0
        offload_group_size=-1 offload_num_in_group=1 offload_prefetch_step=1 offload_mode=cpu ple_offload_embedding
        ple_offload_backend=pinned ple_offload_dir=
        """,
    ),
    Refusal(
        "diffusion language models are not served yet",
        "leave it out",
        """
        dllm_algorithm= dllm_algorithm_config= dllm_fdfo=True
        """,
    ),
    Refusal(
        "weights are loaded once, at the start",
        "leave it out",
        """
        custom_weight_loader= remote_instance_weight_loader_seed_instance_ip=
        remote_instance_weight_loader_seed_instance_service_port=
        remote_instance_weight_loader_send_weights_group_ports= remote_instance_weight_loader_backend=nccl
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port=6789
        modelexpress_config= checkpoint_engine_wait_weights_before_ready weight_cache_mode=off weight_cache_socket=
        weight_cache_timeout=1800
        """,
    ),
    Refusal(
        "weights are read from safetensors and GGUF files in one way",
        "leave it out",
        """
        model_loader_extra_config={} model_config_parser=auto startup_weight_load_mode=serial
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads=4
        weight_loader_drop_cache_after_load model_checksum= delete_ckpt_after_loading decrypted_config_file=
        decrypted_draft_config_file=
        """,
    ),
    Refusal(
        "weights are quantised by `--quantization` while they are loaded, or are read as the checkpoint has them",
        "use --quantization, or a quantised checkpoint",
        """
        modelopt_quant= modelopt_checkpoint_restore_path= modelopt_checkpoint_save_path=
        modelopt_export_path= quantize_and_serve rl_quant_profile= torchao_config=
        """,
    ),
    Refusal(
        "metrics have fixed names, labels and buckets",
        "relabel them in Prometheus; docs/operations.md lists them",
        """
        smg_http_sidecar_port= grpc_http_sidecar_port= enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval=15 tokenizer_metrics_custom_labels_header=x-custom-labels
        tokenizer_metrics_allowed_custom_labels= extra_metric_labels= bucket_time_to_first_token=
        bucket_inter_token_latency= bucket_e2e_request_latency= prompt_tokens_buckets= generation_tokens_buckets=
        kv_events_config= load_publish_endpoint= enable_forward_pass_metrics forward_pass_metrics_worker_id=
        forward_pass_metrics_ipc_name= export_metrics_to_file export_metrics_to_file_dir=
        """,
    ),
    Refusal(
        "requests are logged in one place, as --log-level and --log-format say",
        "leave it out",
        """
        log_level_http= log_requests_target= enable_request_time_stats_logging
        """,
    ),
    Refusal(
        "traces are sent by HTTP (port 4318 of most collectors)",
        "use --otlp-endpoint http://host:4318",
        """
        enable_trace trace_modules=request otlp_traces_endpoint=localhost:4317 otlp_service_name=
        """,
    ),
    Refusal(
        "it is looked into by other means",
        "see `bough debug --help` and `bough profile --help`",
        """
        enable_layerwise_nvtx_marker show_time_cost gc_warning_threshold_secs=0.0 kv_canary=none
        kv_canary_sweep_interval=0 debug_tensor_dump_layers= debug_tensor_dump_input_file= forward_hooks=
        msprobe_dump_config= kv_canary_real_data=
        """,
    ),
    Refusal(
        "the scheduler has no such knob: each step is planned from what was measured",
        "leave it out; --tpot-target-ms and --schedule-conservativeness are what can be chosen",
        """
        prefill_decode_interval= prefill_decode_interval_min_bs=0 enable_dynamic_chunking prefill_max_requests=
        prefill_only_disable_kv_cache disable_chunked_prefix_cache num_continuous_decode_steps=1
        scheduler_recv_interval=1 enable_prefill_delayer prefill_delayer_max_delay_passes=30
        prefill_delayer_token_usage_low_watermark= prefill_delayer_forward_passes_buckets=
        prefill_delayer_wait_seconds_buckets= prefill_delayer_queue_min_ratio= prefill_delayer_max_delay_ms=
        min_free_slots_delay=
        """,
    ),
    Refusal(
        "larger priorities are more urgent, and requests without one have 0",
        "send priorities with the requests",
        """
        default_priority_value= abort_on_priority_when_disabled schedule_low_priority_values_first
        """,
    ),
    Refusal(
        "the HTTP server has no such part",
        "leave it out",
        """
        enable_http_worker_reuseport smg_grpc_mode grpc_mode grpc_response_timeout_secs=300 sidecar=
        sidecar_args= warmups= enable_http2 http2_max_concurrent_streams=200
        http2_initial_connection_window_size=1048576 batch_notify_size=16
        """,
    ),
    Refusal(
        "SIGHUP has certificates read again",
        "send it when they have changed",
        """
        enable_ssl_refresh
        """,
    ),
    Refusal(
        "chat templates come from the model or the operator",
        "use --chat-template FILE",
        """
        trust_request_chat_template hf_chat_template_name=
        """,
    ),
    Refusal(
        "a request asks for it itself",
        "send return_token_ids or return_prompt_token_ids",
        """
        return_input_ids return_output_ids
        """,
    ),
    Refusal(
        "what is cached or allowed does not depend on reasoning sections",
        "leave it out",
        """
        strip_thinking_cache enable_strict_thinking
        """,
    ),
    Refusal(
        "the server runs no tools",
        "let the client run them",
        """
        tool_server=
        """,
    ),
    Refusal(
        "audio is not served yet",
        "leave it out",
        """
        asr_max_buffer_seconds=60 asr_max_concurrent_sessions=32
        """,
    ),
    Refusal(
        "no code from requests is run",
        "register it with --logit-processors name=module:attribute",
        """
        enable_custom_logit_processor
        """,
    ),
    Refusal(
        "answers are not marked",
        "leave it out",
        """
        enable_watermark watermark_config=
        """,
    ),
    Refusal(
        "what the model does inside is not reported",
        "leave it out; requests may ask for hidden states",
        """
        enable_return_aux_hidden_states return_aux_hidden_state_layer_ids= sampling_mask_max_tokens=4096
        """,
    ),
    Refusal(
        "processes use the devices that they see",
        "set CUDA_VISIBLE_DEVICES",
        """
        base_gpu_id=0 gpu_id_step=1 mlx_enable_sampling numa_node=
        """,
    ),
    Refusal(
        "the garbage collector is left alone",
        "leave it out",
        """
        gc_threshold=
        """,
    ),
    Refusal(
        "there is one watchdog",
        "use --watchdog-timeout-s",
        """
        soft_watchdog_timeout=
        """,
    ),
    Refusal(
        "memory is not handed back while the server runs",
        "leave it out",
        """
        enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
        """,
    ),
    Refusal(
        "white space in JSON is bounded by number",
        "use --json-max-whitespace",
        """
        constrained_json_whitespace_pattern=
        """,
    ),
    Refusal(
        "the youngest work is retracted first, under --priority-scheduling the least urgent",
        "leave it out",
        """
        retraction_policy=length
        """,
    ),
    Refusal(
        "one detokenizer serves all API workers, and tokenizing has one backend",
        "use --api-workers",
        """
        tokenizer_backend=huggingface detokenizer_worker_num=1 dynamic_batch_tokenizer_batch_size=32
        dynamic_batch_tokenizer_batch_timeout=0.002 disable_tokenizer_batch_decode
        """,
    ),
    Refusal(
        "numbers are not matched to a trainer's",
        "use --deterministic",
        """
        rl_on_policy_target=
        """,
    ),
    Refusal(
        "products are computed in the type of the weights",
        "use --dtype float32",
        """
        enable_fp32_lm_head enable_tf32_matmul
        """,
    ),
    Refusal(
        "it belongs to an older SGLang and has no counterpart",
        "leave it out",
        """
        disable_nan_detection enable_nan_detection disable_jump_forward disable_regex_jump_forward additional_ports=
        """,
    ),
)
