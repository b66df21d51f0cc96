"""A run that resumes: what it may have changed is listed, what gives its state another meaning is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import DataSpec, Trainer
from distaccum.config.schema import RunConfig
from distaccum.data.agreement import differs, fingerprint
from distaccum.errors import ConfigError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.train.config_diff import compare
from tests.support.runs import CONSTANT

FEATURES, CLASSES = 4, 3


class Headed(nn.Module):
    """Its shapes do not tell its number of heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.body = heads, nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.unflatten(-1, (self.heads, -1)).flatten(-2))


def _data(seed: int = 0, shift: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(FEATURES, generator=generator) + shift, torch.tensor(i % CLASSES)) for i in range(16)]


def _train(
    run_dir: Path, *, steps: int, model: nn.Module | None = None, loss: Any = None, data: Any = None, **more: Any
) -> None:
    fixed = {"batch": {"global_size": 8, "micro_size": 4}, "trainer": {"max_steps": steps, "eval_every": 0}}
    shown = {"metrics": {"wandb": {"mode": "disabled"}}, "schedule": CONSTANT, "resume": "auto"}
    config = RunConfig.from_dict(fixed | shown | more)
    data = data or DataSpec(train=_data())
    torch.manual_seed(0)
    Trainer(model or Headed(2), loss or CrossEntropy(), data, config=config, run_dir=run_dir).fit()


class Summed(CrossEntropy):
    """Another loss."""


def build(heads: int, bias: bool = True, sizes: tuple[int, ...] = (2, 3), scale: float = 1.0) -> None:
    """A target of a configuration."""


def test_an_argument_that_is_new_and_has_its_default_is_no_change() -> None:
    """A checkpoint of before the target had the argument, or of before the configuration stated it; and of after."""
    node = {"_target_": f"{__name__}.build", "heads": 2}
    told = {**node, "bias": True, "sizes": [2, 3], "scale": 1}
    for before, now in ((node, told), (told, node)):
        assert compare({"model": before}, {"model": now}) == []
        nested = [{"model": {"_target_": "a.B", "body": each}} for each in (before, now)]
        assert compare(*nested) == []
    for name, value in {"bias": False, "sizes": [2], "scale": 1.5}.items():
        for before, now in ((node, {**told, name: value}), ({**told, name: value}, node)):
            changes = compare({"model": before}, {"model": now})
            assert changes
            assert all(change.refused and change.key.startswith(f"model.{name}") for change in changes)
    (change,) = compare({"model": node}, {"model": {**node, "bias": 1}})  # no bool
    assert change.refused
    (change,) = compare({"model": {"_target_": "gone.away"}}, {"model": {"_target_": "gone.away", "bias": True}})
    assert change.refused
    (change,) = compare({"model": {"_target_": "a.Other", "heads": 2}}, {"model": {**node, "bias": True}})[:1]
    assert change.refused


class Moved:
    """Targets of the same name, one of which has moved here."""

    @staticmethod
    def build(heads: int, bias: bool = False, scale: float = 1.0) -> None:
        """Its ``bias`` has another default than that of :func:`build`."""


def test_the_defaults_of_a_target_that_has_moved_are_those_of_the_run() -> None:
    moved = {"_target_": f"{__name__}.Moved.build", "heads": 2}
    for old in (f"{__name__}.build", "gone.away.build"):
        before = {"_target_": old, "heads": 2, "bias": True, "scale": 1.0}
        changes = compare({"model": before}, {"model": moved})
        assert [(change.key, change.refused) for change in changes] == [("model.bias", True), ("model._target_", False)]
        changes = compare({"model": {**before, "bias": False}}, {"model": moved})
        assert [(change.key, change.refused) for change in changes] == [("model._target_", False)]


