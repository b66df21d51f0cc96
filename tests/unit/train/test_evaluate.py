"""Evaluations in one process: who loads the held-out samples, in which batches, of which weights; no trace is left."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console  # noqa: F401  its import draws from `random`, and the first of two runs would do it
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.data.held_out import HeldOut, evaluation_workers
from distaccum.data.spec import WorkerOptions
from distaccum.distributed.world import World
from distaccum.errors import ConfigError, DataError, MisuseError, ResourceError
from distaccum.train.callbacks import EarlyStopping, ReduceLROnPlateau
from tests.support.accumulators import Loss, Of
from tests.support.commands import metrics
from tests.support.optional import Library
from tests.support.runs import settings
from tests.support.schedule_free import ScheduleFree, averaged

classification = Library("torchmetrics.classification")


def _samples(size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return [(x, x[:3].argmax()) for x in torch.randn(size, 4, generator=generator)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def _trainer(
    folder: Path,
    data: Any,
    loss: Any = None,
    *,
    more: dict[str, Any] | None = None,
    metrics: Any = None,
    callbacks: Any = (),
    **trainer: Any,
) -> Trainer:
    config = settings((8, 4), {"max_steps": 4, "eval_every": 1, **trainer}, **(more or {}))
    loss = loss or CrossEntropy()
    return Trainer(_model(), loss, data, config=config, metrics=metrics, callbacks=callbacks, run_dir=folder)


def in_fp64(model: nn.Module, samples: Any) -> dict[str, float]:
    """The mean loss and the accuracy, one process, the whole set at once."""
    x, labels = (torch.stack(parts) for parts in zip(*samples, strict=True))
    logits = model.double()(x.double()).detach()
    found = {"eval_loss": nn.functional.cross_entropy(logits, labels), "eval_accuracy": (logits.argmax(1) == labels)}
    return {name: float(value.double().mean()) for name, value in found.items()}


class Random:
    """Samples that draw from every generator of the process that loads them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x = torch.rand(4) + random.random() + float(np.random.rand())  # noqa: NPY002, S311
        return x, torch.tensor(index % 3)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.heavy)])
def test_a_run_with_evaluations_ends_in_the_weights_of_one_without(
    workers: int, gloo_world: World, tmp_path: Path
) -> None:
    data = DataSpec(train=Random(40), eval_dataset=Random(7))
    weights = []
    for eval_every in (0, 1):
        trainer = _trainer(tmp_path / str(eval_every), data, eval_every=eval_every, num_workers=workers)
        trainer.fit()
        weights.append(torch.cat([p.detach().flatten() for p in trainer._components.model.parameters()]))
    assert torch.equal(*weights)


class Told:
    """Samples that say what became of the process that loads them."""

    def __init__(self, size: int) -> None:
        self.size, self.opened = size, False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        ignores = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        blocks = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return torch.tensor([info is not None, self.opened, ignores and blocks], dtype=torch.float32)


