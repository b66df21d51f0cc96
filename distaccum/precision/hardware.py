"""What the hardware can do of a policy: the rest is refused or warned of by name, and nothing falls back silently."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from distaccum.errors import ConfigError, PrecisionWarning
from distaccum.precision.policy import PrecisionPolicy

_TENSOR_CORES = (7, 0)  # compute capability from which fp16 is faster than fp32


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a policy asks of a GPU: native arithmetic, not emulation."""

    name: str
    capability: tuple[int, int] | None
    bf16: bool
    tf32: bool

    def __str__(self) -> str:
        known = self.capability
        return self.name if known is None else f"{self.name} (compute capability {known[0]}.{known[1]})"


def gpu_of(device: torch.device) -> Gpu | None:
    """The facts of a GPU; None for a CPU. Only CUDA and ROCm number what theirs can do."""
    if device.type == "cpu":
        return None
    own = torch.get_device_module(device)
    with own.device(device):  # the two questions are answered for the current one
        return Gpu(
            name=own.get_device_name(device),
            capability=own.get_device_capability(device) if device.type == "cuda" else None,
            bf16=own.is_bf16_supported(including_emulation=False),
            tf32=own.is_tf32_supported(),
        )


def warn(policy: PrecisionPolicy, device: torch.device) -> None:
    """Warns where ``device`` can, and another policy would be faster; for one rank to say."""
    if text := slowness(policy, gpu_of(device)):
        warnings.warn(text, PrecisionWarning, stacklevel=2)


def configure(policy: PrecisionPolicy, device: torch.device) -> None:
    """Sets how a GPU multiplies fp32 tensors: in TF32 under ``tf32``, in fp32 under every other policy.

    And what 16-bit products are added up in, where cuBLAS splits one into parts (split-K): fp32, but for
    ``split_k_16bit``.

    Torch has this for the process as a whole, so the last call decides for all models in it, and torch's own defaults,
    which let convolutions run in TF32 and sums in 16 bits, are not what a policy says. A CPU's settings are left alone.
    """
    if device.type != "cuda":
        return
    tf32 = policy.name == "tf32"
    # The older names first: newer torch sets its own settings from them, while to read one after the other was set
    # alone is an error there.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = policy.split_k_16bit
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = policy.split_k_16bit
    for part in ("conv", "rnn"):  # from torch 2.9 on; switched off by the older name, these do as a wider setting says
        settings = getattr(torch.backends.cudnn, part, None)
        if settings is not None:
            settings.fp32_precision = "tf32" if tf32 else "ieee"


def check(policy: PrecisionPolicy, gpu: Gpu | None) -> None:
    """Raises ConfigError where the policy cannot be had; ``gpu`` is None on a CPU."""
    if policy.compute_dtype is torch.bfloat16 and gpu is not None and not gpu.bf16:
        problem, remedy = f"{gpu} has no native bf16 arithmetic", "Use precision=fp16, or fp32"
        raise ConfigError("precision", policy.name, problem, remedy)
    if policy.name == "tf32" and (gpu is None or not gpu.tf32):
        problem = "a CPU has no TF32 arithmetic" if gpu is None else f"{gpu} has no TF32 arithmetic"
        remedy = f"Use precision=fp32, or {'bf16' if gpu is None else 'fp16'}"
        raise ConfigError("precision", policy.name, problem, remedy)


def slowness(policy: PrecisionPolicy, gpu: Gpu | None) -> str | None:
    """What to warn of; ``gpu`` is None on a CPU."""
    if policy.name != "fp16":
        return None
    if gpu is None:
        return "precision=fp16: most CPUs have no fp16 arithmetic, and take about twice as long as in fp32. Use bf16"
    if gpu.capability is not None and gpu.capability < _TENSOR_CORES:
        return f"precision=fp16: {gpu} has no tensor cores, so fp16 saves memory and no time. Use fp32 for speed"
    return None
