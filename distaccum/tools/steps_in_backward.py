"""Hooks that step a weight in the backward, as optimizers do that free each gradient at once: they are refused.

What they see is the gradient of one micro-batch on one rank, and not the window's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distaccum.engines.modules import to_local, trained
from distaccum.errors import ConfigError, MisuseError, shorten

_CALLS = 2  # of a hook in which values are compared; later a write is known by the parameter's version
_OF_ENGINES = ("torch.distributed.", "deepspeed.", "distaccum.")  # modules whose hooks reduce and shard
_WHERE = "in the backward, where its gradient is that of one micro-batch on one rank"
_REMEDY = (
    "Give its optimizer to the engine (Accumulator, Trainer), which steps by the window's gradient; engine=zero1 and "
    "engine=fsdp2 save the memory"
)


class Watched:
    """A post-accumulate hook of the user's, which may look at a gradient and change it, and nothing else.

    Args:
        name: of the parameter that it is on.
        hook: as it was registered.
    """

    def __init__(self, name: str, hook: Callable[[Tensor], Any]) -> None:
        self.hook = hook
        self._name, self._left = name, _CALLS

    def __call__(self, parameter: Tensor) -> Any:
        """What the hook returns, which torch refuses; puts the weight back where it has moved.

        Raises:
            MisuseError: the hook has written the parameter, or dropped its gradient.
        """
        had, version = parameter.grad is not None, parameter._version
        before = to_local(parameter).detach().clone() if self._left else None
        returned = self.hook(parameter)
        wrote, now = parameter._version != version, to_local(parameter).detach()
        if before is not None:
            # Waits for the device, in the first calls alone.
            wrote_nothing = torch.allclose(before, now, rtol=0.0, atol=0.0, equal_nan=True)
            if not wrote_nothing:
                now.copy_(before)
            elif not wrote:  # a rate of zero writes, and moves nothing yet
                self._left -= 1
            wrote = not wrote_nothing
        if wrote or (had and parameter.grad is None):
            what = f"a post-accumulate hook {'steps' if wrote else 'drops the gradient of'} {self._name}"
            raise MisuseError(f"{what} {_WHERE}. {_REMEDY}")
        return returned


def watch(model: nn.Module) -> Callable[[], None]:
    """Has the users' hooks on the trained parameters watched, until the function is called that it gives."""
    for name, parameter in trained(model).items():
        hooks = parameter._post_accumulate_grad_hooks
        for key, hook in (hooks or {}).items():
            if not _origin(hook).startswith(_OF_ENGINES):
                hooks[key] = Watched(name, hook)
    return partial(_give_back, model)


def _give_back(model: nn.Module) -> None:
    """Puts the users' own hooks in their places."""
    for parameter in model.parameters():
        hooks = parameter._post_accumulate_grad_hooks
        for key, hook in (hooks or {}).items():
            if isinstance(hook, Watched):
                hooks[key] = hook.hook


def apply(model: nn.Module, gradients: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """What the users' hooks make of gradients that were accumulated without them; None where there are no hooks.

    A mask gives the same of a sum as of its parts. A second road by ``autograd.grad`` calls no such hooks.

    Args:
        model: whose parameters have the hooks.
        gradients: by name.
    """
    found, changed = False, dict(gradients)
    for name, parameter in trained(model).items():
        hooks = [h.hook for h in (parameter._post_accumulate_grad_hooks or {}).values() if isinstance(h, Watched)]
        found = found or bool(hooks)  # on all ranks alike, whatever reaches this one's
        if not hooks or name not in gradients or parameter.shape != gradients[name].shape:
            continue
        held = parameter.grad
        parameter.grad = gradients[name].to(parameter.dtype, copy=True)
        try:
            for hook in hooks:
                hook(parameter)
            changed[name] = parameter.grad.to(gradients[name].dtype)
        finally:
            parameter.grad = held
    return changed if found else None


def expect_none(model: nn.Module) -> None:
    """Raises ConfigError where torch's ``_apply_optimizer_in_backward`` was called for a parameter."""
    if names := [name for name, p in model.named_parameters() if getattr(p, "_in_backward_optimizers", None)]:
        problem = f"_apply_optimizer_in_backward steps {shorten(names)} {_WHERE}"
        raise ConfigError("model", type(model).__name__, problem, _REMEDY)


def _origin(hook: Any) -> str:
    """The module that a hook's function is from."""
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""
