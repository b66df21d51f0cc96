"""16-bit gradients: within their format's error of the truth, and the same however the window is divided up."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.workers.precision import ACCUMULATIONS, FORMATS, truth
from tests.support.commands import ROOT, succeed

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "workers" / "precision.py"
WORLDS = (1, 2, 4)
# By what the forward computes in and what gradients travel in. Half a unit in the last place is 4.9e-4 of fp16 and
# 3.9e-3 of bf16, and a gradient comes of several such roundings.
TOLERANCE = {
    "fp32/fp32": 1e-6,
    "bf16/fp32": 8e-3,
    "fp16/fp32": 2e-3,
    "fp16/fp16": 2e-3,
    "fp32/bf16": 8e-3,
    "fp32/fp16": 1e-3,
}


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """By format: one for each world and accumulation."""
    found: dict[str, list[Tensor]] = {f"{name}/{reduce_dtype}": [] for name, reduce_dtype in FORMATS}
    for world in WORLDS:
        path = tmp_path_factory.mktemp("gradients") / f"{world}.safetensors"
        succeed(path, world=world, script=WORKER, PYTHONPATH=str(ROOT))
        for key, gradient in load_file(path).items():
            found[key.rsplit("/", 1)[0]].append(gradient)
    return found


@pytest.mark.parametrize("form", ["/".join(form) for form in FORMATS])
def test_a_gradient_is_within_its_formats_error_of_fp64(gradients: dict[str, list[Tensor]], form: str) -> None:
    errors = [_error(gradient, truth()) for gradient in gradients[form]]
    print(f"{form}: largest relative error {max(errors):.1e} <= {TOLERANCE[form]}")
    assert len(errors) == len(WORLDS) * len(ACCUMULATIONS)
    assert max(errors) <= TOLERANCE[form]


@pytest.mark.parametrize("form", ["/".join(form) for form in FORMATS])
def test_it_does_not_depend_on_the_factorization(gradients: dict[str, list[Tensor]], form: str) -> None:
    differences = [_error(a, b) for a, b in combinations(gradients[form], 2)]
    print(f"{form}: largest relative difference {max(differences):.1e} <= {TOLERANCE[form]}")
    assert max(differences) <= TOLERANCE[form]


def test_the_16_bit_formats_are_really_used(gradients: dict[str, list[Tensor]]) -> None:
    exact = truth()
    for form in ("bf16/fp32", "fp16/fp32", "fp32/bf16", "fp32/fp16"):
        assert _error(gradients[form][-1], exact) > 1e-5  # of world 4: a sum over ranks is one of 16 bits
    assert not torch.equal(gradients["fp16/fp16"][-1], gradients["fp16/fp32"][-1])
