"""The floating-point operations of a sample and the most that a card makes, for what share a run makes of them: MFU.

Source: A. Chowdhery et al., "PaLM" (2022), appendix B: the operations that the model needs, forward and backward, not
those that are made again (of activation checkpointing by the engine, of fused attention), over what the cards could
make in the same time. For a transformer without frozen parts torch's counter finds just its 6N + 12 L H Q T a token.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from distaccum.accumulation.two_pass import of_micro_batch
from distaccum.data.batches import map_tensors, moved_object
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.random import RNGState
from distaccum.losses.base import AnyLoss, Loss
from distaccum.losses.normalize import as_loss_sums
from distaccum.train.components import TrainingComponents
from distaccum.train.metrics.meter import Utilization

# The most floating-point operations per second that a card makes, by its name and the format of the products.
#
# Sources: NVIDIA's data sheets of A100, H100, H200, HGX B200, L4, L40S and A10, and for the GeForce cards the white
# papers of the Ada and Ampere architectures (fp16 with fp32 sums). All without sparsity, with which many sheets state
# twice as much. Of a card that is not here, or slower than its name says, ``metrics.peak_tflops`` states it.

# In TFLOP/s: 16 bits, tf32, fp32 outside of tensor cores (0: not known). The first pattern that fits a name counts.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"\bB200\b", (2250.0, 1125.0, 0.0)),
    (r"\bH[12]00 NVL\b", (835.0, 417.5, 60.0)),
    (r"\bH100 PCIe\b", (756.0, 378.0, 51.0)),
    (r"\bH[12]00\b", (989.0, 494.5, 67.0)),
    (r"\bA100\b", (312.0, 156.0, 19.5)),
    (r"\bL40S\b", (362.0, 183.0, 91.6)),
    (r"\bL4\b", (121.0, 60.0, 30.3)),
    (r"\bA10\b", (125.0, 62.5, 31.2)),
    (r"\bRTX 4090$", (165.2, 82.6, 82.6)),
    (r"\bRTX 3090$", (71.0, 35.6, 35.6)),
)
_COLUMNS = {"bf16": 0, "bf16-weights": 0, "fp8": 0, "fp16": 0, "tf32": 1, "fp32": 2}


def peak_flops(card: str, precision: str) -> float | None:
    """Operations per second of one card, by ``torch.cuda.get_device_name`` and the precision policy's name.

    None where the table does not have it.
    """
    for pattern, peaks in _PEAKS:
        if re.search(pattern, card):
            return peaks[_COLUMNS[precision]] * 1e12 or None
    return None


_log = logging.getLogger(__name__)
_MOST = 8  # micro-batches that are counted, where they differ in shape
_META = torch.device("meta")


def build_utilization(components: TrainingComponents, world_size: int) -> Utilization | None:
    """What tells TFLOP/s and MFU; before an engine wraps the model. None where no card's peak is known or stated."""
    metrics, device = components.config.metrics, components.device
    stated = metrics.peak_tflops is not None or metrics.flops_per_sample is not None
    if device.type != "cuda" and not stated:
        return None
    peak = None if metrics.peak_tflops is None else 1e12 * metrics.peak_tflops
    if peak is None and device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), components.policy.name)
    flops = metrics.flops_per_sample or ModelFlops(components.model, components.loss, device).of_sample
    return Utilization(flops, peak=peak, ranks=world_size)


class ModelFlops:
    """Counts the operations of a window's micro-batches, on a copy of the model that has shapes and no numbers.

    Nothing is computed, no memory of a device is taken, and neither the model nor random numbers change. Where the copy
    cannot be made or run (a custom kernel, a forward that reads values), the log says so once.

    Args:
        model: not wrapped yet.
        loss: sums over a batch.
        device: of this rank.
    """

    def __init__(self, model: nn.Module, loss: AnyLoss, device: torch.device) -> None:
        self._device, loss = device, of_micro_batch(loss)
        self._copies: tuple[nn.Module, Loss] | None = None
        try:
            memo = _without_memory([*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else [loss])])
            self._copies = deepcopy((model, loss), memo)
            _drop_functions(self._copies[0])
        except Exception as error:  # whatever a model raises that cannot be copied
            _tell(error)

    def of_batch(self, batch: Any) -> float | None:
        """The operations of one micro-batch, forward and backward; None without a copy of the model."""
        return None if self._copies is None else count_flops(self._copies[0].train(), self._copies[1], batch)

    def of_sample(self, window: Window) -> float | None:
        """The operations of one sample, forward and backward, on average over some of this rank's micro-batches.

        None where they cannot be counted, or the rank has no samples in this window.
        """
        sizes = [len(ids) for ids in window.ids()]
        step = -(-len(sizes) // _MOST)
        chosen = list(zip(window.micro_batches, sizes, strict=False))[:: step or 1]
        samples = sum(size for _, size in chosen)
        if self._copies is None or not samples:
            return None
        model, loss = self._copies
        if not model.training:
            model.train()
        generators = RNGState.capture(self._device)
        known: dict[str, float] = {}
        total = 0.0
        try:
            for micro, _ in chosen:
                shapes = _shapes(micro)
                if shapes not in known:
                    known[shapes] = count_flops(model, loss, micro.batch)
                total += known[shapes]
        except Exception as error:  # whatever a model raises that has to read values
            _tell(error)
            return None
        finally:
            generators.restore()
        return total / samples


def count_flops(model: nn.Module, loss: Loss, batch: Any) -> float:
    """The operations of one forward and backward: products of matrices, convolutions and attention.

    Attention counts as the products that it consists of, whole squares where it is causal too, as PaLM's formula does.
    """
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  takes long to import, and few need it

    there = map_tensors(batch, lambda tensor: tensor.to(_META), lambda value: moved_object(value, _META))
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.compiler.set_stance("force_eager"),
        FlopCounterMode(display=False) as counter,
    ):
        total = sum(as_loss_sums(loss(model, there)).values())
        assert isinstance(total, Tensor)
        torch.autograd.backward(total)
    model.zero_grad()
    return float(counter.get_total_flops())


def _without_memory(things: Iterable[object]) -> dict[int, Any]:
    """What a deep copy takes in place of the tensors of these modules: as many numbers, on the meta device."""
    found: dict[int, Any] = {}
    for thing in things:
        parameters = thing.parameters(recurse=False) if isinstance(thing, nn.Module) else ()
        buffers = thing.buffers(recurse=False) if isinstance(thing, nn.Module) else ()
        for tensor in (*parameters, *buffers, *getattr(thing, "__dict__", {}).values()):
            if isinstance(tensor, nn.Parameter):
                empty = torch.empty_like(tensor, device=_META)
                found[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            elif isinstance(tensor, Tensor):
                found[id(tensor)] = torch.empty_like(tensor, device=_META)
    return found


def _drop_functions(model: nn.Module) -> None:
    """Removes the hooks that a deep copy shares with the model, and that would tell somebody of a forward."""
    for module in model.modules():
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        ):
            for key in [key for key, hook in hooks.items() if isinstance(hook, FunctionType | partial)]:
                del hooks[key]


def _shapes(micro: MicroBatch) -> str:
    return repr(map_tensors(micro.batch, lambda tensor: tuple(tensor.shape), type))


def _tell(error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    text = "the model's operations cannot be counted (%s), and no MFU is reported; metrics.flops_per_sample states them"
    _log.warning(text, reason)
