"""Hints for unknown settings: names that other libraries or earlier versions use, and what to give here in their place.

Has names and texts only. Standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SettingHint:
    """Settings of other libraries with one purpose.

    Attributes:
        names: as spelled there.
        libraries: the libraries, in the genitive.
        instead: what to do here; an imperative.
    """

    names: tuple[str, ...]
    libraries: str
    instead: str


_SHARDED = "leave it out: parameters, gradients and optimizer states are always divided over all ranks"
_PLANNED = "leave it out: the plan decides what is moved when, from a traced iteration"

SETTING_HINTS = (
    SettingHint(
        ("offload_optimizer_device", "optimizer_offload", "offload_optim_frac"),
        "DeepSpeed's and Accelerate's",
        "give offload_optimizer='host' for fp32 parameters and moments in RAM, or offload_optimizer='disk' and a "
        "disk_path; 'auto' keeps "
        "on the device what fits",
    ),
    SettingHint(
        ("offload_params", "offload_params_device", "offload_param", "offload_param_device"),
        "DeepSpeed's and Accelerate's",
        "give offload_parameters='host', or offload_parameters='disk' and a disk_path; 'auto' keeps on the device what fits",
    ),
    SettingHint(
        ("cpu_offload", "fsdp_offload_params", "offload_to_cpu", "offload_policy", "remote_device", "placement_policy"),
        "FSDP's and Accelerate's",
        "give offload_parameters='host' and offload_optimizer='host', or leave both at 'auto': what the device "
        "cannot hold goes to RAM",
    ),
    SettingHint(
        ("nvme_path", "offload_folder", "offload_dir", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
        "DeepSpeed's and Accelerate's",
        "give disk_path='/my/disk', and offload_optimizer='disk' to keep fp32 parameters and moments there",
    ),
    SettingHint(
        ("load_in_4bit", "load_in_8bit", "quantization_config", "bnb_4bit_quant_type", "quantize"),
        "Transformers' and bitsandbytes'",
        "give frozen_dtype='nf4' or 'int8' for frozen weights in 4 or 8 bits, and load the model in full precision",
    ),
    SettingHint(
        ("stage", "zero_stage", "zero_optimization", "zero3_init_flag"), "DeepSpeed's and Accelerate's", _SHARDED
    ),
    SettingHint(
        (
            *("sharding_strategy", "fsdp_sharding_strategy", "reshard_after_forward", "data_parallel_size"),
            *("device_mesh", "use_orig_params", "sync_module_states", "fsdp_version"),
        ),
        "FSDP's and Accelerate's",
        _SHARDED,
    ),
    SettingHint(
        (
            *("auto_wrap_policy", "fsdp_auto_wrap_policy", "wrap_policy", "ignored_modules"),
            *("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap", "no_split_module_classes"),
        ),
        "FSDP's and Accelerate's",
        "give units=['Block'] with the class names of what is fetched together; 'auto' takes the elements of ModuleList and "
        "Sequential",
    ),
    SettingHint(
        (
            *("activation_checkpointing", "activation_checkpointing_policy", "fsdp_activation_checkpointing"),
            *("gradient_checkpointing", "use_gradient_checkpointing", "checkpoint_activations"),
        ),
        "FSDP's and Accelerate's",
        "give recompute='all', or 'every 2nd'",
    ),
    SettingHint(
        ("cpu_checkpointing", "partition_activations", "activation_offload"),
        "DeepSpeed's",
        "give offload_activations='host'",
    ),
    SettingHint(
        ("mixed_precision", "fp16", "bf16", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale"),
        "FSDP's and DeepSpeed's",
        "give the Trainer precision='bf16-mixed' or '16-mixed'",
    ),
    SettingHint(
        ("max_memory", "device_map"),
        "Accelerate's",
        "give device_memory='20GiB' and host_memory='64GiB', and offload_parameters for the tier of the parameters",
    ),
    SettingHint(
        ("pin_memory", "force_pin_memory"),
        "DeepSpeed's",
        "leave it out: pages in RAM are page-locked wherever there is a GPU",
    ),
    SettingHint(
        ("max_in_cpu", "params_buffer_size", "params_buffer_count", "optimizer_buffer_count", "sub_group_size"),
        "DeepSpeed's",
        "give host_memory='64GiB' for what pages may take of RAM, and tuning=Tuning(staging_memory='1GiB') for "
        "those between disk and update",
    ),
    SettingHint(
        (
            *("overlap_comm", "backward_prefetch", "forward_prefetch", "limit_all_gathers", "overlap_events"),
            *("allgather_bucket_size", "reduce_bucket_size", "bucket_cap_mb", "contiguous_gradients"),
            *("allgather_partitions", "reduce_scatter", "block_size", "queue_depth", "thread_count", "single_submit"),
        ),
        "DeepSpeed's and FSDP's",
        _PLANNED,
    ),
    SettingHint(
        ("save_distributed_checkpoint", "fsdp_state_dict_type", "zero3_save_16bit_model", "load_full_weights"),
        "FSDP's and DeepSpeed's",
        "give checkpoints=Checkpoints(state_dict_type='full') for one file, or 'sharded' for a folder that all "
        "ranks write; `lightning-ptm export` "
        "writes 16-bit weights",
    ),
    SettingHint(
        ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "ddp_comm_hook", "ddp_comm_state"),
        "DDP's",
        "leave it out: ranks may use any of their parameters, also different ones",
    ),
    SettingHint(
        ("gradient_clipping", "gradient_clip_val", "max_grad_norm"),
        "DeepSpeed's",
        "give the Trainer gradient_clip_val",
    ),
    SettingHint(
        ("gradient_accumulation_steps", "accumulate_grad_batches"),
        "DeepSpeed's and Accelerate's",
        "give the Trainer accumulate_grad_batches",
    ),
    SettingHint(
        ("accumulate", "breadth_first_accumulation", "vertical_scheduling"),
        "GreedySnake's and breadth-first pipelines'",
        "increase the batch size by the number of batches, and give slices=8 for as many slices: a unit is fetched once for "
        "all of them; separate batches of the loader are never computed together, since each of Lightning's hooks and logged "
        "values belongs to one batch",
    ),
    SettingHint(
        ("autotp_size", "tp_size", "tensor_model_parallel_size"),
        "DeepSpeed's and Transformers'",
        "give tensor_parallel_size",
    ),
    SettingHint(("auto_parallel", "auto_tp", "autotuning"), "DeepSpeed's", "give parallel='auto'"),
    SettingHint(("cp_size",), "Megatron's", "give context_parallel_size"),
    SettingHint(
        ("pp_size", "pipeline_model_parallel_size"), "Megatron's", "give pipeline_parallel_size, and micro_batches"
    ),
    SettingHint(
        ("num_microbatches", "pipeline_parallel_microbatch_size"), "Megatron's and torchtitan's", "give micro_batches"
    ),
    SettingHint(("partition_method",), "DeepSpeed's", "give pipeline_blocks; 'auto' divides by parameters"),
    SettingHint(
        ("ep_size", "expert_model_parallel_size", "moe_expert_parallel_size"),
        "DeepSpeed's",
        "give expert_parallel_size",
    ),
    SettingHint(
        ("config", "ds_config", "deepspeed_config_file", "hf_ds_config", "deepspeed_plugin", "fsdp_plugin"),
        "DeepSpeed's and Accelerate's",
        "give what is in it as settings; help(lightning_ptm.AngelPTMStrategy) lists them",
    ),
    SettingHint(
        ("process_group_backend", "start_method"),
        "DDP's",
        "leave it out: ranks communicate through NCCL on GPUs and gloo on CPUs, and each rank is a process",
    ),
)

EARLIER = {
    "parameter_home": "offload_parameters",
    "master_home": "offload_optimizer",
    "state_dtype": "optimizer_state_dtype",
    "activations": "offload_activations='host' (or 'none', in place of 'keep')",
    "max_staleness": "lock_free=LockFree(max_staleness=...)",
    "staleness_warmup": "lock_free=LockFree(warmup_steps=...)",
    "forecast": "lock_free=LockFree(predict_weights=...)",
    "weights_map": "weights=Weights(path=..., key_mapping=...)",
    "weights_new": "weights=Weights(path=..., allow_missing=...)",
    "weights_strict": "weights=Weights(path=..., strict=...)",
    "state_dict_type": "checkpoints=Checkpoints(state_dict_type=...)",
    "async_save": "checkpoints=Checkpoints(async_save=...)",
    "failed_save": "checkpoints=Checkpoints(on_failure='stop') (or 'warn', in place of 'go_on')",
    "resume": "checkpoints=Checkpoints(resume=...)",
    "tensor_parallel_plan": "tensor_parallel=TensorParallel(plan=...)",
    "sequence_parallel": "tensor_parallel=TensorParallel(sequence_parallel=...)",
    "half_products": "tuning=Tuning(matmul_precision=...)",
    "matmul_precision": "tuning=Tuning(matmul_precision=...)",
    "staging_memory": "tuning=Tuning(staging_memory=...)",
    "freed_memory": "tuning=Tuning(freed_memory=...)",
    "reduce_gradients": "tuning=Tuning(reduce_gradients=...)",
    "restore_weights": "tuning=Tuning(restore_weights=...)",
    "poison": "debug=Debug(poison=...)",
}
"""Fields of nested settings, and names of settings before 0.1.0: what to give instead."""


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """Returns what to do in place of a setting that does not exist; empty if there is no similar one.

    Args:
        known: names of the existing settings.
    """
    if name in EARLIER and name not in known:
        return f"give {EARLIER[name]}"
    for habit in SETTING_HINTS:
        if name in habit.names and name not in known:
            return f"that is {habit.libraries}: {habit.instead}"
    near = difflib.get_close_matches(name, [*known, *EARLIER], n=1)
    if near and near[0] in EARLIER and near[0] not in known:
        return f"did you mean {near[0]!r}? give {EARLIER[near[0]]}"
    return f"did you mean {near[0]!r}?" if near else ""
