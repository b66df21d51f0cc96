"""``windows.jsonl`` in one process: its lines, when and at what cost; and the rank that others wait for is named."""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.config.schema import RunConfig
from distaccum.data.counter import GlobalCounter
from distaccum.data.hooks import Hooks, WindowHook
from distaccum.distributed.world import World
from distaccum.errors import MisuseError
from distaccum.testing.counters import OperationCounter
from distaccum.tools.compare.windows import WindowRecorder, contents_digest, ids_digest
from distaccum.tools.record_file import rewind
from distaccum.tools.stragglers import WINDOWS, Stragglers

Lines = list[dict[str, Any]]


def _config(*, windows: bool = True, engine: dict[str, Any] | None = None, **changed: Any) -> RunConfig:
    values: dict[str, Any] = {
        "batch": {"global_size": 5, "micro_size": 2},
        "optim": {"lr": 0.05, "optimizer": {"_target_": "torch.optim.SGD"}},
        "schedule": {"_target_": "distaccum.train.schedules.Linear", "warmup_steps": 3},
        "trainer": {"max_steps": 7, "eval_every": 0, "log_every": 100, "verify": "never"},
        "checkpoint": {"every": 0},
        "metrics": {"console": False, "report": False, "windows": windows, "wandb": {"mode": "disabled"}},
    }
    return RunConfig.from_dict(values | changed | ({} if engine is None else {"engine": engine}))


def _samples(size: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.tensor(i % 3)) for i in range(size)]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(_samples())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _fit(folder: Path, config: RunConfig, train: Any = None, loss: CrossEntropy | None = None) -> Lines:
    data = DataSpec(train=_samples() if train is None else train)
    Trainer(_model(), loss or CrossEntropy(), data, config=config, run_dir=folder).fit()
    return _lines(folder)


def _lines(folder: Path, name: str = "windows.jsonl") -> Lines:
    file = folder / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# ------------------------------------------------------------------------------------------ digests


def test_the_digest_of_ids_tells_sets_apart_and_adds_up() -> None:
    ids = np.random.default_rng(0).permutation(1000)
    whole = ids_digest(ids)
    assert whole == ids_digest(np.sort(ids))
    assert whole == (ids_digest(ids[:300]) + ids_digest(ids[300:])) % 2**40
    assert len({ids_digest([i]) for i in range(5000)}) == 5000
    assert ids_digest([1, 4]) != ids_digest([2, 3])
    assert ids_digest([1, 1]) != ids_digest([1])
    assert ids_digest([]) == 0


class Named(NamedTuple):
    x: Tensor
    rest: Any


def test_the_digest_of_contents_sees_every_bit_type_and_shape() -> None:
    x = torch.arange(6.0)
    nan = torch.tensor([float("nan"), 0.0])
    batches: Sequence[Any] = (
        x,
        x.double(),
        x.reshape(2, 3),
        x + torch.tensor([0, 0, 0, 0, 0, 1e-6]),
        x.bfloat16(),
        x.int(),
        nan,
        -nan[1:],
        nan[1:],
        (x, x),
        {"a": x, "b": nan},
        {"a": nan, "b": x},
        Named(x, [1, "text", None]),
        Named(x, [1, "texts", None]),
        Named(x, [2, "text", None]),
        Named(x, np.arange(3)),
        Named(x, np.arange(3.0)),
        torch.zeros(0),
        x.to_sparse(),
    )
    digests = [contents_digest(batch) for batch in batches]
    assert len(set(digests)) == len(digests) - 1  # of a sparse tensor the dense one's
    assert digests[-1] == digests[0]
    assert contents_digest(x.reshape(2, 3).T.contiguous()) == contents_digest(x.reshape(2, 3).T)
    assert contents_digest({"a": x.clone(), "b": nan.clone()}) == digests[10]


# ------------------------------------------------------------------------------------------ lines


