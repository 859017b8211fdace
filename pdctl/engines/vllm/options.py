"""vLLM's own server options: which ones a topology may set, which pdctl sets or refuses.

The names are those of `vllm.entrypoints.openai.api_server` in 0.28.0, all 285 of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdctl.engines.engine_config import Flags, Problem, check_config, normalised, option_words
from pdctl.topology.diagnostics import Diagnostic

SWITCHES = frozenset(
    """
    aggregate_engine_logging allow_credentials async_scheduling cudagraph_metrics
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_log_stats disable_sliding_window disable_uvicorn_access_log enable_auto_tool_choice
    enable_chunked_prefill enable_cumem_allocator enable_fault_tolerance
    enable_flash_late_interaction enable_flashinfer_autotune enable_force_include_usage
    enable_layerwise_nvtx_tracing enable_log_deltas enable_log_outputs enable_log_requests
    enable_logging_iteration_details enable_mfu_metrics enable_offline_docs
    enable_per_request_metrics enable_prefix_caching enable_prompt_tokens_details
    enable_request_id_headers enable_server_load_tracking enable_tokenizer_info_endpoint
    enforce_eager exclude_tools_when_tool_choice_none fail_on_environ_validation
    jit_monitor_verbose kv_cache_metrics log_error_stack ray_workers_use_nsight
    return_tokens_as_token_ids scheduler_reserve_full_isl use_fp64_gumbel use_tqdm_on_load
    """.split()
)
"""Options that take true or false: `--x` or `--no-x`."""

ONLY_ON = frozenset({"aggregate_engine_logging", "disable_log_stats"})
"""Switches that have no `--no-` form."""

VALUES = frozenset(
    """
    additional_config allowed_headers allowed_methods allowed_origins attention_backend
    attention_config block_size collect_detailed_traces compilation_config
    cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cudagraph_capture_sizes
    default_chat_template_kwargs disable_access_log_for_endpoints distributed_timeout_seconds
    fault_tolerance_config fingerprint_mode fingerprint_value generation_config
    gpu_memory_utilization h11_max_header_count h11_max_incomplete_event_size ignore_patterns
    ir_op_priority jit_monitor_mode kernel_config kv_cache_memory_bytes kv_cache_metrics_sample
    kv_events_config linear_backend log_config_file logits_processors logprobs_mode
    long_prefill_token_threshold max_cudagraph_capture_size max_log_len max_logprobs
    max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers
    middleware model_loader_extra_config num_gpu_blocks_override offload_backend
    offload_group_size offload_num_in_group offload_params offload_prefetch_step
    optimization_level otlp_traces_endpoint override_generation_config performance_mode
    prefill_schedule_interval prefix_caching_hash_algo profiler_config pt_load_map_location
    reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers response_role
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduling_policy seed show_hidden_metrics_for_version shutdown_timeout stream_interval
    structured_outputs_config tool_call_parser tool_parser_plugin tool_server uvicorn_log_level
    watermark
    """.split()
)
"""Options that take a value; a table is passed as JSON."""

SEVERAL = frozenset(
    """
    collect_detailed_traces cpu_offload_params cudagraph_capture_sizes ignore_patterns
    logits_processors offload_params
    """.split()
)
"""Options that take several values after one another; any other list is passed as JSON."""

DEFAULTS: Mapping[str, Any] = {"enable_prompt_tokens_details": True}
"""So that a decode replica's usage tells how many tokens it did not compute."""

