import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException

from distaccum.config.command_line import register_aliases, take_flag
from distaccum.config.precision import ALIASES
from distaccum.config.schema import conf_dir
from distaccum.errors import ConfigError
from distaccum.tools.command_line import Composed, flags_as_settings, refused
from distaccum.tools.command_line import composed as composed_of
from tests.support.commands import ROOT


@pytest.mark.parametrize(
    ("arguments", "others", "value"),
    [
        (["a=1"], ["a=1"], None),
        (["--check", "a=1"], ["a=1"], ""),
        (["a=1", "--check=2"], ["a=1"], "2"),
        (["--check=2", "--check=3"], [], "3"),
        (["--checked"], ["--checked"], None),
    ],
)
def test_a_flag_is_taken_off_the_command_line(arguments: list[str], others: list[str], value: str | None) -> None:
    assert take_flag(arguments, "--check") == (others, value)


@cache
def _composed(choices: tuple[str, ...]) -> Composed | None:
    return composed_of(choices)


def _compose(arguments: Sequence[str]) -> Composed | None:
    """Each choice of groups is composed once for all tests here: it takes a third of a second."""
    return _composed(tuple(word for word in arguments if word.startswith(("model=", "data=", "optim=", "modle."))))


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (out := ["~callbacks", "~experiment", "~optim.optimizer.betas", "~trainer.max_epochs", "~schedule.x"], out),
        (["--optim.lr=0.01", "--seed=1"], ["optim.lr=0.01", "seed=1"]),  # as W&B's agent has ${args}
        (["--optim.lr", "0.01", "--seed=1"], ["optim.lr=0.01", "seed=1"]),
        (["--optim.clip_value", "-1"], ["optim.clip_value=-1"]),
        (["--seed=3", "--model=cnn"], ["seed=3", "model=cnn"]),
        (["model=cnn", "--model.channels=4"], ["model=cnn", "model.channels=4"]),
        (["--experiment=gpt2-124m-openwebtext"], ["experiment=gpt2-124m-openwebtext"]),  # not --experimental-rerun
        (["--deterministic", "--seed=1"], ["deterministic=true", "seed=1"]),
        (["--deterministic", "false"], ["deterministic=false"]),
        (["--optim.optimizer.betas=[0.9,0.99]"], ["optim.optimizer.betas=[0.9,0.99]"]),
        (["-m", "--optim.lr=1,2"], ["-m", "optim.lr=1,2"]),
        (["--cfg", "job", "--trainer=default"], ["--cfg", "job", "trainer=default"]),
        (["--multi", "seed=1", "-cjob", "--check=2"], ["--multi", "seed=1", "-cjob", "--check=2"]),  # Hydra's, and ours
    ],
)
def test_a_flag_that_names_a_setting_is_that_setting(given: list[str], settings: list[str]) -> None:
    assert flags_as_settings(given, own=("--check",), compose=_compose) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--optim.lrr=1"], "--optim.lrr=1: no such setting; did you mean optim.lr or optim? `--cfg job` prints"),
        (["--chek"], "--chek: no such flag or setting; did you mean --check"),
        (["--modle=cnn"], "--modle=cnn: no such flag or setting; did you mean --model"),
        (["-x"], "-x: no such flag or setting. `--help` says"),
        (["--optim.lr"], "--optim.lr: has no value. Write --optim.lr=VALUE"),
        (["--optim.lr", "seed=1"], "--optim.lr: has no value"),
        (
            ["--model.n_head=4", "model=cnn"],
            "--model.n_head=4: a setting of model=gpt and 4 more, not of model=cnn. Use model=gpt",
        ),
        (["--engine.stage=3"], "--engine.stage=3: a setting of engine=deepspeed, not of engine=ddp"),
        (["~optim.clip_norm"], "~optim.clip_norm: takes the setting out, and its default, 1.0, would count. Write "),
        (["~trainer.max_steps=auto"], "~trainer.max_steps=auto: takes the setting out, and its default, auto, would"),
        (["~engine.stage"], "~engine.stage: takes the setting out, and its default, "),
        (["~schedule"], "~schedule: takes the setting out, and its defaults would count. Choose one of schedule=con"),
        (["~metrics.wandb"], "~metrics.wandb: takes the setting out, and its defaults would count"),
    ],
)
def test_a_flag_that_names_none_is_refused_by_name(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags_as_settings(given, own=("--check",), compose=_compose)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        (
            ["model=cnn"],
            "model.n_head",
            "model.n_head=4: a setting of model=gpt and 4 more, not of model=cnn. Use model=gpt",
        ),
        (["model=cnn"], "model.chanels", "no such setting; did you mean channels?"),
        ([], "model.channels", "model.channels=4: a setting of model=cnn, not of model=gpt. Use model=cnn"),
        pytest.param(
            ["optim=sgd"], "optim.optimizer.momentun", "no such setting; did you mean momentum?", marks=pytest.mark.slow
        ),
        ([], "optim.optimizer.amsgrad", "but torch.optim.AdamW takes it. Add it with +optim.optimizer.amsgrad=4"),
        (["data=labelled"], "data.vocab_size", "labelled takes it. Add it with +data.vocab_size=4"),  # others state it
        pytest.param(["data=text"], "data.pth", "no such setting; did you mean path?", marks=pytest.mark.slow),
        (["modle.channels=3", "model=none"], "trainer.max_step", "did you mean trainer.max_steps"),
        (["model='cnn','gpt'"], "model.n_head", "not of model=cnn"),  # the first of a sweep
    ],
)
def test_suggestions_are_of_the_groups_that_are_chosen(given: list[str], key: str, message: str) -> None:
    there = _compose(given)
    assert there is not None
    assert message in str(there.unknown(key, 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lr=0.1", "lr=0.1: no such setting. Write optim.lr=0.1"),
        ("batch_size=64", "batch_size=64: no such setting. Write batch.global_size=64"),
        ("--max-grad-norm=1", "--max-grad-norm=1: no such setting. Write optim.clip_norm=1"),
        ("bf16=true", "bf16=true: no such setting. Write precision=bf16"),
        (
            "gradient_accumulation_steps=8",
            "no such setting. Write batch.global_size, with batch.micro_size for what fits",
        ),
        ("--output_dir", "--output_dir: no such setting. Write hydra.run.dir=VALUE"),
        ("model=cn", "model=cn: no such choice; did you mean cnn? Use one of cnn, gpt"),
        (
            "metrics=[wandb,jsonk]",
            "metrics=jsonk: no such choice; did you mean jsonl? Use one of jsonl, mlflow, tensorboard",
        ),
        ("trainer.max_stepz=3", "no such setting; did you mean trainer.max_steps"),
        ("~optim.clip_norm", "~optim.clip_norm: takes the setting out"),
        (
            "callbacks=[early_stop,tests/unit/train/test_by_epoch.py]",
            "is a Python file, with Seen. Write +callbacks.seen._target_=tests.unit.train.test_by_epoch.Seen",
        ),
        ("trainer.callbacks=nowhere.py", "trainer.callbacks=nowhere.py: no such file"),
        (
            "model=tests/unit/train/test_trainer.py:Bare",
            "_target_: tests.unit.train.test_trainer.Bare into conf/model/bare.yaml, and --config-dir conf model=bare",
        ),
        ("--check model.n_head=4 model=cnn", "model.n_head=4: a setting of model=gpt"),
        ("optim.lr=3e-4 model=cnn batch=tokens --check=2 -v precision=bf16 +model.x=1 metrics=[wandb,jsonl]", None),
        ("-m lr=0.1", None),
        ("hydra.run.dir=somewhere lr=0.1", None),  # whose status tells it, too
        ("--config x", "command line: ambiguous option: --config could match --config-path, --config-name"),
        ("data.seq_len=${nothing.here} lrr=1", "lrr=1: no such setting"),  # composed, and not yet resolved
        ("optim.lr=0,001 mode=x", "optim.lr=0,001: several values, as a sweep has them. Write a point in a number"),
    ],
)
def test_a_mistyped_command_line_is_refused_before_torch_is_there(given: str, message: str | None) -> None:
    found = refused(given.split())
    assert (message is None and found is None) or (message is not None and message in str(found))