def test_nothing_is_said_of_a_target_that_cannot_be_found(caplog: pytest.LogCaptureFixture) -> None:
    """Classes of a function, as programs and notebooks have them."""
    node = {"_target_": "__main__.main.<locals>.Net", "heads": 2}
    assert compare({"model": node}, {"model": node}) == []
    (change,) = compare({"model": node}, {"model": {**node, "bias": True}})
    assert change.refused
    assert caplog.messages == []


@pytest.mark.parametrize("group", ["model", "loss"])
def test_a_target_that_has_moved_is_compared_by_its_structure(group: str) -> None:
    before, now = ({group: dict[str, object](_target_=f"{place}.Net", heads=2)} for place in ("old", "new"))
    facts = [{group: {"": f"Net(dropout={dropout})"}} for dropout in (0.0, 0.1)]
    changes = compare(before, now, facts=(facts[0], facts[1]))
    assert [(change.key, change.refused) for change in changes] == [(group, True), (f"{group}._target_", False)]
    assert [change.refused for change in compare(before, now, facts=(facts[0], facts[0]))] == [False]
    now[group]["heads"] = 4  # which the user answers for, with what follows from it
    changes = compare(before, now, facts=(facts[0], facts[1]), allowed=[f"{group}.heads"])
    assert not any(change.refused for change in changes)


def test_a_setting_that_is_nan_is_no_change_and_nodes_in_lists_have_defaults_too() -> None:
    record = {"loss": {"_target_": "Net", "missing": float("nan")}}
    assert compare(json.loads(json.dumps(record)), record) == []
    (change,) = compare({"loss": {"scale": 1.0}}, {"loss": {"scale": True}})
    assert change.refused
    node = {"_target_": f"{__name__}.build", "heads": 2}
    plain, told = ({"model": {"_target_": "Net", "parts": [part]}} for part in (node, {**node, "bias": True}))
    assert compare(plain, told) == compare(told, plain) == []
    more = {"model": {"_target_": "Net", "parts": [node, node]}}
    changes = compare(told, more)
    assert changes
    assert all(change.refused for change in changes)


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"model": Headed(4)}, r"model: .*model: Headed\(heads=2\) -> Headed\(heads=4\)"),
    "shapes": ({"model": nn.Linear(FEATURES, CLASSES)}, r"resume=.*step-1: has no weight.*Use weights of this Linear"),
    "ignore_index": ({"loss": CrossEntropy(ignore_index=0)}, r"loss: .*ignore_index=-100.* -> .*=0"),
    "loss": ({"loss": Summed()}, r"loss\._target_: the run has changed .*CrossEntropy -> \S+Summed\."),
    "other samples": ({"data": DataSpec(train=_data(seed=1))}, r"data: .*sample 0 is not the one it was \(8 of 8"),
    "fewer samples": (
        {"data": DataSpec(train=_data()[:12])},
        r"samples=12: but .* counts its windows with .*samples=16",
    ),
    "unit": (
        {
            "data": DataSpec(train=_data(), lengths=[FEATURES] * 16),
            "batch": {"global_size": None, "tokens": 32, "micro_size": 4},
        },
        r"batch\.\S+: but .*counts its windows with",
    ),
    "order": ({"seed": 7}, r"seed=7: but .*step-1 counts its windows with seed=0"),
    "optimizer": (
        {"optim": {"optimizer": {"_target_": "torch.optim.NAdam"}}},
        "optimizer=NAdam: and .* has the state of AdamW",
    ),
    "an optimizer for some": (
        {"optim": {"groups": [{"dims": 2, "optimizer": {"_target_": "torch.optim.Muon"}}]}},
        "optimizer=AdamW, Muon: and .* has the state of AdamW",
    ),
    "groups": (
        {"optim": {"groups": [{"dims": 1, "lr": 0.1}]}},
        r"optim\.groups=.*: and .*step-1 has the state of optimizers whose groups take no parameters",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.fault("a resumed run whose model, loss, samples, their number or order, unit of a")
def test_what_changes_the_meaning_of_state_is_refused_before_the_run(
    gloo_world: Any, name: str, tmp_path: Path, says: Callable[[str], None]
) -> None:
    _train(tmp_path, steps=1)
    change, words = CHANGED[name]
    before = json.loads((tmp_path / "checkpoints" / "step-1" / "state.json").read_text())
    with pytest.raises(ConfigError, match=words) as caught:
        _train(tmp_path, steps=2, **change)
    says(str(caught.value))
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-1"]
    assert json.loads((tmp_path / "checkpoints" / "step-1" / "state.json").read_text()) == before


@pytest.mark.fault("a resumed run whose model or loss has changed, of the same shapes")
def test_the_user_may_answer_for_it(gloo_world: Any, tmp_path: Path, says: Callable[[str], None]) -> None:
    _train(tmp_path, steps=1)
    with pytest.raises(ConfigError) as caught:
        _train(tmp_path, steps=2, loss=CrossEntropy(ignore_index=0))
    says(str(caught.value))
    allowed = {"resume_allow": ["model", "loss"]}
    _train(tmp_path, steps=2, model=Headed(4), loss=CrossEntropy(ignore_index=0), **allowed)
    with pytest.raises(ConfigError, match=r"resume_allow=\[data\]"):
        _train(tmp_path, steps=3, model=Headed(4), loss=CrossEntropy(ignore_index=0), data=DataSpec(train=_data(3)))


@pytest.mark.fault("a resumed run with another rate, schedule, precision, length or interval")
def test_what_may_change_is_listed(
    gloo_world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], says: Callable[[str], None]
) -> None:
    _train(tmp_path, steps=1)
    schedule = {"_target_": "distaccum.train.schedules.Cosine", "warmup_steps": 0}
    _train(tmp_path, steps=2, precision="bf16", optim={"lr": 0.125}, schedule=schedule)
    said = " ".join(capsys.readouterr().out.split())
    says(said)
    assert "schedule._target_: distaccum.train.schedules.Constant -> distaccum.train.schedules.Cosine" in said
    assert "optim.lr: 0.003 -> 0.125; " in said
    assert "fp32 -> bf16" in said
    assert "trainer.max_steps: 1 -> 2 (saved by engine ddp" in said


