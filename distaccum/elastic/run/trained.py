"""Which parameters a run trains: in an elastic run the same ones from view to view, whose state is handed over."""

from __future__ import annotations

from torch import nn

from distaccum.errors import MisuseError


class Trained:
    """The parameters that need a gradient as a run begins.

    Args:
        model: not trained yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(name, one, one.requires_grad) for name, one in model.named_parameters()]

    def check(self) -> None:
        """Before a view goes on with the state of the one before.

        Raises:
            MisuseError: a parameter was frozen or unfrozen meanwhile, so that the state is that of others.
        """
        for name, parameter, needs_gradient in self._parameters:
            if parameter.requires_grad != needs_gradient:
                done = "unfrozen" if parameter.requires_grad else "frozen"
                problem = f"{name} was {done} while an elastic run trained, whose ranks could not go on with its state"
                remedy = "freeze it before the run begins, or train without launch/elastic.sh"
                raise MisuseError(f"{problem}: {remedy}")
