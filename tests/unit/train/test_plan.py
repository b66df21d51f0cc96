"""``distaccum-plan``: what it counts, measures, prints and writes, and what it says where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distaccum.config.extras import install_command
from distaccum.config.schema import RunConfig
from distaccum.errors import ConfigError
from distaccum.train import command, plan
from tests.support.commands import ROOT, TINY, run, succeed

PLAN = ROOT / "launch" / "plan.py"


def test_the_command_plans_a_model_larger_than_the_machine(tmp_path: Path) -> None:
    """A GPT of 39 billion parameters, which would take 155 GB."""
    finished = succeed(
        "engine=fsdp2",
        "model.n_layer=48",
        "model.n_embd=8192",
        "model.n_head=64",
        "batch.global_size=4",
        "batch.micro_size=1",
        "cluster.micro_step_ms=1000",
        f"hydra.run.dir={tmp_path}",
        script=PLAN,
        COLUMNS="100",
    )
    found = json.loads((tmp_path / "plan.json").read_text())
    block = 12 * 8192**2 + 2 * 8192
    assert found["block_sizes"] == [block] * 48
    assert found["model"] == {"parameters": 48 * block + 257 * 8192, "tensors": 290, "blocks": 48}
    assert found["memory"]["optimizer state"] == 8 * found["model"]["parameters"] / 16
    assert found["batch"]["idle"] == 12
    assert "12 ranks have nothing to do" in finished.stdout
    assert "*16" in finished.stdout
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_measures_here_where_it_is_told_no_time(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere" / "found.json"
    succeed(*TINY, "optim=sgd", f"plan.json={file}", f"hydra.run.dir={tmp_path}", script=PLAN)
    found = json.loads(file.read_text())
    assert found["cluster"]["micro_step_ms"] > 0
    assert found["cluster"]["update_ms"] > 0
    angles = 2 * 16 * 4  # the cosine and sine at 16 positions, of 4 pairs of channels
    assert found["memory"]["parameters"] == 4 * (7216 + angles)
    assert found["memory"]["optimizer state"] == 4 * 7216  # momentum


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    """Whether Hydra finds it, or the cluster's settings."""
    for argument, message in (
        ("cluster.link_gbps=-1", "plan: configuration error: cluster.link_gbps=-1: must be a positive finite number"),
        ("engine=fsdp3", "plan: configuration error: engine=fsdp3: no such choice"),
    ):
        finished = run(argument, f"hydra.run.dir={tmp_path / 'refused'}", script=PLAN)
        assert (finished.returncode, finished.stdout) == (2, "")
        assert finished.stderr.startswith(message)
        assert finished.stderr.count("\n") == 1
        assert not (tmp_path / "refused").exists()


def test_a_budget_of_tokens_cannot_be_planned_without_the_data() -> None:
    values = {"cluster": {"micro_step_ms": 1.0}, "batch": {"global_size": None, "tokens": 4096}}
    with pytest.raises(ConfigError, match=r"batch\.tokens=4096: cannot be planned without the data"):
        plan.plan(values)


def test_a_plot_is_an_error_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = tmp_path / "plan.png"
    assert command.plot_file("plan.plot", None, default) == default
    assert command.plot_file("plan.plot", "my.png", default) == Path("my.png")
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert command.plot_file("plan.plot", None, default) is None
    assert capsys.readouterr().err == f"no plan.png: matplotlib is missing; {install_command('plot')}\n"
    with pytest.raises(ConfigError, match=r"plan\.plot=my\.png: matplotlib is missing"):
        command.plot_file("plan.plot", "my.png", default)


def test_the_state_of_several_optimizers_is_counted_by_what_each_steps() -> None:
    model = {"_target_": "distaccum.models.gpt.GPT", "vocab_size": 257, "seq_len": 16}
    muon = {"match": "blocks.*", "dims": 2, "optimizer": {"_target_": "torch.optim.Muon"}}
    groups = [{"dims": 1, "weight_decay": 0.0}, muon]
    config = RunConfig.from_dict(
        {"model": model | {"n_layer": 1, "n_head": 2, "n_embd": 16}, "optim": {"groups": groups}}
    )
    rest, thin, matrices = 257 * 16, 3 * 16, 12 * 16**2
    assert [group.parameters for group in plan.groups_of(config)] == [rest, thin, matrices]
    expected = (8 * (rest + thin) + 4 * matrices) / (rest + thin + matrices)
    assert plan.moments_of(config) == pytest.approx(expected)
