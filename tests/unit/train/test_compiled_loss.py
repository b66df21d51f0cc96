"""A Trainer's loss is compiled with its model, and given back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import CompileConfig, RunConfig, Trainer, World
from distaccum.errors import ConfigError

DATA: Any = list(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).unbind())
SIZES: Any = {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 2}


class Squares:
    to_compile = "of_output"

    def of_output(self, output: Tensor) -> Tensor:
        return output.square().sum()

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.of_output(model(batch))


class Misnamed(Squares):
    to_compile = "of_outputs"


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """torch.compile without what another test has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_name_that_is_none_is_refused_before_a_process_group() -> None:
    with pytest.raises(ConfigError, match="to_compile=of_outputs: names nothing of it"):
        Trainer(nn.Linear(4, 1), Misnamed(), DATA, compile=CompileConfig(name="model", backend="eager"), **SIZES)


@pytest.mark.filterwarnings("ignore")  # torch's own, of torch.compile
@pytest.mark.parametrize("compiles", [True, False])
def test_it_is_compiled_in_the_run_and_given_back(
    gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, compiles: bool
) -> None:
    caplog.set_level(logging.INFO, "distaccum.engines.compiled")
    loss, off = Squares(), {"console": False, "wandb": {"mode": "disabled"}}
    named = CompileConfig(name="model", backend="eager", loss=compiles)
    config = RunConfig.from_dict({"metrics": off, "checkpoint": {"every": 0}, "trainer": {"verify": "never"}})
    Trainer(nn.Linear(4, 1), loss, DATA, compile=named, config=config, run_dir=tmp_path, **SIZES).fit()
    (told,) = [one.getMessage() for one in caplog.records if one.name == "distaccum.engines.compiled"]
    assert told == f"compiled {1 + compiles} graphs of {1 + compiles} parts in the first windows"
    assert not vars(loss)
