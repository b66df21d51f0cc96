"""The parts of a run that its configuration names, and the optimizer among them."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from distaccum.config.schema import RunConfig
from distaccum.config.trainer import OptimConfig
from distaccum.data.adapters import to_data_spec
from distaccum.errors import ConfigError
from distaccum.train.components import TrainingComponents, build_components
from distaccum.train.optimizer import build_optimizers
from tests.support.accumulators import SQUARED_ERRORS


def _assemble(model: nn.Module, config: Mapping[str, Any]) -> TrainingComponents:
    data = to_data_spec(TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1)))
    config = {"batch": {"global_size": 4, "micro_size": 2}} | config
    return build_components(
        RunConfig.from_dict(config), data, model, SQUARED_ERRORS, world_size=1, device=torch.device("cpu")
    )


def test_the_policy_and_the_optimizer_are_those_of_the_configuration() -> None:
    precision = {"name": "bf16", "keep_fp32": ["1"], "reduce_dtype": "bf16"}
    components = _assemble(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), {"precision": precision})
    assert (components.policy.compute_dtype, components.policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    assert components.policy.keep_fp32 == ("1",)
    assert [optimizer.defaults["fused"] for optimizer in components.optimizers] == [True]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_16_bits_is_refused_under_every_policy(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(ConfigError, match=r"model=Linear: .*float16.*Load it in float32"):
        _assemble(nn.Linear(2, 1).to(dtype), {"precision": {"name": name}})


def test_a_compiled_model_and_modules_kept_in_fp32_are_refused_together() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"precision\.keep_fp32=1: .*compiled"):
        _assemble(model, {"precision": {"name": "bf16", "keep_fp32": ["1"]}})
    assert _assemble(model, {"precision": {"name": "bf16"}}).policy.casts


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"name": "tf32"}, r"precision=tf32: a CPU"),
        ({"name": "bf16", "keep_fp32": ["head"]}, r"precision\.keep_fp32=head: matches no module"),
        ({"name": "fp32", "only": ["head"]}, r"precision\.only=head: matches no module"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_before_there_is_a_process_group(
    precision: dict[str, Any], message: str
) -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match=message):
        _assemble(nn.Linear(2, 1), {"precision": precision})


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
