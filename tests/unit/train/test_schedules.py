from __future__ import annotations

import pytest
import torch

from distaccum.errors import ConfigError
from distaccum.train.schedules import Constant, Cosine


def test_cosine_follows_torchs_own_after_the_warm_up() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1)
    ours = Cosine(total_steps=100, warmup_steps=10, final_ratio=0.1)
    for step in range(10, 100):
        assert ours(step) == pytest.approx(torchs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        torchs.step()


def test_warm_up_rises_evenly_from_above_zero() -> None:
    ours = Constant(total_steps=100, warmup_steps=3)
    assert [ours(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_past_the_end_it_stays_at_the_final_ratio() -> None:
    assert Cosine(total_steps=10, final_ratio=0.2)(1000) == pytest.approx(0.2)


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps=-1"):
        Constant(total_steps=1, warmup_steps=-1)
    with pytest.raises(ConfigError, match=r"schedule\.final_ratio=2"):
        Cosine(total_steps=1, final_ratio=2)
