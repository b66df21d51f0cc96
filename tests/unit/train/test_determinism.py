"""What a Trainer switches on for its run alone: deterministic kernels, and a compiled loss, which it gives back."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import CompileConfig, ConfigError, CrossEntropy, DataSpec, MisuseError, RunConfig, Trainer, World
from distaccum.train import determinism
from tests.support.runs import settings

pytestmark = pytest.mark.usefixtures("compiler")

SAMPLES = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 3)) for i in range(8)]


class _Model(nn.Module):
    """Notes whether torch's deterministic kernels are on; with ``puts`` it calls one that has no such form anywhere."""

    def __init__(self, *, puts: bool = False) -> None:
        super().__init__()
        self.layer, self._puts = nn.Linear(4, 3), puts
        self._seen: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self._seen.add(torch.are_deterministic_algorithms_enabled())
        if self._puts:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        logits: Tensor = self.layer(x)
        return logits


def _fit(model: nn.Module, folder: Path, *, deterministic: bool) -> None:
    config = settings((4, 2), {"max_steps": 1, "eval_every": 0}, deterministic=deterministic, schedule={})
    data = DataSpec(train=SAMPLES, eval_dataset=None, description="")
    Trainer(model, CrossEntropy(), data, config=config, run_dir=folder).fit()


@pytest.mark.parametrize("wanted", [False, True])
def test_kernels_are_deterministic_within_the_run_alone(gloo_world: World, wanted: bool, tmp_path: Path) -> None:
    model = _Model()
    _fit(model, tmp_path, deterministic=wanted)
    assert model._seen == {wanted}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_kernel_that_has_no_such_form_is_named_before_a_weight_moves(gloo_world: World, tmp_path: Path) -> None:
    model = _Model(puts=True)
    before = model.layer.weight.detach().clone()
    message = (
        "deterministic=true: put_ has no deterministic implementation on this device. Replace it in the model or the "
        "loss, or use deterministic=false"
    )
    with pytest.raises(MisuseError) as error:
        _fit(model, tmp_path, deterministic=True)
    assert str(error.value) == message
    assert torch.equal(model.layer.weight, before)
    assert message in json.loads((tmp_path / "status.json").read_text())["reason"]
    assert not torch.are_deterministic_algorithms_enabled()
    _fit(_Model(puts=True), tmp_path / "without", deterministic=False)


def test_on_a_gpu_the_environment_has_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    determinism.check(torch.device("cpu"))
    with pytest.raises(ConfigError, match="deterministic=True: cuBLAS needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the"):
        determinism.check(torch.device("cuda"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    determinism.check(torch.device("cuda"))


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
    assert told == f"compiled {1 + compiles} graphs of {1 + compiles} parts in the first steps"
    assert not vars(loss)
