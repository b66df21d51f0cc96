"""A ``Trainer`` with a loss that compares samples: what it refuses, what an evaluation gives, what it measures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import default_collate

from distaccum import Accumulator, DataSpec, Trainer, World
from distaccum.errors import ConfigError, ResourceError
from distaccum.tools.flops import ModelFlops
from distaccum.train.checks import check_loss
from distaccum.train.evaluate import Evaluation
from tests.support import compared
from tests.support.accumulators import over_sgd
from tests.support.runs import settings
from tests.support.threads import run_ranks

HELD_OUT = 23
STATE = compared.make_model("contrast").state_dict()


def _data(dtype: torch.dtype = torch.float64) -> DataSpec:
    samples = compared.samples(40 + HELD_OUT, dtype)
    return DataSpec(train=samples[:40], eval_dataset=samples[40:])


def _of_the_whole_set() -> dict[str, float]:
    loss, model = compared.Contrast(), compared.make_model("contrast")
    batch = default_collate(_data().eval_dataset)
    with torch.no_grad():
        scores = loss.scores(loss.represent(model, batch))
    return {f"eval_{name}": float(score) / HELD_OUT for name, score in scores.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 4, 30])
def test_an_evaluation_compares_the_whole_held_out_set(ranks: int, micro: int) -> None:
    def rank(world: World) -> Any:
        loss, model = compared.Contrast(), compared.make_model("contrast")
        model.load_state_dict(STATE)
        acc = over_sgd(model, 1.0, (8, 4), count=loss.count, world=world)
        found = Evaluation(acc.engine, _data(), loss, world, micro_batch_size=micro).run()
        acc.close()
        return found

    for found in run_ranks(ranks, rank):
        assert found == pytest.approx(_of_the_whole_set(), rel=1e-12)


class InOrder(compared.Contrast):
    """Its loss is the first sample's number, and its score is whether all come in the dataset's order."""

    score_names = ("loss", "ordered")

    def represent(self, model: nn.Module, batch: Any) -> Any:
        return batch["number"]

    def scores(self, representations: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        ordered = torch.equal(representations, torch.arange(len(representations)))
        return {"loss": representations[0].float(), "ordered": torch.tensor(float(ordered * len(representations)))}


def test_the_set_comes_in_the_datasets_order() -> None:
    data = DataSpec(train=[], eval_dataset=[{"number": torch.tensor(i)} for i in range(HELD_OUT)])

    def rank(world: World) -> Any:
        model = nn.Linear(1, 1)
        acc = Accumulator(
            model, SGD(model.parameters(), lr=1.0), global_batch_size=2, micro_batch_size=1, count=len, world=world
        )
        loss: Any = InOrder()
        loss.count = lambda batch: len(batch["number"])
        return Evaluation(acc.engine, data, loss, world, micro_batch_size=4).run()

    for found in run_ranks(3, rank):
        assert found == {"eval_loss": 0.0, "eval_ordered": 1.0}


class TooLarge(compared.Contrast):
    def scores(self, representations: Any) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("no memory")


def test_a_held_out_set_that_is_too_large_to_compare_is_said(gloo_world: World) -> None:
    loss, model = TooLarge(), compared.make_model("contrast")
    acc = over_sgd(model, 1.0, (8, 4), count=loss.count, world=gloo_world)
    with pytest.raises(ResourceError, match=r"comparison of a held-out set's .*no memory\. Lower trainer.eval_samples"):
        Evaluation(acc.engine, _data(), loss, gloo_world, micro_batch_size=4).run()


def test_a_trainer_trains_with_it(gloo_world: World, tmp_path: Path) -> None:
    config = settings((20, 4), {"max_steps": 30, "eval_every": 30}, optim={"lr": 0.05}, schedule={})
    model = compared.make_model("contrast", torch.float32)
    before = _of_the_whole_set()
    results = Trainer(model, compared.Contrast(), _data(torch.float32), config=config, run_dir=tmp_path / "run").fit()
    assert results.keys() == before.keys()
    assert results["eval_loss"] < before["eval_loss"] - 0.5


class Scoreless(compared.Contrast):
    def scores(self, model: nn.Module, batch: Any) -> Any:  # type: ignore[override]
        return {}


class OfBatches(compared.Contrast):
    def __call__(self, model: nn.Module, batch: Any) -> Any:  # type: ignore[override]
        return 0


class OfModels(compared.Contrast):
    def represent(self, model: nn.Module) -> Any:  # type: ignore[override]
        return 0


class OfText(compared.Contrast):
    represent: Any = "text"


REFUSED: dict[str, tuple[Any, str]] = {
    "a call of a batch": (
        OfBatches(),
        r"loss=OfBatches: __call__ takes other .*Write __call__\(self, representations\)",
    ),
    "a representation of no batch": (OfModels(), r"represent takes other .*Write represent\(self, model, batch\)"),
    "scores of a batch": (Scoreless(), r"scores takes other .*Write scores\(self, representations\)"),
    "no function": (OfText(), "has a represent that cannot be called"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_without_its_interface_is_refused(case: str) -> None:
    loss, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        check_loss(loss)


def test_operations_are_those_of_one_forward_and_backward(gloo_world: World) -> None:
    loss, model = compared.Contrast(), compared.make_model("contrast", torch.float32)
    acc = over_sgd(model, 1.0, (8, 4), count=loss.count, world=gloo_world)
    window = next(iter(acc.windows(compared.samples(8, torch.float32))))
    flops = ModelFlops(compared.make_model("contrast", torch.float32), loss, gloo_world.device)
    layers = compared.FEATURES * 8, 8 * compared.WIDTH
    # Two towers; the first layer's input needs no gradient.
    assert flops.of_sample(window.plain) == 2 * (2 * 2 * layers[0] + 3 * 2 * layers[1])
