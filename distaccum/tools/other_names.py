"""Settings under the names that other libraries give them: what a message says of ``learning_rate=0.1``."""

from __future__ import annotations

from distaccum.errors import ConfigError

# One line for each setting: ours, then its names in Hugging Face's Trainer and Accelerate, Lightning, DeepSpeed,
# nanoGPT, timm and hand-written loops. ``{}`` is the value that was given.
_NAMES = """
optim.lr={}: lr learning_rate max_lr base_lr
optim.optimizer.weight_decay={}: weight_decay wd
optim.clip_norm={}: clip_norm max_grad_norm gradient_clip_val gradient_clipping grad_clip clip_grad grad_norm
optim={}: optimizer opt
schedule={}: scheduler lr_scheduler lr_scheduler_type sched lr_schedule
schedule.warmup_steps={}: warmup_steps warmup_iters num_warmup_steps
schedule.warmup_ratio={}: warmup_ratio
batch.global_size={}: batch_size bs batchsize global_batch_size train_batch_size global_size
batch.micro_size={}: micro_batch_size per_device_train_batch_size per_device_batch_size micro_size \
train_micro_batch_size_per_gpu device_batch_size
batch.global_size, with batch.micro_size for what fits into memory: gradient_accumulation_steps \
accumulate_grad_batches grad_accum accumulation_steps gradient_accumulation
trainer.max_epochs={}: epochs num_epochs num_train_epochs max_epochs n_epochs
trainer.max_steps={}: steps max_steps num_steps max_iters train_steps iterations
trainer.max_time={}: max_time
trainer.eval_every={}: eval_steps eval_every eval_interval val_check_interval evaluation_strategy eval_strategy
trainer.log_every={}: logging_steps log_every log_interval log_every_n_steps
trainer.num_workers={}: num_workers workers dataloader_num_workers
checkpoint.every={}: save_steps save_every save_interval checkpoint_every
checkpoint.keep={}: save_total_limit save_top_k keep
checkpoint.best={}: metric_for_best_model monitor
checkpoint.best=eval_loss: load_best_model_at_end
checkpoint.mode=max|min: greater_is_better
resume={}: resume_from_checkpoint ckpt_path resume_from
hydra.run.dir={}: output_dir out_dir save_dir default_root_dir run_dir logging_dir log_dir output out
precision=bf16: bf16
precision=fp16: fp16 amp half use_amp
precision=tf32: tf32
precision={}: mixed_precision dtype torch_dtype
compile=model: torch_compile compile_model
engine.activation_checkpoint=blocks: gradient_checkpointing
engine={}: strategy backend distributed_backend
engine=deepspeed engine.json={}: deepspeed deepspeed_config
engine=fsdp2: fsdp
data={}: dataset dataset_name
data.path={}: data_path data_dir train_file
data.seq_len={}: seq_len block_size max_seq_len max_length max_seq_length
model=pretrained model.name={}: model_name_or_path model_name pretrained
model.lora.r={}, with model=pretrained: lora_r lora_rank
loss={}: criterion loss_fn
metrics={}: report_to logger log_with
metrics.wandb.project={}: project wandb_project
metrics.wandb.name={}: run_name wandb_name
torchrun in place of torch.distributed.launch, and leave this out: local_rank
seed={}: random_seed manual_seed
torchrun --nproc-per-node={} -m distaccum.train: devices gpus num_gpus n_gpus nproc world_size nproc_per_node \
num_processes nproc-per-node
""".strip()

_OURS = {
    name: ours for line in _NAMES.splitlines() for ours, _, names in (line.rpartition(": "),) for name in names.split()
}


def of_another_library(key: str, value: object) -> ConfigError | None:
    """The error that leads from another library's name of a setting, as ``learning_rate``, to ours.

    None where nobody calls a setting so.

    Args:
        key: as it was written, with the dashes of a flag.
        value: as it was written; None where there is none.
    """
    group, _, name = key.lstrip("-").rpartition(".")
    ours = _OURS.get(name) or _OURS.get(name.replace("-", "_").lower())
    if ours is None or not ours.startswith(group):  # optim.learning_rate, too
        return None
    return ConfigError(key, value, "no such setting", f"Write {ours.format('VALUE' if value in (None, '') else value)}")
