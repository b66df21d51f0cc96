"""The random number generators of a training process: captured and restored together, or keyed by the micro-batch."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BITS_64 = 2**64 - 1
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RNGState:
    """The states of torch's, NumPy's and Python's global generators.

    ``gpu`` is the state of the generator of ``device``, and None where that is no GPU.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: Tensor
    gpu: Tensor | None = None
    device: torch.device = _HOST

    @classmethod
    def capture(cls, device: torch.device = _HOST) -> RNGState:
        """The current states of the host's generators and, where ``device`` is a GPU, of the generator there."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),  # noqa: NPY002  users' code may draw from NumPy's global generator
            cpu=torch.get_rng_state(),
            gpu=torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None,
            device=device,
        )

    def restore(self) -> None:
        """Sets the generators to the captured states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.get_device_module(self.device).set_rng_state(self.gpu, self.device)

    def to_json(self) -> dict[str, Any]:
        """The states as values that JSON can hold; torch's are bytes in base64."""
        version, numbers, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        generators = {"cpu": self.cpu}
        if self.gpu is not None:
            generators[self.device.type] = self.gpu
        return {
            "python": [version, list(numbers), gauss],
            "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
            "torch": {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in generators.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], device: torch.device = _HOST) -> RNGState:
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
            gpu=generators.get(device.type) if device.type != "cpu" else None,
            device=device,
        )


def fork_rng(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Within it torch's generators of the host and of these devices draw what is drawn again afterwards."""
    own = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    return torch.random.fork_rng(devices=own, device_type=own[0].type if own else "cuda")


class OtherGenerators:
    """The states of Python's and NumPy's global generators, which no key seeds."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  what users' code draws from

    def have_drawn(self) -> bool:
        """Whether one of them has drawn since."""
        (_, keys, place, *_), (_, now, later, *_) = self._numpy, np.random.get_state()  # noqa: NPY002
        return random.getstate() != self._python or place != later or not np.array_equal(keys, now)

    def restore(self) -> None:
        """Sets them to what they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002


def seed_others(key: int) -> None:
    """Seeds Python's and NumPy's global generators."""
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002  what users' code draws from


def keys_of(positions: Iterable[int], *parts: object) -> list[int]:
    """A key of 63 bits for each position: a function of the position and of ``parts`` alone.

    Source of the mixing: G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    base, keys = int.from_bytes(digest), []
    for position in positions:
        mixed = (base + (position + 1) * 0x9E3779B97F4A7C15) & _BITS_64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS_64
        keys.append((mixed ^ (mixed >> 31)) >> 1)
    return keys


class KeyedRandom:
    """Torch's generators of the host and of ``device``, seeded by a micro-batch's key while its micro-step runs.

    What draws from them then, such as dropout, depends on the micro-batch and not on the rank that computes it, nor on
    what was drawn before; a micro-step that is run again draws the same numbers. Outside they go on as if the
    micro-step had drawn nothing. Nothing waits for a device: the state of a GPU's generator is on the host.

    Args:
        device: whose generator is seeded.
        others: whether NumPy's and Python's generators are seeded too; otherwise they are left alone.
    """

    def __init__(self, device: torch.device, *, others: bool = False) -> None:
        self._device, self._seeds_others = device, others
        self._key = 0
        self._others: OtherGenerators | None = None
        self._cpu: Tensor | None = None  # the outer state, within a micro-step
        self._gpu: Tensor | None = None

    def keyed(self, keys: Sequence[int], i: int) -> KeyedRandom:
        """The context of the ``i``-th micro-step of a window with these ``keys``; without any it changes nothing."""
        self._key = keys[i] if keys else -1
        return self

    def __enter__(self) -> None:
        if self._key >= 0:
            self.begin(self._key)

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, key: int) -> None:
        """Seeds the generators; their states are kept until :meth:`end`."""
        self._cpu = torch.default_generator.get_state()
        torch.default_generator.manual_seed(key)
        if self._device.type != "cpu":
            generator = torch.get_device_module(self._device).default_generators[self._device.index or 0]
            self._gpu = generator.get_state()
            generator.manual_seed(key)
        if self._seeds_others:
            self._others = OtherGenerators()
            seed_others(key)

    def end(self) -> None:
        """Gives the generators their states back, if :meth:`begin` has kept them."""
        if self._cpu is not None:
            torch.default_generator.set_state(self._cpu)
            self._cpu = None
        if self._gpu is not None:
            torch.get_device_module(self._device).default_generators[self._device.index or 0].set_state(self._gpu)
            self._gpu = None
        if self._others is not None:
            self._others.restore()
            self._others = None