def test_the_answer_needs_no_torch() -> None:
    program = "import sys; import distaccum.train.__main__ as job; sys.argv[1:] = ['lr=0.1']\n"
    program += "try: job.main()\nfinally: assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "distaccum: configuration error: lr=0.1: no such setting. Write optim.lr=0.1\n"


@pytest.mark.slow
def test_groups_in_a_folder_of_ones_own_are_known(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: torch.nn.Linear\nin_features: 4\nout_features: 3\n")
    there = composed_of(["--config-dir", str(tmp_path), "model=mine"])
    assert there is not None
    assert "model.in_features" in there
    assert "did you mean out_features or" in str(there.unknown("model.out_feature", 1))


@pytest.fixture
def composed() -> Iterator[Callable[..., Any]]:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield lambda *overrides: compose("config", register_aliases(overrides)).precision.name


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_of_a_precision_composes_the_file_of_that_name(
    composed: Callable[..., Any], alias: str, name: str
) -> None:
    assert composed(f"precision={alias}") == name
    assert composed(f"precision='{alias}'") == name


def test_a_number_in_a_sweep_is_quoted_and_nothing_else_changes() -> None:
    given = ["-m", "precision=32,bf16,32", "precision='32'", "batch.global_size=32", "precision=16-mixed"]
    assert register_aliases(["model.options={num_labels: 3}"]) == ["++model.options={num_labels: 3}"]
    expected = ["-m", "precision='32',bf16,'32'", "precision='32'", "batch.global_size=32", "precision=16-mixed"]
    assert register_aliases(given) == expected


def test_there_are_aliases_of_a_precision_and_of_nothing_else(composed: Callable[..., Any]) -> None:
    for other in ("precision=fp4", "optim=no"):
        with pytest.raises(MissingConfigException):
            composed(other)
