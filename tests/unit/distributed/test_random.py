"""The random number generators are captured and restored together, also through JSON."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from distaccum.distributed.random import RNGState


def _draw() -> tuple[list[float], list[float], list[float]]:
    """Numbers of torch, NumPy (with an odd number of normal ones, so that one is cached) and Python."""
    numpys = [*np.random.normal(size=3), *np.random.random(2)]  # noqa: NPY002  the global generator is what is tested
    pythons = [random.gauss(0, 1), random.random()]  # noqa: S311
    return torch.randn(3).tolist(), [float(number) for number in numpys], pythons


def _through_json(state: RNGState) -> RNGState:
    return RNGState.from_json(json.loads(json.dumps(state.to_json())))


@pytest.mark.parametrize("kept", [lambda state: state, _through_json], ids=["in memory", "through JSON"])
def test_what_was_captured_is_drawn_again(kept: Callable[[RNGState], RNGState]) -> None:
    _draw()  # caches a normal number
    state = kept(RNGState.capture(torch.device("cpu")))
    first, second = _draw(), _draw()
    assert first != second
    state.restore()
    assert _draw() == first
    state.restore()
    assert _draw() == first


def test_the_file_format_stays() -> None:
    """Checkpoints of earlier versions hold these values."""
    state = RNGState.capture().to_json()
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    assert state == {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], position, has_gauss, cached],
        "torch": {"cpu": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()},
    }


def test_a_gpus_state_is_left_out_where_there_is_none() -> None:
    values = RNGState.capture().to_json()
    values["torch"]["cuda"] = base64.b64encode(bytes(16)).decode()
    state = RNGState.from_json(values, torch.device("cpu"))
    assert state.cuda is None
    state.restore()


def test_a_gpus_generator_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: which device is asked, and what is written back to it."""
    device, generator = torch.device("cuda", 1), torch.arange(16, dtype=torch.uint8)
    written: list[tuple[list[int], torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda asked: generator if asked == device else None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, to: written.append((state.tolist(), to)))
    values = RNGState.capture(device).to_json()
    assert values["torch"]["cuda"] == base64.b64encode(bytes(range(16))).decode()
    RNGState.from_json(json.loads(json.dumps(values)), device).restore()
    RNGState.capture(device).restore()
    assert written == [(list(range(16)), device)] * 2
