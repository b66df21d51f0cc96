"""The model groups have GPT-2's published sizes, and every experiment plans and trains."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from distaccum.config.instantiate import build
from distaccum.config.schema import conf_dir, plain
from distaccum.tools.plan.command import plan
from tests.support.commands import metrics, succeed

# OpenAI's own models, by the elements of their parameters.
PUBLISHED = {"gpt2-124m": 124_439_808, "gpt2-350m": 354_823_168, "gpt2-774m": 774_030_080, "gpt2-1.5b": 1_557_611_200}
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("gpt2-*.yaml"))
TOKENS = ("data=tokens", "data.path=unused", "data.vocab_size=50257", "data.seq_len=1024")


def _composed(name: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return plain(compose(name, list(overrides)))


def _largest_later(names: Iterable[str]) -> list[Any]:
    """The smallest in the default run, the others with -m slow."""
    return [name if "124m" in name else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _largest_later(PUBLISHED))
def test_a_model_group_has_the_published_number_of_parameters(name: str) -> None:
    sizes = []
    for padding in ("1", "64"):
        node = _composed("config", *TOKENS, f"model={name}", f"model.vocab_multiple={padding}")["model"]
        with torch.device("meta"):
            model: nn.Module = build("model", node)
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sizes == [PUBLISHED[name], PUBLISHED[name] + 47 * node["n_embd"]]
    assert _composed("config", *TOKENS, f"model={name}")["model"]["vocab_multiple"] == 64


@pytest.mark.parametrize("name", _largest_later(EXPERIMENTS))
def test_an_experiment_is_a_whole_run_that_plans(name: str) -> None:
    values = _composed("plan", f"experiment={name}", "data.path=unused", "cluster.micro_step_ms=50")
    assert values["data"]["_target_"] == "distaccum.data.datasets.tokens.tokens"
    assert values["precision"]["name"] == "bf16"
    assert values["loss"]["chunk"] == 2048
    assert values["optim"]["groups"] == [{"dims": [0, 1], "weight_decay": 0.0}]
    assert values["batch"]["global_size"] * values["data"]["seq_len"] == 491_520  # tokens an update, as in nanoGPT
    size = name.removesuffix("-openwebtext")
    biases = 11 * values["model"]["n_layer"] * values["model"]["n_embd"] + values["model"]["n_embd"]
    padded = 47 * values["model"]["n_embd"]
    values.pop("plan")
    found = plan(values)
    assert found["model"]["parameters"] == PUBLISHED[size] - biases + padded
    assert found["batch"]["accumulation"] == math.ceil(30 / values["batch"]["micro_size"])  # of 16 ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == EXPERIMENTS[0] else pytest.mark.heavy) for name in EXPERIMENTS]
)
def test_an_experiment_trains_shrunken(name: str, tmp_path: Path) -> None:
    (np.arange(2000) % 5).astype("<u2").tofile(tmp_path / "shard.bin")
    shrunken = ("model.n_layer=1", "model.n_head=2", "model.n_embd=16", "data.seq_len=16", "data.vocab_size=2001")
    batch = ("batch.global_size=6", "batch.micro_size=2", "optim.lr=0.01", "schedule.warmup_steps=1")
    run = (f"data.path={tmp_path / 'shard.bin'}", "trainer.max_steps=2", "trainer.log_every=1", "metrics=jsonl")
    succeed(f"experiment={name}", *shrunken, *batch, *run, f"hydra.run.dir={tmp_path / 'run'}", world=2)
    first, last = metrics(tmp_path / "run")
    assert first["loss"] == pytest.approx(math.log(2001), rel=0.01)
    assert last["step"] == 2
    assert last["loss"] < first["loss"] - 0.1  # of the same five tokens