_REFUSALS: Mapping[str, str] = {
    "set `model` on the replica": "model model_impl load_format download_dir",
    "set `name` in [model]": "served_model_name",
    "set `context_length` in [model]": "max_model_len",
    "the engine listens on loopback; the router is what others reach": """
        host uds root_path grpc headless api_server_count api_key ssl_ca_certs ssl_cert_reqs
        ssl_certfile ssl_ciphers ssl_keyfile enable_ssl_refresh""",
    "set `http_port` on the replica": "port",
    "set `role` on the replica": "role",
    "set `devices` on the replica": "device_ids",
    "set `dtype` in [model], or `compute_dtype` on the replica": "dtype",
    "pages are 64 tokens on every replica; `block_size` is the engine's own": "page_size",
    "write options into engine_config, one by one": "config",
    "pdctl's connector moves the KV cache": """
        kv_transfer_config ec_transfer_config ec_manager_config kv_offloading_backend
        kv_offloading_size disable_hybrid_kv_cache_manager scheduler_cls worker_cls
        worker_extension_cls weight_transfer_config enable_sleep_mode""",
    "one replica runs on one device in this version": """
        tensor_parallel_size pipeline_parallel_size decode_context_parallel_size
        prefill_context_parallel_size data_parallel_address data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
        data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
        data_parallel_start_rank data_parallel_supervisor_port distributed_executor_backend
        dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s master_addr master_port nnodes node_rank numa_bind
        numa_bind_cpus numa_bind_nodes dcp_comm_backend dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size all2all_backend enable_dbo dbo_decode_token_threshold
        dbo_prefill_token_threshold ubatch_size disable_nccl_for_dp_synchronization""",
    "a quantised model or KV cache is not served in this version": """
        quantization quantization_config allow_deprecated_quantization kv_cache_dtype
        kv_cache_dtype_skip_layers""",
    "code from a checkpoint is never run": "trust_remote_code trust_request_chat_template",
    "the checkpoint's own tokenizer and template are part of the contract": """
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init tokens_only
        chat_template chat_template_content_format""",
    "the checkpoint is a directory, served as it is": """
        revision code_revision hf_config_path hf_overrides hf_token config_format
        model_class_overrides runner convert pooler_config""",
    "adapters are not served in this version": """
        enable_lora lora_dtype lora_modules lora_target_modules max_loras max_lora_rank
        max_cpu_loras fully_sharded_loras default_mm_loras specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora""",
    "speculative decoding is not served in this version": """
        speculative_config spec_method spec_model spec_tokens diffusion_config
        kv_sharing_fast_prefill""",
    "models with text alone are served in this version": """
        language_model_only limit_mm_per_prompt media_io_kwargs mm_device_do_normalize
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
        mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
        mm_processor_cache_type mm_processor_device mm_processor_kwargs
        mm_shm_cache_max_object_size_mb mm_tensor_ipc interleave_mm_strings skip_mm_profiling
        enable_mm_embeds enable_prompt_embeds allowed_local_media_path allowed_media_domains
        video_pruning_method video_pruning_rate io_processor_plugin
        cohere_format cohere_is_reasoning_model""",
    "models with full attention and dense layers are served in this version": """
        mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
        mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm
        enable_mamba_cache_stochastic_rounding use_replayssm replayssm_buffer_len
        prefix_match_unit gdn_prefill_backend kda_prefill_backend moe_backend
        enable_bf16x3_router_gemm enable_expert_parallel enable_ep_weight_filter
        enable_elastic_ep enable_eplb eplb_config expert_placement_strategy
        enable_return_routed_experts return_sampling_mask""",
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
    unknown="is not an option of vLLM's server",
    listing="see `vllm serve --help=all`",
)


def check_options(config: Mapping[str, Any], replica: str) -> list[Diagnostic]:
    """Every entry of an `engine_config` that cannot be passed on, in the file's order."""
    return check_config(config, replica, _problem)


def option_arguments(config: Mapping[str, Any]) -> list[str]:
    """The command-line form of an `engine_config`, defaults included, sorted by name."""
    return option_words(config, DEFAULTS, _words)


def _problem(name: str, value: Any) -> Problem | None:
    found = FLAGS.problem(name, value)
    if found is not None:
        return found
    if name in ONLY_ON and not value:
        return Problem("value", "can only be true", f"leave {name} away")
    if name == "block_size" and not (isinstance(value, int) and value > 0 and value % 16 == 0):
        return Problem("value", "must be a multiple of 16", None)
    return None


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list) and normalised(flag) in SEVERAL:
        return [f"--{flag}", *map(str, value)]
    if isinstance(value, dict | list):
        return [f"--{flag}", json.dumps(value, sort_keys=True)]
    return [f"--{flag}", str(value)]
