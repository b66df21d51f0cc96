"""Precision policies: immutable, chosen by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from distaccum.config.precision import PrecisionConfig

_COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COMPUTE |= {"bf16-weights": torch.bfloat16, "fp8": torch.bfloat16}
_REDUCE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """The number formats of one run.

    Args:
        name: as in ``precision=NAME``.
        compute_dtype: what matrix products of the forward run in; losses are computed in fp32 always. TF32 is a way
            that GPUs multiply fp32 tensors: the tensors' own type is ``torch.float32`` there.
        parameter_dtype: of the weights that forwards compute with. What the optimizer steps, and the gradients that
            accumulate, are fp32 whatever it is.
        reduce_dtype: what gradients travel in between ranks.
        keep_fp32: globs of module names that autocast leaves alone; a ModuleList stands for what it holds.
        only: globs of the modules that autocast covers, where it covers only some.
        split_k_16bit: whether the parts of a GPU's 16-bit matrix product may be added up in 16 bits.
    """

    name: str
    compute_dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    keep_fp32: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    split_k_16bit: bool = False

    @classmethod
    def of(cls, config: PrecisionConfig) -> PrecisionPolicy:
        """The policy that ``conf/precision/`` describes."""
        return cls(
            name=config.name,
            compute_dtype=_COMPUTE[config.name],
            parameter_dtype=torch.bfloat16 if config.keeps_masters else torch.float32,
            reduce_dtype=_REDUCE[config.reduce_dtype],
            keep_fp32=tuple(config.keep_fp32),
            only=tuple(config.only),
            split_k_16bit=config.split_k_16bit,
        )

    @property
    def casts(self) -> bool:
        """Whether the forward computes in a 16-bit type anywhere."""
        return self.compute_dtype is not torch.float32

    @property
    def keeps_masters(self) -> bool:
        """Whether weights are roundings of fp32 masters, which the optimizer steps."""
        return self.parameter_dtype is not torch.float32

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16, whose range needs a loss scale."""
        return torch.float16 in (self.compute_dtype, self.reduce_dtype)

    @property
    def amplifies(self) -> float:
        """By how much a rounding's difference grows in the mean square: one in 16 crosses a step 16 times as large."""
        return 4.0 if self.name == "fp8" else 1.0

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context for a forward pass on ``device``.

        Where ``only`` some modules are covered, their hooks switch autocast on (see ``autocast.py``); the context is
        then one that has it off. On leaving it everything is as before, even if Ctrl-C kept a hook from its work.
        """
        if not self.casts:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=not self.only)


FP32 = PrecisionPolicy(name="fp32")