def test_a_line_has_what_the_records_and_plain_torch_have(gloo_world: World, tmp_path: Path) -> None:
    config = _config(trainer={"max_steps": 7, "eval_every": 0, "log_every": 1, "verify": "never"})
    lines = _fit(tmp_path / "run", config)
    records = _lines(tmp_path / "run", "metrics.jsonl")
    assert [line["window"] for line in lines] == list(range(1, 8))
    for line, record in zip(lines, records, strict=True):
        for key in ("epoch", "window", "step", "applied", "loss", "grad_norm", "loss_scale"):
            assert line[key] == record[key], key
        assert line["lr"] == [record["lr"]]
        assert list(line["norms"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert sum(norm**2 for norm in line["norms"].values()) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-6)
    # An epoch of 12 samples has windows of 5, 5 and 2: the ids of each epoch are those of all samples.
    assert [line["samples"] for line in lines[:3]] == [5, 5, 2]
    assert [line["micro_batches"] for line in lines[:3]] == [3, 3, 1]
    assert [line["counts"] for line in lines[:3]] == [{"loss": 5}, {"loss": 5}, {"loss": 2}]
    for first in (0, 3):
        assert sum(line["ids"] for line in lines[first : first + 3]) % 2**40 == ids_digest(range(12))
    # The first window's gradient, by plain torch.
    model, samples, window = _model(), _samples(), lines[0]
    chosen = next(c for c in combinations(range(12), 5) if ids_digest(c) == window["ids"])
    x, y = (torch.stack(parts) for parts in zip(*[samples[i] for i in chosen], strict=True))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    assert window["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert window["norms"][name] == pytest.approx(float(parameter.grad.norm()), rel=1e-5)


@pytest.mark.filterwarnings("ignore:precision=fp16:distaccum.errors.PrecisionWarning")
def test_norms_are_those_of_the_gradient_without_its_loss_scale(gloo_world: World, tmp_path: Path) -> None:
    plain = _fit(tmp_path / "fp32", _config())
    scaled = _fit(tmp_path / "fp16", _config(precision={"name": "fp16"}))
    assert scaled[0]["loss_scale"] > 1000
    for name, norm in plain[0]["norms"].items():
        assert scaled[0]["norms"][name] == pytest.approx(norm, rel=5e-3)


def test_the_samples_of_a_stream_have_no_numbers(gloo_world: World, tmp_path: Path) -> None:
    lines = _fit(tmp_path / "run", _config(batch={"global_size": 4, "micro_size": 2}), Stream())
    assert [line["ids"] for line in lines] == [None] * 7
    assert lines[0]["contents"] == lines[3]["contents"] != lines[1]["contents"]  # an epoch has three windows


def test_a_forward_that_changes_its_batch_is_not_taken_for_the_data(gloo_world: World, tmp_path: Path) -> None:
    class InPlace(CrossEntropy):
        def __call__(self, model: nn.Module, batch: Any) -> Any:
            batch[0].add_(1.0)
            return super().__call__(model, batch)

    found, expected = (_fit(tmp_path / name, _config(), loss=loss) for name, loss in (("a", InPlace()), ("b", None)))
    assert [line["contents"] for line in found] == [line["contents"] for line in expected]


def test_a_line_is_written_when_the_next_window_has_run(
    gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, list[int]] = {"window_begins": [], "on_window": []}  # before a window, and after it
    for name, found in written.items():
        method = getattr(WindowRecorder, name)

        def noted(*arguments: Any, method: Any = method, found: list[int] = found) -> None:
            found.append(len(_lines(tmp_path / "run")))
            method(*arguments)

        monkeypatch.setattr(WindowRecorder, name, noted)
    lines = _fit(tmp_path / "run", _config())
    assert written == {"window_begins": [0, 0, 1, 2, 3, 4, 5], "on_window": [0, 1, 2, 3, 4, 5, 6]}
    assert len(lines) == 7


def test_without_the_setting_a_window_costs_nothing_more(gloo_world: World, tmp_path: Path) -> None:
    reductions, calls = {}, Counter[bool]()
    for windows in (False, True):

        def note(frame: Any, event: str, _: Any, windows: bool = windows) -> None:
            file = frame.f_code.co_filename
            calls[windows] += event == "call" and file.endswith("compare/windows.py")

        with OperationCounter() as counter:
            sys.setprofile(note)
            try:
                _fit(tmp_path / str(windows), _config(windows=windows))
            finally:
                sys.setprofile(None)
        reductions[windows] = counter.counts
    assert reductions[True]["other reductions"] == reductions[False]["other reductions"] + 7  # one a window
    for kind in ("gradient reductions", "other collectives", "device reads"):
        assert reductions[True][kind] == reductions[False][kind], kind
    assert calls[False] == 0
    assert calls[True] > 7
    assert not (tmp_path / "False" / "windows.jsonl").exists()


def test_a_skipped_window_has_a_line_too(gloo_world: World, tmp_path: Path) -> None:
    samples = _samples()
    samples[4] = (torch.full((4,), float("nan")), samples[4][1])
    trainer = {"max_steps": 5, "eval_every": 0, "log_every": 100, "verify": "never", "nonfinite": "skip"}
    lines = _fit(tmp_path / "run", _config(trainer=trainer), samples)
    records = {record["window"]: record for record in _lines(tmp_path / "run", "metrics.jsonl")}
    skipped = [line for line in lines if not line["applied"]]
    assert skipped
    for line in skipped:
        assert records[line["window"]]["step"] == line["step"]
        assert line["loss"] != line["loss"]
    assert [line["window"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["step"] == 5


# ------------------------------------------------------------------------------------------ resumes


def test_a_resumed_run_goes_on_with_its_lines(gloo_world: World, tmp_path: Path) -> None:
    """Of a run that died after its checkpoint: what came later is moved aside, and made again."""

    def config(steps: int) -> RunConfig:
        trainer = {"max_steps": steps, "eval_every": 0, "log_every": 1, "verify": "never"}
        schedule = {"_target_": "distaccum.train.schedules.Constant"}
        return _config(trainer=trainer, schedule=schedule, checkpoint={"every": 3}, resume="auto")

    whole = _fit(tmp_path / "whole", config(8))
    run = tmp_path / "run"
    _fit(run, config(3))
    with (run / "windows.jsonl").open("a") as file:
        file.write("".join(json.dumps(line | {"loss": 0.0}) + "\n" for line in whole[3:5]) + '{"window": 6, "lo')
    assert _fit(run, config(8)) == whole
    aside = (run / "windows.superseded.jsonl").read_text().splitlines()
    assert [line[:40] for line in aside][-1] == '{"window": 6, "lo'
    assert len(aside) == 3
    assert _lines(run, "metrics.superseded.jsonl") == []


def test_lines_are_moved_aside_also_where_none_are_recorded_any_more(tmp_path: Path) -> None:
    (tmp_path / "windows.jsonl").write_text("".join(f'{{"window": {n}}}\n' for n in range(1, 6)))
    rewind(tmp_path / "windows.jsonl", 2)
    assert [line["window"] for line in _lines(tmp_path)] == [1, 2]
    assert [line["window"] for line in _lines(tmp_path, "windows.superseded.jsonl")] == [3, 4, 5]


def _ranks(size: int) -> tuple[list[World], list[Stragglers]]:
    worlds = [World(rank=rank, size=size, device=torch.device("cpu")) for rank in range(size)]
    return worlds, [Stragglers(world, forward_communicates=False) for world in worlds]


def _windows(worlds: list[World], ranks: list[Stragglers], loading: list[float], computing: list[float]) -> None:
    for _ in range(WINDOWS + 2):
        given = []
        for world, rank, loads, computes in zip(worlds, ranks, loading, computing, strict=True):
            now = time.perf_counter()
            world.activity.counted_at, world.activity.arrived_at = now - 1, now - 1 + computes
            world.activity.loading_at = now - loads
            given.append(rank.outgoing(4, 1))
        for rank in ranks:
            rank.incoming([sum(numbers) for numbers in zip(*given, strict=True)])


@pytest.mark.parametrize(
    ("loading", "computing", "what"),
    [([0.01, 0.01, 0.3], [0.1, 0.1, 0.1], "loading data"), ([0.01] * 3, [0.1, 0.1, 0.2], "its forwards and backwards")],
)
def test_a_slow_rank_is_named_once_with_what_is_slow(
    loading: list[float], computing: list[float], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    worlds, ranks = _ranks(3)
    with caplog.at_level(logging.WARNING, "distaccum"):
        _windows(worlds, ranks, loading, computing)
        _windows(worlds, ranks, loading, computing)
    (record,) = caplog.records  # rank 0 alone speaks
    assert record.getMessage().startswith("rank 2 is slow: ")
    assert f"a step for {what}" in record.getMessage()
    for rank in ranks:
        assert rank.metrics["slowest_rank"] == 2
        assert rank.metrics["slowest_over_median"] > 1.5


def test_equal_ranks_and_differences_of_a_millisecond_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    worlds, ranks = _ranks(3)
    with caplog.at_level(logging.WARNING, "distaccum"):
        _windows(worlds, ranks, [0.01] * 3, [0.1, 0.12, 0.11])
        _windows(worlds, ranks, [0.0] * 3, [0.001, 0.001, 0.003])
    assert not caplog.records


def test_a_collective_of_the_programs_own_in_the_counts_place_is_refused() -> None:
    _, ranks = _ranks(2)
    given = ranks[0].outgoing(4, 1)
    with pytest.raises(MisuseError, match="has met a collective that this program calls on some ranks only"):
        ranks[0].incoming([number + 5 for number in given])


def test_each_hook_gets_its_own_numbers(gloo_world: World) -> None:
    got: dict[str, list[float]] = {}

    class Carries(WindowHook):
        def __init__(self, name: str, numbers: list[float]) -> None:
            self._name, self._numbers = name, numbers

        def outgoing(self, micro_batches: int, losses: int) -> list[float]:
            return [*self._numbers, float(micro_batches + losses)]

        def incoming(self, sums: list[float]) -> None:
            got[self._name] = sums

    counter = GlobalCounter(gloo_world, None)
    counter.hooks = Hooks(Carries("a", [1.0, 2.0]), Carries("b", []))
    assert counter.all_reduce([], [5.0]) == ({}, [5.0])
    assert got == {"a": [1.0, 2.0, 0.0], "b": [0.0]}
