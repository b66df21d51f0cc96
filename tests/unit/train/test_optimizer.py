from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from distaccum.config.trainer import OptimConfig
from distaccum.errors import ConfigError
from distaccum.train.optimizer import build_optimizers

CPU = torch.device("cpu")


def _built(setting: object, target: str = "torch.optim.AdamW", **arguments: Any) -> Optimizer:
    config = OptimConfig(fused=setting, optimizer={"_target_": target} | arguments)
    (optimizer,) = build_optimizers(config, nn.Linear(2, 1), CPU)
    return optimizer


def test_an_optimizer_with_a_fused_kernel_uses_it_unless_told_otherwise() -> None:
    for target in ("torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Adam"):
        assert _built("auto", target).defaults["fused"] is True
        assert _built(True, target).defaults["fused"] is True
        assert _built(False, target).defaults["fused"] is False


def test_what_the_optimizers_own_node_says_counts() -> None:
    for setting in ("auto", True, False):
        assert _built(setting, fused=False).defaults["fused"] is False
        assert _built(setting, fused=True).defaults["fused"] is True
        assert _built(setting, fused=None).defaults["fused"] is None


def test_an_optimizer_without_one_is_built_without() -> None:
    for fused in ("auto", False):
        assert "fused" not in _built(fused, "torch.optim.Rprop").defaults
    with pytest.raises(ConfigError, match=r"optim\.fused=True: torch\.optim\.Rprop takes no .* Use optim\.fused=auto"):
        _built(True, "torch.optim.Rprop")


def test_where_torch_refuses_to_fuse_it_is_built_without_or_refused() -> None:
    assert not _built("auto", foreach=True).defaults["fused"]
    with pytest.raises(ConfigError, match=r"optim\.fused=True: torch\.optim\.AdamW cannot: .*foreach.*=auto"):
        _built(True, foreach=True)


class Late(torch.optim.SGD):
    """Refuses at its first step, as torch's own do for parameters that their kernel has no version for."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, fused: bool = False) -> None:
        super().__init__(parameters, lr=lr)
        self.fused = fused

    def step(self, closure: Any = None) -> Any:
        if self.fused:
            raise RuntimeError("no kernel")
        return super().step(closure)


def test_a_kernel_that_refuses_at_its_first_step_is_noticed_before_it() -> None:
    optimizer = _built("auto", f"{__name__}.Late")
    assert isinstance(optimizer, Late)
    assert not optimizer.fused
    with pytest.raises(ConfigError, match=r"optim\.fused=True: .*Late cannot: no kernel"):
        _built(True, f"{__name__}.Late")


def test_to_try_the_kernel_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    (optimizer,) = build_optimizers(OptimConfig(), model, CPU)
    assert not optimizer.state
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fused", ["auto", True, False])
def test_a_mistake_that_is_not_about_fusing_is_told_as_it_is(fused: object) -> None:
    with pytest.raises(ConfigError, match=r"optim\.optimizer=torch\.optim\.AdamW: ValueError: .*beta"):
        _built(fused, betas=[2.0, 0.9])
    with pytest.raises(ConfigError, match=r"optim\.optimizer\.moment=0\.9: no such argument"):
        _built(fused, moment=0.9)
    with pytest.raises(ConfigError, match=r"optim\.optimizer\._target_=no\.such: cannot be imported"):
        _built(fused, "no.such")
