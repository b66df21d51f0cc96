"""The profile of some windows: its times against what slept, its files, and that training does not notice."""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from distaccum import CrossEntropy, DataSpec, RunConfig, Trainer
from distaccum.distributed.activity import Activity, Phase
from distaccum.distributed.world import World
from distaccum.errors import ConfigError
from distaccum.tools.profiling import ROWS, HostClock, PhaseTable, Timeline
from tests.support.runs import At, settings

PAUSE_S = 0.01


class Slept:
    """Sleeps in named places, and keeps how long each sleep took by the clock."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def __call__(self, where: str, pause: float = PAUSE_S) -> None:
        before = perf_counter()
        sleep(pause)
        self.seconds[where] += perf_counter() - before  # type: ignore[assignment]


class Samples:
    """Forty samples; with ``slept`` each takes its time."""

    def __init__(self, slept: Slept | None = None) -> None:
        self._x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        self._slept = slept

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int, /) -> tuple[Tensor, Tensor]:
        if self._slept is not None and i % 4 == 0:
            self._slept("loading")
        return self._x[i], self._x[i][:3].argmax()


class SlowNet(nn.Module):
    def __init__(self, slept: Slept) -> None:
        super().__init__()
        self._slept, self.linear, self.dropout = slept, nn.Linear(4, 3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        self._slept("forward")
        y = self.linear(self.dropout(x))
        if y.requires_grad:
            y.register_hook(lambda _: self._slept("backward"))
        out: Tensor = y
        return out


class SlowSGD(torch.optim.SGD):
    def __init__(self, slept: Slept, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self._slept = slept

    def step(self, closure: Any = None) -> Any:
        self._slept("step")
        return super().step(closure)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.dropout(x))
        return out


def _config(profile: Mapping[str, Any], **trainer: Any) -> RunConfig:
    trainer = {"max_steps": 8, "log_every": 1, "eval_every": 0, "verify": "never", **trainer}
    return settings((8, 4), trainer, save=4, profile=dict(profile))


def _plain(folder: Path, profile: Mapping[str, Any], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Plain()
    data = DataSpec(train=Samples(), description="")  # type: ignore[arg-type]
    Trainer(model, CrossEntropy(), data, config=_config(profile), run_dir=folder, **more).fit()
    return model


def _table(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "profile" / "table.json").read_text())
    return found


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profile").iterdir()) if (folder / "profile").exists() else []


WHOLE = ["rank-0.trace.json.gz", "table.json", "table.md"]


@pytest.fixture(autouse=True)
def _clean(gloo_world: World) -> Iterator[None]:
    yield
    assert gloo_world.activity.watcher is None


def test_each_row_holds_what_slept_there_and_all_rows_the_wall_time(gloo_world: World, tmp_path: Path) -> None:
    """Each place sleeps known times. A second in the wrong row is missing in its own, since the rows add up."""
    slept = Slept()
    model = SlowNet(slept)
    data = DataSpec(train=Samples(slept), description="")  # type: ignore[arg-type]
    optimizer = SlowSGD(slept, model.parameters())
    config = _config({"steps": [2, 4], "trace": False}, max_steps=4)
    callbacks = [At(1, lambda run: slept.seconds.clear())]  # what slept in the first window and before it
    began = perf_counter()
    Trainer(
        model, CrossEntropy(), data, config=config, optimizer=optimizer, callbacks=callbacks, run_dir=tmp_path
    ).fit()
    took = perf_counter() - began
    rows, windows = _table(tmp_path)["rows"], _table(tmp_path)["ranks"][0]["windows"]
    for name in ("loading", "forward", "backward", "step"):
        assert slept.seconds[name] >= 3 * PAUSE_S
        assert rows[name]["sum_s"][0] >= slept.seconds[name], name
    for window in windows:
        assert sum(window[name] for name in ROWS) == pytest.approx(window["wall"], rel=1e-9)
    assert len(windows) == 3
    assert sum(slept.seconds.values()) <= sum(window["wall"] for window in windows) <= took
    assert _files(tmp_path) == ["table.json", "table.md"]


def test_a_backward_ends_when_its_gradients_are_there_and_the_rest_is_the_reduction() -> None:
    """An engine waits for its collectives where autograd calls it back, after the last gradient."""
    slept, activity, layer = Slept(), Activity(), nn.Linear(4, 3)

    def waits() -> None:
        slept("reduction", 0.03)

    def engine(_: Tensor) -> None:
        slept("backward", 0.02)
        Variable._execution_engine.queue_callback(waits)

    layer.weight.register_hook(engine)  # type: ignore[no-untyped-call]
    timeline = Timeline(HostClock(), lambda _: None)
    activity.watch(timeline)
    for phase in (Phase.BACKWARD, Phase.REDUCTION):
        activity.phase = Phase.FORWARD
        loss = layer(torch.ones(2, 4)).sum()
        activity.phase = phase
        timeline.before_backward(loss)
        loss.backward()
        activity.phase = Phase.STEP
        timeline.end_window(1)
    activity.watch(None)
    for window in timeline.rows():
        assert window["backward"] >= 0.02
        assert window["reduction"] >= 0.03
        assert window["backward"] + window["reduction"] <= window["wall"]
    backward, reduction = (sum(window[name] for window in timeline.rows()) for name in ("backward", "reduction"))
    assert backward >= slept.seconds["backward"]
    assert reduction >= slept.seconds["reduction"]
    assert type(activity) is Activity


def test_profiling_changes_no_bit_and_the_trace_has_every_range(gloo_world: World, tmp_path: Path) -> None:
    plain = _plain(tmp_path / "plain", {})
    profiled = _plain(tmp_path / "profiled", {"steps": [3, 5]})
    for one, other in zip(plain.parameters(), profiled.parameters(), strict=True):
        assert torch.equal(one, other)
    kept = ("step", "loss", "grad_norm", "samples", "lr")
    first, second = (
        [[json.loads(line)[key] for key in kept] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "plain", tmp_path / "profiled")
    )
    assert first == second
    assert (_files(tmp_path / "plain"), _files(tmp_path / "profiled")) == ([], WHOLE)
    with gzip.open(tmp_path / "profiled" / "profile" / WHOLE[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert (ranges["forward"], ranges["backward"], ranges["backward and reduction"]) == (6, 3, 3)
    assert (ranges["loading"], ranges["count"], ranges["save"]) == (3, 3, ranges["save"])
    markdown = (tmp_path / "profiled" / "profile" / "table.md").read_text()
    assert "# Profile: steps 3 to 5 of this process" in markdown
    assert [line.split(" | ")[0] for line in markdown.splitlines() if line[:4] in ("| 3 ", "| 4 ", "| 5 ")] == [
        "| 3",
        "| 4",
        "| 5",
    ]


def test_nothing_of_it_is_called_where_it_is_off(gloo_world: World, tmp_path: Path) -> None:
    called: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        _plain(tmp_path, {})
    finally:
        sys.setprofile(None)
    assert called["step.py:run_window"] == 8  # the tracer sees the run
    files = ("profiling.py", "activity.py")
    assert {name for name in called if name.startswith(files)} == {"activity.py:now"}


@pytest.mark.parametrize(
    ("at", "windows", "says"),
    [
        (4, [3, 4], "the run has ended after window 4, and the profile ends there"),
        (1, None, "the run has ended after window 1, and nothing is profiled"),
        (5, None, "the run has ended there, without a profile"),
    ],
)
def test_a_run_that_ends_inside_leaves_whole_files_or_none(
    tmp_path: Path, at: int, windows: list[int] | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    breaks = at == 5
    with pytest.raises(ZeroDivisionError) if breaks else nullcontext():
        _plain(tmp_path, {"steps": [3, 7]}, callbacks=[At(at, lambda run: 1 / 0 if breaks else run.stop("enough"))])
    assert says in caplog.text
    assert _files(tmp_path) == ([] if windows is None else WHOLE)
    if windows is not None:
        assert _table(tmp_path)["windows"] == windows
    with torch.profiler.profile():  # torch's profiler is free again
        pass


def test_a_process_that_resumes_counts_its_own_windows(gloo_world: World, tmp_path: Path) -> None:
    profile = {"steps": [2, 3], "trace": False}
    for steps in (4, 8):
        torch.manual_seed(0)
        data = DataSpec(train=Samples(), description="")  # type: ignore[arg-type]
        config = _config(profile, max_steps=steps)
        Trainer(Plain(), CrossEntropy(), data, config=config, run_dir=tmp_path, resume="auto").fit()
        numbers = [int(window["window"]) for window in _table(tmp_path)["ranks"][0]["windows"]]
        assert numbers == ([2, 3] if steps == 4 else [6, 7])
        assert _table(tmp_path)["windows"] == [2, 3]


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ({"steps": [0, 3]}, r"profile.steps=\[0, 3\]"),
        ({"steps": [5, 3]}, r"profile.steps=\[5, 3\]"),
        ({"steps": 3}, "profile.steps=3: is not the numbers of the first and the last window"),
        ({"steps": [1, 2.5]}, "profile.steps"),
        ({"steps": [True, 3]}, "profile.steps"),
        ({"memory": True}, "profile.memory=True: and profile.steps is null"),
        ({"steps": [1, 2], "trace": "maybe"}, "profile.trace"),
        ({"steps": [9, 10]}, r"profile.steps=\[9, 10\]: begins after the last of the run's 8 updates"),
        ({"steps": [1, 2], "memory": True}, "profile.memory=True: is for a GPU"),
        ({"steps": [1, 2], "nvtx": True}, "profile.nvtx=True: is for a GPU"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    gloo_world: World, tmp_path: Path, profile: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        _plain(tmp_path, profile)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    gloo_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("in the way")
    _plain(tmp_path, {"steps": [1, 2]})
    assert "the profile is not whole, the training goes on" in caplog.text
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"


def _windows(**seconds: float) -> list[dict[str, float]]:
    wall = sum(seconds.values())
    return [{"window": 7, "wall": wall, **dict.fromkeys(ROWS, 0.0), **seconds}]


LATE_TO_THE_COUNT = [_windows(loading=0.001, count=0.05, forward=0.1), _windows(loading=0.051, forward=0.1)]
LATE_TO_THE_REDUCTION = [_windows(forward=0.2, backward=0.1), *[_windows(forward=0.1, backward=0.1, reduction=0.1)] * 3]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (LATE_TO_THE_COUNT, "rank 1 is waited for: loading takes it 51.0 ms a step, the others' median is 1.0; "),
        (LATE_TO_THE_REDUCTION, "rank 0 is waited for: computing takes it 300.0 ms a step, the others' median is 200"),
        ([_windows(forward=0.1, reduction=0.1)] * 2, ""),
        ([_windows(loading=1.0)], ""),
    ],
)
def test_the_rank_that_others_wait_for_is_named(ranks: list[list[dict[str, float]]], says: str) -> None:
    table = PhaseTable(ranks, first=7, forward_communicates=False, device="host")
    assert [wait[: len(says)] for wait in table.waits] == ([says] if says else [])
    assert table.lines()[-1].startswith(says)
    assert table.values()["rows"]["forward"]["window_s"]["max"] == max(rank[0]["forward"] for rank in ranks)
    for wait in table.waits:
        assert wait.endswith(("rank 0 waits 50.0 ms in the count", "rank 1 waits 100.0 ms in the reduction"))
        assert f"- {wait}" in table.markdown()
