"""Whether an optimizer steps by a closure, which runs the model again at will."""

from __future__ import annotations

from inspect import Parameter, signature

from torch.optim import Optimizer

from distaccum.engines.rules import trial_copy


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether a step without a closure, which runs the model again, is refused by the optimizer itself."""
    if type(optimizer).__module__.startswith("torch."):
        closure = signature(type(optimizer).step).parameters.get("closure")
        return closure is not None and closure.default is Parameter.empty
    trial = trial_copy(optimizer, [], wraps=True)
    try:
        trial.step()
    except Exception as error:  # each optimizer has its own
        return "closure" in str(error)
    return False
