"""What DeepSpeed's JSON may hold, as of 0.19.8, and which of it distaccum cannot let stand. Tables, no torch."""

from __future__ import annotations

from typing import Any


def _of(kind: type, names: str, section: str = "") -> dict[str, type]:
    return {f"{section}{name}": kind for name in names.split()}


# By dotted path; a dict is a section, object is not looked into.
KINDS: dict[str, type] = {
    **_of(
        int,
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print vocabulary_size"
        " sequence_parallel_size data_parallel_size",
    ),
    **_of(float, "gradient_clipping gradient_predivide_factor"),
    **_of(str, "communication_data_type seq_parallel_communication_data_type gradient_allreduce_op log_level"),
    **_of(
        bool,
        "managed_gradient_accumulation dump_state disable_python_gc disable_allgather prescale_gradients"
        " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown"
        " use_data_before_expert_parallelism dataloader_drop_last",
    ),
    **_of(
        dict,
        "zero_optimization fp16 bf16 bfloat16 data_types torch_autocast optimizer scheduler activation_checkpointing"
        " comms_logger flops_profiler autotuning hybrid_engine pipeline data_efficiency checkpoint aio datastates_ckpt"
        " weight_quantization compile timers tensor_parallel expert_parallel tensorboard wandb csv_monitor comet",
    ),
    **_of(bool, "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads", "fp16."),
    **_of(int, "initial_scale_power loss_scale_window hysteresis min_loss_scale", "fp16."),
    **_of(float, "loss_scale", "fp16."),
    **_of(
        bool,
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
        "bf16.",
    ),
    **_of(str, "grad_accum_dtype param_dtype buffer_dtype", "data_types."),
    **_of(object, "keep_in_fp32_modules", "data_types."),
    **_of(
        int,
        "stage reduce_bucket_size allgather_bucket_size sub_group_size prefetch_bucket_size"
        " stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold"
        " model_persistence_threshold stage3_model_persistence_threshold max_live_parameters"
        " stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance module_granularity_threshold"
        " stage3_module_granularity_threshold zero_hpz_partition_size",
        "zero_optimization.",
    ),
    **_of(
        bool,
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm"
        " compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload cpu_offload_param"
        " cpu_offload_use_pin_memory gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save"
        " stage3_gather_fp16_weights_on_model_save use_all_reduce_for_fetch_params"
        " stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential"
        " ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_quantized_weights"
        " zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear"
        " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks"
        " save_muon_momentum_buffer_in_memory",
        "zero_optimization.",
    ),
    **_of(dict, "offload_optimizer offload_param zenflow leaf_module", "zero_optimization."),
    **_of(str, "device", "zero_optimization.offload_optimizer."),
    **_of(int, "buffer_count", "zero_optimization.offload_optimizer."),
    **_of(float, "ratio cpuadam_cores_perc", "zero_optimization.offload_optimizer."),
    **_of(
        bool, "pin_memory pipeline_read pipeline_write fast_init super_offload", "zero_optimization.offload_optimizer."
    ),
    **_of(object, "nvme_path", "zero_optimization.offload_optimizer."),
    **_of(str, "device", "zero_optimization.offload_param."),
    **_of(int, "buffer_count buffer_size max_in_cpu", "zero_optimization.offload_param."),
    **_of(bool, "pin_memory", "zero_optimization.offload_param."),
    **_of(object, "nvme_path", "zero_optimization.offload_param."),
}
# The sections (and the top level, "") listed completely above: what else is in them is a spelling mistake. At the top
# level DeepSpeed itself ignores it in silence.
CLOSED = (
    "",
    "fp16",
    "bf16",
    "data_types",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)

_OWN_OPTIMIZER = "optim=... owns it (from_deepspeed_json translates a file)"
_OWN_SCHEDULE = "schedule=... owns it (from_deepspeed_json translates a file)"
_REMOVED = "DeepSpeed has removed it, and refuses or ignores it"

# Sections that must not be there at all, with the reason.
REFUSED: dict[str, str] = {
    "optimizer": _OWN_OPTIMIZER,
    "scheduler": _OWN_SCHEDULE,
    "amp": "Apex is not used, precision=... chooses the format",
    "elasticity": "it changes the batch, which batch.global_size states for any number of ranks",
    "curriculum_learning": "it changes the data of a batch, which distaccum plans",
    "progressive_layer_drop": "it changes what the gradient is of",
    "sparse_gradients": _REMOVED,
    "pipeline": "every rank holds a replica or a shard of the whole model, none a stage of it",
    "nebula": _REMOVED,
    "compression_training": _REMOVED,
    "quantize_training": _REMOVED,
    "eigenvalue": _REMOVED,
    "sparse_attention": _REMOVED,
    "graph_harvesting": _REMOVED,
    "zero_optimization.zenflow": "it applies gradients late, each to other weights than they were taken at",
    "zero_optimization.mics_shard_size": _REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.zeropp_loco_param": _REMOVED,
}

_ONE_NORMALISER = "distaccum divides the loss once, by its count"
_MASTERS = "parameters and accumulated gradients are fp32"
_REPLICAS = "every rank computes other samples"

# Settings that may be left out, or else must have this value, with the reason.
HELD: dict[str, tuple[Any, str]] = {
    "torch_autocast.enabled": (
        False,
        "in 0.19.8 its fp16 at stages 1 and 2 clips by the scaled norm and never backs off, so set precision=...",
    ),
    "prescale_gradients": (False, _ONE_NORMALISER),
    "gradient_predivide_factor": (1.0, _ONE_NORMALISER),
    "gradient_allreduce_op": ("mean", _ONE_NORMALISER),
    "sequence_parallel_size": (1, _REPLICAS),
    "tensor_parallel.autotp_size": (0, _REPLICAS),
    "expert_parallel.enabled": (False, _REPLICAS),
    "data_efficiency.enabled": (False, "it changes the data of a batch, which distaccum plans"),
    "autotuning.enabled": (False, "it changes the batch, which batch.global_size states"),
    "hybrid_engine.enabled": (False, "it is another engine, for generation in between"),
    "compile.deepcompile": (False, "it reduces gradients on its own, not once a window"),
    "fp16.fp16_master_weights_and_grads": (False, _MASTERS),
    "bf16.bf16_master_weights_and_grads": (False, _MASTERS),
    "bf16.bf16_optimizer_states": (False, _MASTERS),
    "bf16.check_grad_overflow": (True, "a gradient that is not finite must not be applied"),
    "zero_optimization.compute_grad_norm": (True, "every update reports its norm"),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed has removed it"),
    "zero_optimization.zero_quantized_gradients": (False, "quantised gradients are not the batch's"),
    "zero_optimization.zero_quantized_weights": (False, "quantised weights give another gradient"),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, "quantised weights give another gradient"),
}
