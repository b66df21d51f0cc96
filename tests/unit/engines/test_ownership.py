"""Claims to models and optimizers, of engines that come and go in several threads."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from distaccum.engines.ownership import Ownership, is_owned


@pytest.fixture
def _many_switches() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_many_switches")
def test_engines_of_several_threads_do_not_meet() -> None:
    def claim_and_release(_: int) -> bool:
        owned = False
        for _ in range(100):
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
            ownership = Ownership(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
            ownership.release()
            owned = owned or any(map(is_owned, model.parameters()))
        return owned

    with ThreadPoolExecutor(4) as threads:
        assert not any(threads.map(claim_and_release, range(4)))
