"""SGLang's own server options: which ones a topology may set, which pdctl sets or refuses.

The names are those of `sglang.launch_server` in 0.5.21. What is neither named here as an option
to pass on nor as one of pdctl's is refused: its server has options that change what a slot
of the KV cache holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdctl.engines.engine_config import Flags, check_config, option_words
from pdctl.topology.diagnostics import Diagnostic

SWITCHES = frozenset(
    """
    abort_on_priority_when_disabled allow_auto_truncate constrained_json_disable_any_whitespace
    debug_cuda_graph disable_chunked_prefix_cache disable_cuda_graph disable_cuda_graph_padding
    disable_custom_all_reduce disable_decode_cuda_graph disable_flashinfer_autotune
    disable_outlines_disk_cache disable_overlap_schedule disable_prefill_cuda_graph
    disable_priority_preemption disable_radix_cache disable_tokenizer_batch_decode
    disaggregation_decode_enable_radix_cache enable_cache_report enable_cudagraph_gc
    enable_custom_logit_processor enable_deterministic_inference
    enable_dynamic_batch_tokenizer enable_forward_pass_metrics enable_fp32_lm_head
    enable_fused_qk_norm_rope enable_layerwise_nvtx_marker enable_metrics
    enable_metrics_for_all_schedulers enable_mfu_metrics enable_mixed_chunk enable_p2p_check
    enable_prefill_delayer enable_priority_scheduling enable_profile_cuda_graph
    enable_request_time_stats_logging enable_strict_thinking enable_tf32_matmul
    enable_tokenizer_batch_encode enable_torch_compile enable_torch_compile_debug_mode
    enable_trace export_metrics_to_file incremental_streaming_output log_requests
    schedule_low_priority_values_first show_time_cost skip_server_warmup sleep_on_idle
    stream_response_default_include_usage triton_attention_reduce_in_fp32
    weight_loader_disable_mmap weight_loader_drop_cache_after_load
    weight_loader_prefetch_checkpoints
    """.split()
)
"""Options without a value; they can only be switched on."""

VALUES = frozenset(
    """
    attention_backend batch_notify_size bf16_gemm_backend bucket_e2e_request_latency
    bucket_inter_token_latency bucket_time_to_first_token chunked_prefill_size completion_template
    constrained_json_max_whitespace_cnt constrained_json_whitespace_pattern crash_dump_folder
    cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode
    cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_max_seq_len_prefill decode_attention_backend decode_log_interval
    default_chat_template_kwargs default_priority_value device disaggregation_decode_extra_slots
    disaggregation_decode_polling_interval disaggregation_decode_retraction_backup dist_timeout
    export_metrics_to_file_dir extra_metric_labels flashinfer_autotune_skip_ops
    gc_threshold gc_warning_threshold_secs generation_tokens_buckets grammar_backend
    log_level log_level_http log_requests_format log_requests_level log_requests_target
    max_prefill_tokens max_queued_requests max_running_requests max_total_tokens
    mem_fraction_static min_free_slots_delay num_continuous_decode_steps
    num_reserved_decode_tokens otlp_service_name otlp_traces_endpoint
    preferred_sampling_params prefill_attention_backend prefill_decode_interval
    prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms
    prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
    prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
    prefill_max_requests priority_scheduling_preemption_threshold prompt_tokens_buckets
    radix_eviction_policy radix_eviction_policy_config random_seed reasoning_parser
    retraction_policy sampling_backend sampling_defaults schedule_conservativeness
    schedule_policy scheduler_recv_interval soft_watchdog_timeout stream_interval
    tokenizer_metrics_allowed_custom_labels tokenizer_metrics_custom_labels_header
    tool_call_parser torch_compile_max_bs trace_modules triton_attention_num_kv_splits
    triton_attention_split_tile_size uvicorn_access_log_exclude_prefixes warmups
    watchdog_timeout weight_loader_prefetch_num_threads weight_version
    """.split()
)
"""Options that take a value; a table is passed as JSON, and each item of a list by itself."""

DEFAULTS: Mapping[str, Any] = {"enable_cache_report": True}
"""So that a decode replica's usage tells how many tokens it did not compute."""