def _open(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened = True


class Sums:
    def count(self, batch: Tensor) -> dict[str, float]:
        return dict.fromkeys(("worker", "opened", "protected"), float(len(batch)))

    def __call__(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        zero = 0 * model(torch.zeros(1, 4)).sum()
        return {name: batch[:, i].sum() + zero for i, name in enumerate(("worker", "opened", "protected"))}


def test_held_out_samples_are_loaded_as_the_persons_own_loader_loads(gloo_world: World, tmp_path: Path) -> None:
    loader = DataLoader(Told(16), batch_size=4, num_workers=1, worker_init_fn=_open, prefetch_factor=3, timeout=60)  # type: ignore[arg-type]  # it has len() and [index]
    results = _trainer(tmp_path, DataSpec(train=loader, eval_dataset=Told(7)), Sums(), max_steps=1).fit()
    assert results == {"eval_loss": 3.0, "eval_worker": 1.0, "eval_opened": 1.0, "eval_protected": 1.0}


def test_of_a_streams_loader_all_is_taken_but_what_divides_the_stream() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    loader = DataLoader(Stream(), batch_size=4, num_workers=2, worker_init_fn=_open, prefetch_factor=3, timeout=9)
    expected = WorkerOptions(num_workers=2, prefetch_factor=3, timeout=9)
    assert evaluation_workers(DataSpec(train=loader), 0) == expected


class Dies(Told):
    """Samples that name the process that loads them; the sixth kills it."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3,), float(os.getpid()))


def test_a_loading_process_that_dies_is_named(gloo_world: World, tmp_path: Path) -> None:
    data = DataSpec(train=Told(16), eval_dataset=Dies(9))
    with pytest.raises(DataError, match=r"the loading process \d+ was killed by SIGKILL.* while the held-out data"):
        _trainer(tmp_path, data, Sums(), max_steps=1, num_workers=1).fit()


def _held_out(data: Any, world: World, micro_batch_size: int, collate: Any, workers: WorkerOptions) -> HeldOut:
    sizes: Any = {"limit": None, "micro_batch_size": micro_batch_size, "seed": 3}
    return HeldOut(data, world, collate=collate, workers=workers, **sizes)


class RunsOut(Told):
    """Samples of an iterator that has too few of them, as ``next()`` says by ``StopIteration``."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return next(iter(range(index, 5)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_stop_early_are_no_end_of_the_held_out_data(num_workers: int, gloo_world: World) -> None:
    """Torch passes a dataset's ``StopIteration`` on, and a ``for`` takes that for the end."""
    held_out = _held_out(RunsOut(9), gloo_world, 2, list, WorkerOptions(num_workers=num_workers))
    with pytest.raises(DataError, match=r"the held-out data ended after 2 batches, and .* StopIteration"):
        list(held_out.batches(in_lockstep=False))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loading_processes_stay_where_they_are_slow_to_start(method: str, gloo_world: World) -> None:
    workers = WorkerOptions(num_workers=1, multiprocessing_context=method)
    held_out = _held_out(Dies(6), gloo_world, 4, None, workers)
    first, second = ({float(batch[0, 0]) for batch in held_out.load([[0], [1]])} for _ in range(2))
    assert len(first) == len(second) == 1
    assert (first == second) == (method == "spawn")
    assert float(os.getpid()) not in first | second
    with pytest.raises(DataError, match=r"the loading process \d+ was killed by SIGKILL"):
        list(held_out.batches(in_lockstep=False))  # also where the process was started by an evaluation before


class Drawn(Told):
    """Samples that are drawn from the global generators."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()])  # noqa: NPY002, S311  as users do


@pytest.mark.parametrize("others", ["fork", pytest.param("spawn", marks=pytest.mark.heavy)])
@pytest.mark.slow
def test_what_held_out_samples_draw_depends_on_no_process_and_no_evaluation_before(
    gloo_world: World, others: str
) -> None:
    def drawn(number: int, method: str, size: int = 1) -> list[Tensor]:
        workers = WorkerOptions(num_workers=number, multiprocessing_context=method)
        worlds = [World(rank=rank, size=size, device=torch.device("cpu")) for rank in range(size)]
        ranks = [_held_out(Drawn(8), world, 2, torch.stack, workers) for world in worlds]
        return [torch.stack([batch for one in ranks for batch in one.load(one._own_ids())]) for _ in range(2)]

    expected, again = drawn(1, "fork")
    assert len(expected.unique()) == expected.numel()
    assert all(torch.equal(one, expected) for one in (again, *drawn(2, others)))
    assert torch.equal(drawn(1, "fork", size=2)[0], expected[[0, 2, 1, 3]])


@pytest.mark.parametrize(("samples", "size"), [(23, 4), (13, 4), (12, 4), (5, 1), (8, 2), (2, 1), (1, 1)])
def test_whole_batches_are_dealt_to_the_ranks(samples: int, size: int) -> None:
    """``size`` is 4, or less where three ranks would not all have a batch."""
    worlds = [World(rank=rank, size=3, device=torch.device("cpu")) for rank in range(3)]
    ranks = [_held_out(range(samples), world, 4, list, WorkerOptions()) for world in worlds]
    expected = [list(range(first, min(first + size, samples))) for first in range(0, samples, size)]
    found = [[batch for batch, is_own in one.batches(in_lockstep=True) if is_own] for one in ranks]
    assert found == [expected[rank::3] for rank in range(3)]
    assert {len(list(one.batches(in_lockstep=True))) for one in ranks} == {-(-len(expected) // 3)}
    assert [list(one.batches(in_lockstep=False)) for one in ranks] == [[(b, True) for b in own] for own in found]


HELD_OUT = {"news": _samples(11, 1), "code": _samples(6, 2)}


def _last_record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return found


@pytest.mark.parametrize("limit", [None, 5, 100])
def test_an_evaluation_alone_of_sets_by_name(limit: int | None, gloo_world: World, tmp_path: Path) -> None:
    """Ground truth: fp64, the first ``limit`` samples of each set at once."""
    data = DataSpec(train=_samples(40, 0), eval_dataset=HELD_OUT)
    metrics: Any = {"acc": classification.MulticlassAccuracy(num_classes=3, average="micro")}
    trainer = _trainer(tmp_path, data, metrics=metrics, max_steps=0, eval_samples=limit)
    results = trainer.fit()
    expected = {}
    for name, samples in HELD_OUT.items():
        for result, value in in_fp64(_model(), samples[:limit]).items():
            expected[result.replace("eval_", f"eval_{name}_")] = value
        expected[f"eval_{name}_acc"] = expected[f"eval_{name}_accuracy"]
    assert results == pytest.approx(expected, rel=1e-6)
    sizes = {f"eval_{name}_samples": min(limit or 100, len(samples)) for name, samples in HELD_OUT.items()}
    start = dict.fromkeys(("step", "window", "epoch", "samples", "tokens"), 0)
    assert _last_record(tmp_path) == start | results | sizes
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", 0)
    weights = list(trainer._components.model.parameters())
    assert all(torch.equal(*pair) for pair in zip(weights, _model().parameters(), strict=True))


def test_an_evaluation_alone_saves_nothing_and_marks_no_best(gloo_world: World, tmp_path: Path) -> None:
    data = DataSpec(train=_samples(40, 0), eval_dataset=_samples(9, 1))
    saves = {"checkpoint": {"every": 2, "best": "eval_loss"}}
    first, weights = tmp_path / "first", str(tmp_path / "first" / "checkpoints" / "step-3")
    trained = _trainer(first, data, more=saves, max_steps=3).fit()
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    assert before
    for key, step in (("resume", 3), ("init_from", 0)):
        folder = tmp_path / key
        assert _trainer(folder, data, more=saves | {key: weights}, max_steps=0, eval_every=7).fit() == trained
        assert _last_record(folder)["step"] == step
        assert "loss" not in _last_record(folder)
        assert not list(folder.rglob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"resume=auto: and trainer\.max_steps=0 would end the run in .*first, which"):
        _trainer(first, data, more=saves | {"resume": "auto"}, max_steps=0).fit()
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before


def test_the_best_is_that_of_the_set_that_is_named(gloo_world: World, tmp_path: Path) -> None:
    data = DataSpec(train=_samples(40, 0), eval_dataset=HELD_OUT)
    saves = {"checkpoint": {"every": 100, "best": "eval_code_loss"}}
    stop = EarlyStopping(metric="eval_news_loss", patience=1, min_delta=100.0)
    results = _trainer(tmp_path, data, more=saves, callbacks=[stop], max_steps=9).fit()
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 2
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert (best["metric"], best["value"]) == ("eval_code_loss", results["eval_code_loss"])


NAMED = "Use one of eval_news_loss, eval_code_loss"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"more": {"checkpoint": {"best": "eval_loss", "every": 9}}},
            f"checkpoint.best=eval_loss: is no result of one.*{NAMED}",
        ),
        (
            {"more": {"checkpoint": {"best": "eval_prose_loss", "every": 9}}},
            f"eval_prose_loss: is no result .*news, code.*{NAMED}",
        ),
        ({"callbacks": [EarlyStopping()]}, rf"EarlyStopping\(metric='eval_loss'\): is no result.*{NAMED}"),
        ({"callbacks": [ReduceLROnPlateau(metric="news_loss")]}, rf"Plateau\(metric='news_loss'\): is no .*{NAMED}"),
        ({"held_out": {}}, "holds out no set by name"),
        ({"held_out": {"a/b": HELD_OUT["news"]}}, "names a held-out set 'a/b'"),
        ({"held_out": {0: HELD_OUT["news"]}}, "names a held-out set 0"),
        ({"held_out": {"news": []}}, "holds out an empty set as 'news'"),
        ({"held_out": {"news": iter(())}}, "without a length as 'news'"),
        ({"held_out": DataLoader(HELD_OUT["news"])}, "holds out a DataLoader without samples by index"),
        ({"held_out": None, "max_steps": 0}, "trainer.max_steps=0: makes no update.*the data holds nothing out"),
        ({"eval_every": 0, "max_steps": 0}, "trainer.max_steps=0: makes no update.*trainer.eval_every=0"),
        ({"eval_samples": 0}, "trainer.eval_samples=0: must be at least 1"),
        ({"max_steps": -1}, "trainer.max_steps=-1: must be at least 0.*or 0 to evaluate alone"),
    ],
)
def test_what_no_evaluation_gives_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = dict(given)
    data = DataSpec(train=_samples(40, 0), eval_dataset=given.pop("held_out", HELD_OUT))
    with pytest.raises(ConfigError, match=message):
        _trainer(tmp_path, data, **given)


def test_two_results_of_one_name_are_refused(gloo_world: World, tmp_path: Path) -> None:
    class Named(CrossEntropy):
        def scores(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            loss = super().scores(model, batch)["loss"]
            return {"loss": loss, "b_loss": loss}

    sets = {"a": HELD_OUT["news"], "a_b": HELD_OUT["code"]}
    with pytest.raises(MisuseError, match="eval_a_b_loss would be two results of one evaluation"):
        _trainer(tmp_path, DataSpec(train=_samples(40, 0), eval_dataset=sets), Named(), max_steps=0).fit()


def test_a_single_sets_results_begin_with_eval(tmp_path: Path) -> None:
    data = DataSpec(train=_samples(40, 0), eval_dataset=HELD_OUT["news"])
    with pytest.raises(ConfigError, match=r"metric='loss'\): the names of an evaluation's results begin with eval_"):
        _trainer(tmp_path, data, callbacks=[EarlyStopping(metric="loss")])


class Roomy(CrossEntropy):
    """Has memory for so many held-out samples at once; coupled, it is no sum over them."""

    def __init__(self, most: int, *, coupled: bool = False) -> None:
        super().__init__()
        self.most, self.coupled = most, coupled

    def scores(self, model: Any, batch: Any) -> Any:
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        found = dict(super().scores(model, batch))
        return {name: score * (len(batch[0]) if self.coupled else 1) for name, score in found.items()}


@pytest.mark.parametrize("most", [2, 3])
def test_what_does_not_fit_is_evaluated_in_halves(most: int, gloo_world: World, tmp_path: Path) -> None:
    held_out = _samples(11, 3)
    data = DataSpec(train=_samples(40, 1), eval_dataset=held_out)
    trainer = _trainer(tmp_path, data, Roomy(most), more={"trainer": {"max_steps": 0}})
    found, truth = trainer.fit(), in_fp64(_model(), held_out)
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=1e-6)


def never_alone(model: Any, batch: Any) -> Tensor:
    """Takes two samples, no more and no less."""
    inputs, labels = batch
    if model.training or len(inputs) == 2:
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    if len(inputs) == 1:
        raise IndexError("index 1 is out of bounds")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_batch_that_cannot_be_cut_is_one_message(gloo_world: World, tmp_path: Path) -> None:
    data = DataSpec(train=_samples(40, 1), eval_dataset=_samples(11, 3))
    loss = Of(never_alone, count=lambda batch: len(batch[0]))
    trainer = _trainer(tmp_path, data, loss, more={"trainer": {"max_steps": 0}})
    with pytest.raises(
        ResourceError, match=r"cannot be evaluated in halves: some of its samples end in IndexError: ind"
    ):
        trainer.fit()


def test_scores_that_do_not_add_up_are_not_evaluated_in_halves(gloo_world: World, tmp_path: Path) -> None:
    data = DataSpec(train=_samples(40, 1), eval_dataset=_samples(11, 3))
    trainer = _trainer(tmp_path, data, Roomy(2, coupled=True), more={"trainer": {"max_steps": 0}})
    with pytest.raises(ResourceError, match=r"cannot be evaluated in halves: its \w+ is .* together and .* apart"):
        trainer.fit()


DATA: Any = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)).unbind())
SPEC = DataSpec(train=DATA, eval_dataset=DATA[:4], description="in order", shuffle=False)


def _whitened() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _fit(model: nn.Module, optimizer: Any, run_dir: Path, **options: Any) -> None:
    config = settings(
        None, {"log_every": 1, "eval_every": 2}, save=2, checkpoint={"keep": 0}, optim={"clip_norm": None}
    )
    sizes: Any = {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 4}
    Trainer(model, Loss(), SPEC, optimizer=optimizer, run_dir=run_dir, config=config, **(sizes | options)).fit()


def test_a_schedule_free_run_evaluates_and_saves_its_averages(gloo_world: World, tmp_path: Path) -> None:
    model = _whitened()
    _fit(model, ScheduleFree(model.parameters(), lr=0.1), tmp_path)
    for step in (2, 4):
        expected = averaged(_whitened(), Loss(), DATA, step)
        loss = Loss()(expected, torch.stack(DATA[:4])).item() / 4
        assert metrics(tmp_path)[step - 1]["eval_loss"] == pytest.approx(loss, rel=1e-5)
        saved = load_file(tmp_path / "checkpoints" / f"step-{step}" / "model.safetensors")
        torch.testing.assert_close(saved["weight"], expected.weight.data, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.weight, expected.weight)  # and so does the model that is left
    again = _whitened()
    options = {"resume": str(tmp_path / "checkpoints" / "step-2")}
    _fit(again, ScheduleFree(again.parameters(), lr=0.1), tmp_path / "resumed", **options)
    assert torch.equal(again.weight, model.weight)


def test_a_model_is_trained_further_by_another_trainer(gloo_world: World, tmp_path: Path) -> None:
    model = _whitened()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for k in range(2):
        _fit(model, optimizer, tmp_path / str(k))
    model.zero_grad()
    optimizer.zero_grad()
    Loss()(model, torch.stack(DATA)).backward()
    optimizer.step()
