"""Whether a micro-batch's loss is the same a second time, for ``numerics=reproducible``."""

from __future__ import annotations

import torch
from torch import Tensor

from distaccum.data.batches import to_device
from distaccum.data.window import Window
from distaccum.distributed.random import KeyedRandom
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.buffers import state_restored
from distaccum.errors import MisuseError
from distaccum.losses.base import Loss
from distaccum.losses.normalize import as_loss_sums


@torch.no_grad()
def expect_repeats(engine: Engine, window: Window, loss: Loss, world: World) -> None:
    """Computes the loss of this rank's first micro-batch twice, with the same random numbers; a collective.

    What a model or a loss keeps between two calls in an attribute, such as a hidden state, a counter or a generator of
    its own, depends on the micro-batches that its rank has seen. Where a forward is a collective nothing is computed.

    Raises:
        MisuseError: the two differ, on any rank; on all of them.
    """
    if engine.forward_communicates:
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
    if world.all_reduce_max_host([differs])[0]:
        problem = "the loss of a micro-batch is another one a second time, with the same weights and random numbers"
        remedy = "keep no state between two calls, and no generator of your own, in the model or the loss"
        raise MisuseError(f"{problem}, so that it depends on what its rank has run before: {remedy}, or numerics=fast")


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num())