_REFUSALS: Mapping[str, str] = {
    "set `model` on the replica": "model model_path load_format download_dir model_impl",
    "set `name` in [model]": "served_model_name",
    "set `context_length` in [model]": "context_length",
    "the engine listens on loopback; the router is what others reach": """
        host fastapi_root_path grpc_port grpc_mode smg_grpc_mode smg_http_sidecar_port
        grpc_http_sidecar_port api_key admin_api_key enable_http2 enable_ssl_refresh
        ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password sidecar sidecar_args use_ray
        kv_events_config load_publish_endpoint tool_server file_storage_path""",
    "set `http_port` on the replica": "port",
    "set `role` on the replica": "disaggregation_mode enable_pd_role_switch",
    "set `devices` on the replica": "base_gpu_id gpu_id_step",
    "set `dtype` in [model], or `compute_dtype` on the replica": "dtype",
    "pages are 64 tokens on every replica": "page_size",
    "write options into engine_config, one by one": "config",
    "pdctl moves the KV cache": """
        disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_offload_kvcache disaggregation_enable_kv_checksum
        disaggregation_decode_host_receive_threshold optimistic_prefill_attempts enable_pdmux
        enable_hierarchical_cache enable_lmcache enable_flexkv enable_hisparse hicache_size
        hicache_ratio hicache_storage_backend enable_memory_saver""",
    "a slot of the KV cache holds what the layout of pages says": """
        enable_page_major_kv_layout enable_unified_memory cpu_offload_gb
        prefill_only_disable_kv_cache radix_cache_backend""",
    "one replica runs on one device in this version": """
        tp_size tensor_parallel_size pp_size pipeline_parallel_size dp_size data_parallel_size
        ep_size expert_parallel_size ep dcp_size decode_context_parallel_size attn_cp_size
        attention_context_parallel_size moe_dp_size moe_data_parallel_size nnodes node_rank
        dist_init_addr nccl_init_addr nccl_port enable_dp_attention load_balance_method
        tokenizer_worker_num detokenizer_worker_num""",
    "a quantised model or KV cache is not served in this version": """
        quantization quantization_param_path kv_cache_dtype modelopt_quant quantize_and_serve""",
    "code from a checkpoint is never run": "trust_remote_code trust_request_chat_template",
    "the checkpoint's own tokenizer and template are part of the contract": """
        tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init chat_template
        hf_chat_template_name""",
    "the checkpoint is a directory, served as it is": """
        revision json_model_override_args model_config_parser is_embedding""",
    "adapters are not served in this version": """
        enable_lora lora_paths lora_target_modules max_lora_rank max_loras_per_batch""",
    "speculative decoding is not served in this version": """
        speculative_algorithm speculative_draft_model_path speculative_num_steps
        speculative_eagle_topk speculative_num_draft_tokens""",
    "text alone is served in this version": """
        enable_multimodal language_only encoder_only language_model_only""",
    "the engine would print it and end": "help",
}

OWNED: Mapping[str, str] = {
    name: instead for instead, names in _REFUSALS.items() for name in names.split()
}
"""Options that pdctl sets itself or refuses, and what to do instead."""


FLAGS = Flags(
    owned=OWNED,
    switches=SWITCHES,
    values=VALUES,
    unknown="is not an option of SGLang's server that pdctl passes on",
)


def check_options(config: Mapping[str, Any], replica: str) -> list[Diagnostic]:
    """Every entry of an `engine_config` that cannot be passed on, in the file's order."""
    return check_config(config, replica, FLAGS.problem)


def option_arguments(config: Mapping[str, Any]) -> list[str]:
    """The command-line form of an `engine_config`, defaults included, sorted by name. A switch
    that is false is left away: SGLang has no other way to say it."""
    return option_words(config, DEFAULTS, _words)


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}"] if value else []
    if isinstance(value, dict):
        return [f"--{flag}", json.dumps(value, sort_keys=True)]
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", str(value)]
