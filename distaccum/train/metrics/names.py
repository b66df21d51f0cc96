"""The names of a window's record, or patterns of them; what an evaluation gives begins with ``eval_``."""

from __future__ import annotations

MEASURED = (
    "samples_per_s",
    "tokens_per_s",
    "step_time_s",
    "data_wait_s",
    "memory_bytes",
    "memory_reserved_bytes",
    "memory_retries",
    "tflops_per_rank",
    "mfu",
    "slowest_rank",
    "slowest_over_median",
)
"""What a clock or the machine says: two runs that train the same differ in it."""
OF_RECORDS = (
    "step",
    "window",
    "epoch",
    "loss",
    "loss_*",
    "grad_norm",
    "grad_norm_zscore",
    "lr",
    "loss_scale",
    "applied",
    "skipped",
    "nonfinite",
    "underflow_share",
    "samples",
    "tokens",
    *MEASURED,
    "recompiles",
    "ranks",
    "spikes",
    "rollbacks",
)