def test_what_a_group_states_may_change(gloo_world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _train(tmp_path, steps=1, optim={"groups": [{"dims": 1, "lr": 0.1}]})
    _train(tmp_path, steps=2, optim={"groups": [{"dims": 1, "lr": 0.2}]})
    said = " ".join(capsys.readouterr().out.split())
    assert "changed since: optim.groups.0.lr: 0.1 -> 0.2; trainer.max_steps: 1 -> 2" in said
    assert "groups AdamW (the rest): 12; AdamW (dims 1, lr 0.2): 3" in said


def test_a_checkpoint_without_facts_is_taken(gloo_world: Any, tmp_path: Path) -> None:
    """As those of earlier versions."""
    record = {"model": {"_target_": "Net"}}
    assert compare(record, record, facts=({}, {"model": {"": "Net()"}})) == []


def test_samples_are_told_apart_and_random_ones_tell_nothing() -> None:
    class Cropped:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Tensor:
            return torch.full((3,), float(index)) + torch.rand(()) + random.random()  # noqa: S311

    state = torch.get_rng_state()
    one = fingerprint(DataSpec(train=_data()))
    assert torch.equal(state, torch.get_rng_state())
    saved = json.loads(json.dumps(one))
    assert differs(saved, fingerprint(DataSpec(train=_data()))) == ""
    assert "8 of 8" in differs(saved, fingerprint(DataSpec(train=_data(shift=0.5))))
    assert "5 samples, and before 16" in differs(saved, fingerprint(DataSpec(train=_data()[:5])))
    random_ones = fingerprint(DataSpec(train=Cropped()))
    assert random_ones["sketches"] == {}
    assert differs(random_ones, fingerprint(DataSpec(train=Cropped()))) == ""
    assert fingerprint(DataSpec(train=iter([1, 2]))) == {}
