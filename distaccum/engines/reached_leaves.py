"""Which parameters a backward has added to, also one that an error has ended.

Autograd adds to a leaf once in a backward, after all that reaches it was summed. An error in between leaves some leaves
added to and others not. Views of one bucket share a version, which cannot tell them apart; a hook on each leaf can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from distaccum.errors import ConfigError

_HOOKS = "_post_accumulate_grad_hooks"  # torch's own, in the order in which they are called


class ReachedLeaves:
    """The parameters that the current micro-step's backwards, and the last of them, have added to.

    The hook of each is ``list.append``: no Python frame runs in the hot path.

    Args:
        parameters: leaves.

    Raises:
        ConfigError: this torch keeps its hooks in another way.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.reached: list[Tensor] = []
        """Those of the micro-step, one after the other; it begins with none."""
        self.begun = 0
        """How many had been reached when the last backward began; set by who begins it, without a call."""
        self._hooks = [self._register(parameter) for parameter in parameters]

    def _register(self, parameter: nn.Parameter) -> Any:
        handle: Any = parameter.register_post_accumulate_grad_hook(self.reached.append)  # type: ignore[no-untyped-call]
        try:
            hooks = getattr(parameter, _HOOKS)
            others = {number: hook for number, hook in hooks.items() if number != handle.id}
            # The first: what a user's hook raises comes after the leaf was added to. Torch calls them in the order of
            # their insertion, which OrderedDict.move_to_end does not change.
            for number in others:
                del hooks[number]
            hooks.update(others)
        except (AttributeError, KeyError) as error:
            problem = f"keeps no {_HOOKS} in order, by which an interrupted backward is finished"
            raise ConfigError("torch", "this release", problem, "Use a torch from 2.8 to 2.15") from error
        return handle

    def note(self, parameter: Tensor) -> None:
        """Notes a leaf that was added to past its hook."""
        self.reached.append(parameter)

    @property
    def reached_in_backward(self) -> Sequence[Tensor]:
        """Those that the last backward has added to."""
        return self.reached[self.begun :]

    @property
    def missing(self) -> list[nn.Parameter]:
        """The leaves that no backward of the micro-step has reached, in the order of the parameters."""
        known = set(map(id, self.reached))
        return [parameter for parameter in self._parameters if id(parameter) not in known]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.reached.clear()
