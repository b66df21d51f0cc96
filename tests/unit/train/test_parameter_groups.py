"""Parameter groups of the configuration: what each takes, what it states, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from distaccum import DataSpec, Trainer
from distaccum.config.trainer import OptimConfig
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.optimizer import build_optimizers, group_sizes, split
from tests.support.runs import CONSTANT, settings

CPU = torch.device("cpu")
FEATURES, CLASSES = 4, 3
MUON = {"_target_": "torch.optim.Muon", "lr": 0.02}


class Tied(nn.Module):
    """Its output has the weight of its embedding; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.LayerNorm(4)
        self.leave = nn.Linear(4, 5, bias=False)
        self.leave.weight = self.enter.weight


def _names(*groups: dict[str, Any]) -> list[list[str]]:
    return [list(members) for members in split(groups, Tied())]


def test_the_first_group_that_fits_takes_a_parameter_and_the_last_list_is_the_rest() -> None:
    assert _names({"match": "body.*", "lr": 0.1}, {"dims": [0, 1], "lr": 0.2}) == [
        ["body.weight", "body.bias"],
        ["frozen.bias", "norm.weight", "norm.bias"],
        ["enter.weight", "frozen.weight"],
    ]
    assert _names({"match": ["*.weight", "norm.*"], "dims": 1, "lr": 0.1})[0] == ["norm.weight", "norm.bias"]


def test_a_tied_weight_is_taken_once_by_any_of_its_names() -> None:
    assert _names({"match": "leave.*", "lr": 0.1}, {"match": "*.weight", "dims": 2, "lr": 0.2})[:2] == [
        ["enter.weight"],
        ["body.weight", "frozen.weight"],
    ]
    sizes = group_sizes(OptimConfig(groups=[{"match": "leave.*", "lr": 0.1}]), Tied())
    assert [size.parameters for size in sizes] == [16 + 4 + 4 + 4, 20]  # what is frozen does not count


REFUSED: dict[str, tuple[list[Any], str]] = {
    "a misspelt name": (
        [{"match": "body.wieght", "lr": 0.1}],
        r"optim\.groups\.0\.match=body\.wieght: matches no parameter of the model; did you mean body\.weight or .*",
    ),
    "one glob of two": ([{"match": ["*.bias", "head.*"], "lr": 0.1}], r"groups\.0\.match=head\.\*: matches no param"),
    "frozen": ([{"match": "frozen.*", "lr": 0.1}], r"match=frozen\.\*: matches only what is frozen \(frozen\.weight, "),
    "taken": (
        [{"dims": 1, "lr": 0.1}, {"match": "*.bias", "lr": 0.2}],
        r"optim\.groups\.1=match=\*\.bias: takes no parameter: groups before it have body\.bias \(in group 0\), ",
    ),
    "dimensions": ([{"dims": 3, "lr": 0.1}], r"groups\.0=dims=3: takes no parameter .*the model has some of 1, 2 dim"),
    "a misspelt setting": ([{"dims": 1, "weight_decy": 0}], r"groups\.0\.weight_decy=0: .*did you mean weight_decay"),
    "a value": ([{"dims": 1, "weight_decay": -1}], r"optim\.groups\.0=torch\.optim\.AdamW: ValueError: .*-1"),
    "a negative rate": ([{"dims": 1, "lr": -1e-3}], r"optim\.groups\.0\.lr=-0\.001: is no rate"),
    "an infinite rate": ([{"dims": 1, "lr": math.inf}], r"optim\.groups\.0\.lr=inf: is no rate"),
    "a rate in quotes": ([{"dims": 1, "lr": "1e-3"}], r"optim\.groups\.0\.lr=1e-3: is no rate"),
    "another optimizer's rate": (
        [{"dims": 2, "optimizer": MUON | {"lr": math.nan}}],
        r"optim\.groups\.0\.optimizer\.lr=nan: is no rate",
    ),
    "the kernel": ([{"dims": 1, "fused": False}], r"groups\.0\.fused=False: is a setting of AdamW as a whole"),
    "nothing taken": ([{"lr": 0.1}], r"optim\.groups\.0=\{'lr': 0\.1\}: says neither match nor dims"),
    "nothing stated": ([{"dims": 1}], r"optim\.groups\.0=\{'dims': 1\}: states nothing for what it takes"),
    "no mapping": (["*.bias"], r"optim\.groups\.0=\*\.bias: is no mapping"),
    "no globs": ([{"match": [], "lr": 0.1}], r"optim\.groups\.0\.match=\[\]: not globs"),
    "no number": ([{"dims": "2", "lr": 0.1}], r"optim\.groups\.0\.dims=\['2'\]: not numbers of dimensions"),
    "a class outside": ([{"dims": 2, **MUON}], r"groups\.0\._target_=torch\.optim\.Muon: is no setting of a group"),
    "no class": ([{"dims": 2, "optimizer": "Muon"}], r"groups\.0\.optimizer=Muon: names no class"),
    "a rate twice": ([{"dims": 2, "lr": 0.1, "optimizer": MUON}], r"groups\.0\.lr=0\.1: and .*optimizer\.lr=0\.02 too"),
    "no rest": (
        [{"match": "*", "optimizer": {"_target_": "torch.optim.SGD"}}],
        r"optim\.optimizer=.*no parameter left",
    ),
    "another optimizer's rule": ([{"dims": 1, "optimizer": MUON}], r"groups\.0\.optimizer=.*Muon only supports 2D"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(case: str) -> None:
    groups, expected = REFUSED[case]
    with pytest.raises(ConfigError, match=expected):
        build_optimizers(OptimConfig(groups=groups), Tied(), CPU)


def test_settings_and_optimizers_are_built_as_by_hand() -> None:
    model = Tied()
    groups = [{"dims": 1, "betas": [0.5, 0.9], "weight_decay": 0.0}, {"match": "body.*", "lr": 0.1}]
    more = {"match": "enter.*", "optimizer": MUON | {"weight_decay": 0.3}}
    default, muon = build_optimizers(OptimConfig(lr=1e-3, groups=[*groups, more]), model, CPU)
    assert isinstance(default, AdamW)
    assert default.defaults["fused"] is True
    found = [(g["lr"], g["weight_decay"], list(g["betas"])) for g in default.param_groups]
    assert found == [(1e-3, 0.1, [0.9, 0.95]), (1e-3, 0.0, [0.5, 0.9]), (0.1, 0.1, [0.9, 0.95])]
    assert isinstance(muon, Muon)
    assert [(g["lr"], g["weight_decay"]) for g in muon.param_groups] == [(0.02, 0.3)]
    assert muon.param_groups[0]["params"][0] is model.enter.weight


def _data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(FEATURES, generator=generator), torch.tensor(i % CLASSES)) for i in range(16)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES))


