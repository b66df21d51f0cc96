"""What an engine cannot take, refused without a process group; whose a model is; what settings of groups changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.utils.data import TensorDataset

from distaccum.config.engine import FSDP2Config
from distaccum.config.schema import RunConfig
from distaccum.data.adapters import to_data_spec
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.blocks import blocks_of
from distaccum.engines.factory import create_engine
from distaccum.engines.fsdp2 import internals
from distaccum.engines.group_settings import GroupSettings
from distaccum.engines.ownership import Ownership, is_owned
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.gpt import GPT
from distaccum.train.components import build_components
from tests.support import versions


def _check(model: nn.Module, **engine: Any) -> None:
    data = to_data_spec(TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)))
    config = RunConfig.from_dict({"batch": {"global_size": 4, "micro_size": 2}, "engine": engine})
    cpu = torch.device("cpu")
    build_components(config, data, model, CrossEntropy(), world_size=2, device=cpu, planned=True)


class Blocks(nn.Module):
    def __init__(self, **own: nn.Parameter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 3)
        for name, parameter in own.items():
            self.register_parameter(name, parameter)


def _tied(*, across: bool) -> Blocks:
    model = Blocks()
    if across:
        model.layers[1].weight = model.layers[0].weight
    else:
        model.register_parameter("same", model.head.weight)
    return model


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Blocks(scale=nn.Parameter(torch.tensor(1.0))), "scale has no dimension"),
        (Blocks(none=nn.Parameter(torch.zeros(0, 2))), "none has no elements"),
        (Blocks(turned=nn.Parameter(torch.zeros(3, 2).t())), "turned is not contiguous"),
        (Blocks(wide=nn.Parameter(torch.zeros(3).double())), r"one block holds wide in float64 and head\.weight in fl"),
    ],
)
def test_what_fsdp2_cannot_shard_is_named(model: nn.Module, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^engine=fsdp2: cannot shard this model: {problem}.*Use engine=zero1"):
        _check(model, name="fsdp2")


def test_what_fsdp2_can_shard_passes() -> None:
    _check(_tied(across=False), name="fsdp2")
    _check(_tied(across=True), name="fsdp2")  # what shares is no block by default
    with pytest.raises(ConfigError, match=r"layers\.0\.weight is shared by two blocks"):
        _check(_tied(across=True), name="fsdp2", blocks=["layers.*"])
    nested = nn.Sequential(Blocks(), nn.Linear(2, 2))
    _check(nested, name="fsdp2", blocks=["0", "0.layers.*"])
    _check(GPT(vocab_size=16, seq_len=8, n_layer=2, n_head=2, n_embd=8, dropout=0.0), name="fsdp2")
    _check(Blocks(frozen=nn.Parameter(torch.zeros(2).half(), requires_grad=False)), name="fsdp2")


def test_a_glob_names_the_outermost_that_it_matches() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    first, second = model
    assert blocks_of(model, ["*"]) == [second, first]
    assert blocks_of(model, ["0*", "0.*"]) == [first[0], first]  # type: ignore[index]  # what is held comes first


def test_globs_and_meta_init_are_checked_before_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.blocks=zzz: matches no module of Blocks, which has layers, layers\.0"
    ):
        _check(Blocks(), name="fsdp2", blocks=["zzz"])
    with pytest.raises(ConfigError, match=r"engine\.blocks=layer: matches no module of Blocks; did you mean layers"):
        _check(Blocks(), name="fsdp2", blocks=["layer"])
    with pytest.raises(ConfigError, match=r"engine\.meta_init=True: this Blocks has its weights already.*'meta'"):
        _check(Blocks(), name="fsdp2", meta_init=True)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"reduce_bucket_size": -5}, r"zero_optimization\.reduce_bucket_size=-5: DeepSpeed refuses it \(Input should"),
        ({"offload_optimizer": {"ratio": 7}}, r"zero_optimization\.offload_optimizer\.ratio=7: DeepSpeed refuses"),
    ],
)
def test_a_value_that_deepspeed_refuses_is_named(zero: Mapping[str, Any], message: str) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(ConfigError, match=r"^engine\.json\." + message):
        _check(Blocks(), name="deepspeed", json={"zero_optimization": zero})


def test_deepspeed_takes_no_parameter_without_dimensions() -> None:
    with pytest.raises(ConfigError, match=r"engine=deepspeed: cannot take scale.*Use engine=zero1"):
        _check(Blocks(scale=nn.Parameter(torch.tensor(1.0))), name="deepspeed")


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


def _adam(**options: Any) -> tuple[Optimizer, GroupSettings]:
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "lr": torch.tensor(0.25)}]
    optimizer = Adam(groups, **{"lr": 0.1, **options})
    return optimizer, GroupSettings([optimizer])


def test_what_changed_is_restored_and_the_rest_is_the_programs() -> None:
    assert _adam()[1].changed() == {}
    optimizer, settings = _adam(weight_decay=0.0)
    first, second = optimizer.param_groups
    first.update(lr=0.05, betas=(0.5, 0.75), k=3, fused=True, seen=torch.tensor([1, 2]))
    second["lr"].fill_(0.125)
    saved = json.loads(json.dumps(settings.changed()))
    assert {name.split(".", 3)[3] for name in saved} == {"lr", "betas", "k", "seen"}

    optimizer, settings = _adam(weight_decay=0.5)
    first, second = optimizer.param_groups
    rate = second["lr"]
    first["came"] = 1
    settings.restore(saved)
    assert (first["lr"], first["betas"], first["k"], first["weight_decay"]) == (0.05, (0.5, 0.75), 3, 0.5)
    assert torch.equal(first["seen"], torch.tensor([1, 2]))
    assert "came" not in first
    assert not first["fused"]
    assert second["lr"] is rate
    assert rate == 0.125


def test_rates_of_a_schedule_are_no_state() -> None:
    optimizer, settings = _adam()
    optimizer.param_groups[0]["lr"] = 0.05
    assert list(settings.changed()) == ["groups.0.0.lr"]
    settings.rates_are_scheduled = True
    assert settings.changed() == {}
    settings.restore({"groups.0.0.lr": 0.7})
    assert optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(ValueError, match="'k' was saved of group 2 of optimizer 0, and there is no such group"):
        _adam()[1].restore({"groups.0.2.k": 1})


def _engine(world: World) -> Engine:
    model = nn.Linear(3, 2)
    return create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), world, engine=FSDP2Config())


@pytest.mark.parametrize(
    ("names", "owner"), [("_OF_GROUP", "FSDPParamGroup"), ("_OF_PARAMETER", "FSDPParam"), ("_LOCAL", "DTensor")]
)
def test_a_torch_without_a_private_name_is_refused_by_it(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch, names: str, owner: str
) -> None:
    monkeypatch.setattr(internals, names, "_gone" if names == "_LOCAL" else ("_gone",))
    message = rf"torch {torch.__version__} has no {owner}\._gone, .* Use torch 2\.8 to 2\.15, or engine=zero1"
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        _engine(gloo_world)


def test_a_torch_without_the_modules_own_state_is_refused(gloo_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(internals.FSDPModule, "_get_fsdp_state")
    with pytest.raises(ConfigError, match=r"has no FSDPModule\._get_fsdp_state"):
        internals.check(_Sharded())


class _Sharded(internals.FSDPModule, nn.Module):
    def __new__(cls) -> _Sharded:
        return nn.Module.__new__(cls)


def test_an_error_in_a_forward_leaves_nothing_behind_on_older_torch(
    gloo_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(internals.FSDPModule, "reset_iter_state", raising=False)  # torch 2.13 brought it
    engine = _engine(gloo_world)
    engine.begin_window(1)
    with pytest.raises(RuntimeError), engine.micro_step(sync=True):
        engine.model(torch.ones(4, 7))
    engine.zero_gradients()
    engine.begin_window(1)
    with engine.micro_step(sync=True):
        engine.backward(engine.model(torch.ones(4, 3)).square().sum())
    assert engine.step().applied


def test_the_table_of_versions_keeps_rows_that_were_not_asked_for() -> None:
    text = versions.DOCUMENT.read_text()
    rows = versions.rows_of(text) | {("2.99.0", "", "ddp"): ("exact", "exact", "off by 1e-3", "exact")}
    again = versions.written(text, rows)
    assert versions.rows_of(again) == rows
    assert versions.written(again, versions.rows_of(text)) == versions.written(text, versions.rows_of(text))
