"""The micro-step that a configuration describes: the bytes of its micro-batch and activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from distaccum.accumulation.two_pass import of_micro_batch
from distaccum.config.instantiate import build
from distaccum.config.schema import RunConfig
from distaccum.data.batches import map_tensors
from distaccum.engines.factory import checkpoint_activations
from distaccum.errors import ConfigError, DistaccumError
from distaccum.precision.policy import PrecisionPolicy
from distaccum.tools.longest import longest_micro_batch
from distaccum.tools.plan.activations import CannotTellError, measure
from distaccum.tools.plan.memory import MicroStep
from distaccum.tools.plan.sharding import FULL, HALF, PARAMETER_STAGE, formats_of, sharding_of
from distaccum.train.checks import check_loss
from distaccum.train.components import build_data
from distaccum.train.packing import pack


def measured_micro_step(config: RunConfig, samples: int) -> MicroStep:
    """The bytes of a micro-step of so many samples.

    What cannot be had, where the data is elsewhere or the model reads values, is None, with the reason.

    They are of a GPU's operators where this machine has one, else of a CPU's: the same but for dropout, whose masks
    take a byte an element on a GPU and four on a CPU, and for the size of what a GPU's allocator gives out.

    Raises:
        ConfigError: model, loss and data do not fit together, or the model or the loss cannot be built.
    """
    loss = build("loss", config.loss)
    try:
        batch = longest_micro_batch(pack(build_data(config.data), config.batch, loss), samples)
    except Exception as error:  # the data may be on another machine, and is the user's code
        return MicroStep(unknown=f"there is no micro-batch: {first_line(error)}")
    sizes: list[int] = []
    map_tensors(batch, lambda tensor: sizes.append(tensor.nbytes))
    with torch.device("meta"):
        model: nn.Module = build("model", config.model)
    check_loss(loss)
    getattr(loss, "check_model", lambda _: None)(model)
    policy = PrecisionPolicy.of(config.precision)
    formats, sharding = formats_of(config.engine, config.precision), sharding_of(config.engine)
    # The model itself is in 16 bits (DeepSpeed, and bf16-weights), or what is gathered of it.
    small = formats.parameters == HALF or (sharding.stage >= PARAMETER_STAGE and formats.gathered == HALF)
    settings: dict[str, Any] = {
        "policy": policy,
        "casts": formats.parameters == FULL or policy.keeps_masters,
        "weights": policy.compute_dtype if small else None,
        "prepare": partial(checkpoint_activations, engine=config.engine),
    }
    last: Exception | None = None
    for device in _devices():
        try:
            found = measure(model, of_micro_batch(loss), batch, device=device, **settings)
        except Exception as error:  # of the model, or of operators that torch has no shapes for on this device
            last = error
        else:
            return MicroStep(device=device, batch=sum(sizes), kept=found.kept, peak=found.peak)
    if isinstance(last, CannotTellError):
        return MicroStep(batch=sum(sizes), unknown=f"the model cannot be run without numbers: {last}")
    if isinstance(last, ConfigError):  # of the model, for a kernel that a CPU has not
        return MicroStep(batch=sum(sizes), unknown=f"the model cannot be run here: {last}")
    assert last is not None
    problem = f"does not take a micro-batch of the data ({first_line(last)})"
    remedy = "Make model, loss and data fit, or leave this out with plan.activations=false"
    raise ConfigError("model", config.model["_target_"], problem, remedy) from last


def _devices() -> list[str]:
    """The kinds of device whose operators this machine can tell of, the best first."""
    return [*(["cuda"] if torch.cuda.is_available() else []), "cpu"]


def first_line(error: Exception) -> str:
    """What it says, or that an error of somebody else's code is one."""
    said = str(error) if isinstance(error, DistaccumError) else f"{type(error).__name__}: {error}"
    return said.splitlines()[0]