GROUPS = [{"dims": [0, 1], "weight_decay": 0.0}, {"match": "2.*", "lr": 0.05}, {"match": "0.*", "optimizer": MUON}]


def _train(run_dir: Path, *, steps: int, groups: Any = (), optimizer: Any = None) -> nn.Module:
    model = _model()
    rates = {"optim": {"lr": 0.01, "groups": list(groups)}, "schedule": CONSTANT | {"warmup_steps": 4}}
    config = settings((8, 4), {"max_steps": steps, "eval_every": 0}, save=3, resume="auto", **rates)
    given = optimizer(model) if optimizer else ()
    Trainer(model, CrossEntropy(), DataSpec(train=_data()), config=config, run_dir=run_dir, optimizer=given).fit()
    return model


def _by_hand(model: nn.Module) -> list[torch.optim.Optimizer]:
    thin = [p for p in model.parameters() if p.ndim < 2]
    groups: Any = [{"params": thin, "weight_decay": 0.0}, {"params": [model.get_parameter("2.weight")], "lr": 0.05}]
    adamw = AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return [adamw, Muon([model.get_parameter("0.weight")], lr=0.02)]


def test_the_trainer_trains_as_with_hand_made_groups_and_resumes_bitwise(gloo_world: World, tmp_path: Path) -> None:
    expected = _train(tmp_path / "by hand", steps=5, optimizer=_by_hand).state_dict()
    whole = _train(tmp_path / "whole", steps=5, groups=GROUPS).state_dict()
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    assert not any(torch.equal(whole[name], value) for name, value in _model().state_dict().items())
    _train(tmp_path / "parts", steps=3, groups=GROUPS)
    parts = _train(tmp_path / "parts", steps=5, groups=GROUPS).state_dict()
    assert all(torch.equal(parts[name], expected[name]) for name in expected)
    for part in ("model.safetensors", "optimizer.safetensors"):
        files = [next((tmp_path / run / "checkpoints" / "step-5").rglob(part)) for run in ("by hand", "whole", "parts")]
        saved, *others = (load_file(file) for file in files)
        assert saved
        assert all(torch.equal(saved[name], other[name]) for other in others for name in saved)


def test_groups_beside_optimizers_that_are_given_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"optim\.groups=.*: and optimizers are given, which have groups of their own"
    ):
        _train(tmp_path, steps=1, groups=GROUPS, optimizer=_by_hand)
