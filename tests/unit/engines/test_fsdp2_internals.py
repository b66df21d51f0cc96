"""FSDP2's private names: a torch that lacks one is refused when an engine is made, and not in the middle of a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distaccum.config.engine import FSDP2Config
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.factory import create_engine
from distaccum.engines.fsdp2 import internals
from distaccum.errors import ConfigError
from tests.support import versions


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
