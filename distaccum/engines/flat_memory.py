"""Parameters that lie in flat memory, which an engine sends and steps: a user may have put them elsewhere."""

from __future__ import annotations

from torch import Tensor, nn

from distaccum.errors import MisuseError


def put_back(parameter: nn.Parameter, place: Tensor) -> None:
    """Copies a weight that lies elsewhere (after ``p.data = ...``) to ``place``, and has the parameter lie there again.

    Raises:
        MisuseError: it has another shape or type.
    """
    if parameter.data_ptr() == place.data_ptr() and parameter.shape == place.shape:
        return
    if parameter.shape != place.shape or parameter.dtype is not place.dtype:
        now, before = (f"{list(t.shape)} in {str(t.dtype).removeprefix('torch.')}" for t in (parameter, place))
        raise MisuseError(
            f"a parameter of {before} was made one of {now} after the model was wrapped (.data = ..., half(), to()): "
            "change the model before, or choose precision= instead"
        )
    place.copy_(parameter.detach())
    parameter.data = place
