"""A warning for modules whose result accumulation cannot make equal to that of the global batch."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from distaccum.data.batches import to_device
from distaccum.data.window import Window
from distaccum.distributed.random import KeyedRandom
from distaccum.engines.base import Engine
from distaccum.engines.buffers import state_restored
from distaccum.errors import BatchStatisticsWarning, MisuseError, shorten
from distaccum.losses.base import Loss
from distaccum.losses.normalize import as_loss_sums

# Whether a micro-batch's loss is the same a second time, as its bits have to be where sums have a fixed order.


@torch.no_grad()
def expect_repeats(engine: Engine, window: Window, loss: Loss) -> None:
    """Computes the loss of this rank's first micro-batch twice, with the same random numbers; a collective.

    What a model or a loss keeps between two calls in an attribute, such as a hidden state, a counter or a generator of
    its own, depends on the micro-batches that its rank has seen. Where a forward is a collective nothing is computed.

    Raises:
        MisuseError: the two differ, on any rank; on all of them.
    """
    if engine.facts.forward_communicates:
        return
    differs = False
    if window.micro_batches:
        batch, found = to_device(window.micro_batches[0].batch, engine.device), list[list[Tensor]]()
        random = KeyedRandom(engine.device, others=True)
        with state_restored(engine):
            for _ in range(2):
                with random.keyed(window.keys, 0), engine.autocast():
                    found.append(
                        [part.detach().clone() for part in as_loss_sums(loss(engine.unwrapped_model, batch)).values()]
                    )
        first, second = found
        differs = len(first) != len(second) or not all(map(_same, first, second))
    if engine.world.all_reduce_max_host([differs])[0]:
        problem = "the loss of a micro-batch is another one a second time, with the same weights and random numbers"
        remedy = "keep no state between two calls, and no generator of your own, in the model or the loss"
        raise MisuseError(f"{problem}, so that it depends on what its rank has run before: {remedy}, or numerics=fast")


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def batch_statistics(model: nn.Module) -> list[str]:
    """The names of modules that normalise over a micro-batch."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
    ] + [one for module in model.modules() for one in getattr(module, "batch_norms", ())]


def warn_of_batch_statistics(model: nn.Module) -> None:
    """Warns once, by name, of modules that normalise over a micro-batch."""
    found = batch_statistics(model)
    if not found:
        return
    warnings.warn(
        f"{shorten(found, 1)}: batch normalisation takes its statistics from a micro-batch on one rank, so the "
        "gradient depends on the micro-batch size (SyncBatchNorm joins the ranks of one micro-step, not the "
        "micro-steps of a window). Use GroupNorm or LayerNorm, or freeze it with eval()",
        BatchStatisticsWarning,
        stacklevel=3,
    )
