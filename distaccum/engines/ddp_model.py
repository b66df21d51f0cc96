"""What a training forward calls on DDP: torch's wrapper, which has the attributes and methods of the user's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DDPModel(DistributedDataParallel):
    """``model.encode(x)``, ``model.head`` and ``model.config`` are the wrapped model's, as ``model.module`` is it.

    A forward by one of its parts or methods is as good as one of the whole: the reduction begins with a backward that
    the engine announces, and no forward takes part in it.

    Setting an attribute that the wrapped model has sets it there, where its forward reads it.
    """

    called: bool = False
    """Whether a forward, a method or a part of the model was asked for since this was last set to False."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        vars(self)["_is_made"] = True  # what torch's constructor sets is its own, also where the model has such a name

    def forward_past_wrapper(self, passes: bool) -> None:
        """Whether forwards are the wrapped model's alone, not by way of torch's wrapper.

        While a reduction has begun and not ended torch's own forward would refuse to begin another.
        """
        if passes:
            vars(self)["forward"] = self._wrapped
        else:
            vars(self).pop("forward", None)

    def _wrapped(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """In place of what tells ``torch.compile`` to cut the model at the ends of DDP's buckets.

        It does so for a backward that overlaps with its reduction, which here one micro-step of many does; the cuts are
        in all of them, and a graph with a checkpoint cannot be cut. Blocks that are compiled one by one overlap.
        """
        yield

    def __getattr__(self, name: str) -> Any:
        """Called for what an instance's dictionary and the class have not: modules, torch's and the user's."""
        try:
            found = super().__getattr__(name)
        except AttributeError:
            module = vars(self).get("_modules", {}).get("module")
            if module is None:  # torch's own constructor is at work
                raise
            found = getattr(module, name)
            if isinstance(found, nn.Module) or callable(found):
                vars(self)["called"] = True
            return found
        if name == "module":  # torch's forward asks for it too
            vars(self)["called"] = True
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in vars(self) or hasattr(type(self), name) or "_is_made" not in vars(self)
        if own or name in self._modules or not hasattr(self._modules["module"], name):
            super().__setattr__(name, value)
        else:
            setattr(self._modules["module"], name, value)
