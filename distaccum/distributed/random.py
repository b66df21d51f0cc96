"""The random number generators of a training process, captured and restored together."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RNGState:
    """The states of torch's, NumPy's and Python's global generators.

    ``cuda`` is the state of the generator of ``device``, and None where that is no GPU.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None = None
    device: torch.device | None = None

    @classmethod
    def capture(cls, device: torch.device | None = None) -> RNGState:
        """The current states of the host's generators and, where ``device`` is a GPU, of the generator there."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),  # noqa: NPY002  users' code may draw from NumPy's global generator
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None,
            device=device,
        )

    def restore(self) -> None:
        """Sets the generators to the captured states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            assert self.device is not None
            torch.cuda.set_rng_state(self.cuda, self.device)

    def to_json(self) -> dict[str, Any]:
        """The states as values that JSON can hold; torch's are bytes in base64."""
        version, numbers, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        generators = {"cpu": self.cpu} | ({"cuda": self.cuda} if self.cuda is not None else {})
        return {
            "python": [version, list(numbers), gauss],
            "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
            "torch": {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in generators.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], device: torch.device | None = None) -> RNGState:
        """The states that :meth:`to_json` wrote; the one of a GPU is for ``device``, and ignored where that is none."""
        version, numbers, gauss = values["python"]
        kind, keys, *rest = values["numpy"]
        generators = {
            name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            for name, text in values["torch"].items()
        }
        return cls(
            python=(version, tuple(numbers), gauss),
            numpy=(kind, np.array(keys, dtype=np.uint32), *rest),
            cpu=generators["cpu"],
            cuda=generators.get("cuda") if device is not None and device.type == "cuda" else None,
            device=device,
        )
