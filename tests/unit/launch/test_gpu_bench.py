"""The bench of the GPU, on the CPU: its frame with measurements that go wrong, and ``correct`` in small sizes."""

import json
import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from distaccum.errors import ConfigError
from launch.bench.gpu import first, main, plots, processes
from launch.bench.gpu.figures import Options
from launch.bench.gpu.report import DONE, FAILED, LEFT_OUT, Measured, Report
from tests.support.commands import ROOT, environment

HERE = "tests.unit.launch.gpu_parts"
PARTS = {"correct": HERE}
VALUES: dict[str, Any] = {"part": "correct", "small": "auto", "minutes": 2, "only": [], "profile": None}
MACHINE = {
    "torch": "2.11.0",
    "cuda": "",
    "card": "",
    "cards": 0,
    "driver": "",
    "python": "3.12.1",
    "cores": 2,
    "commit": "abc",
}


def _of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "report.json").read_text())
    return {f"{one['part']} {one['name']}": one for one in content["measurements"]}


def _figure(**given: Any) -> dict[str, Any]:
    return {"of": "a", "name": "time", "value": 1.0, "unit": "ms", "target": "", "holds": None, **given}


def _measured(name: str, *figures: dict[str, Any], error: str = "", small: bool = True) -> Measured:
    return Measured(part="speed", name=name, small=small).done(figures, error=error, seconds=1.23)


@pytest.mark.heavy
def test_a_target_that_does_not_hold_is_reported_and_ends_the_run_with_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run({**VALUES, "only": ["missed"]}, tmp_path, PARTS) == 1
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["options"] == [{**VALUES, "only": ["missed"], "small": True, "commit": content["machine"]["commit"]}]
    assert content["machine"]["torch"] == torch.__version__
    (one,) = content["measurements"]
    figure = _figure(of="b", value=4.0, target="at most 3 ms", holds=False)
    assert (one["part"], one["name"], one["state"], one["small"]) == ("correct", "missed", DONE, True)
    assert one["figures"] == [figure]
    assert one["seconds"] > 0
    assert "4 ms" in capfd.readouterr().out
    assert "| correct | missed (small) | b | time | 4 ms | at most 3 ms | NO |" in (tmp_path / "report.md").read_text()


@pytest.mark.heavy
def test_a_run_whose_measurements_fail_reports_them_all(tmp_path: Path) -> None:
    """One is right, one misses its target, one raises; a part is missing; a second run adds to it."""
    parts = {**PARTS, "speed": "tests.unit.launch.no_such_module"}
    assert main.run({**VALUES, "part": "all"}, tmp_path, parts) == 1
    found = _of(tmp_path)
    assert {name: one["state"] for name, one in found.items()} == {
        "correct right": DONE,
        "correct missed": DONE,
        "correct raising": FAILED,
        "speed (all)": FAILED,
    }
    assert found["correct right"]["figures"][1] == _figure(of="cpu", name="small", value="True", unit="")
    assert found["correct raising"]["error"] == "ValueError: a | message"
    assert "before the error" in found["correct raising"]["said"]
    assert "No module named 'tests.unit.launch.no_such_module'" in found["speed (all)"]["error"]
    assert "before the error" in (tmp_path / "logs" / "correct-raising.log").read_text()
    assert "ValueError: a \\| message" in (tmp_path / "report.md").read_text()  # a bar would begin a cell
    assert (tmp_path / "correct.png").stat().st_size > 1000
    assert main.run({**VALUES, "only": ["right"]}, tmp_path, {**PARTS, "size": HERE}) == 0
    again = _of(tmp_path)
    assert again.keys() == found.keys()
    assert {name for name in found if again[name] != found[name]} == {"correct right"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"),
    [("dying", "was killed by SIGABRT and no answer"), ("hanging", "did not end within 25 s, and was killed")],
)
def test_what_ends_a_process_is_told_and_leaves_none_behind(tmp_path: Path, name: str, problem: str) -> None:
    """A process that hangs takes along what it has started."""
    question = {"module": "tests.unit.launch.gpu_endings", "name": name, "small": True}
    answer = processes.ask(question, tmp_path / "answer.json", log=tmp_path / "log", limit_s=25)
    assert problem in answer.error
    if name == "hanging":
        child = int(answer.said.removeprefix("child "))
        for _ in range(100):
            if not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text():
                return
            sleep(0.05)
        pytest.fail("what it has started still runs")


def test_a_measurement_without_time_is_left_out_and_told(tmp_path: Path) -> None:
    report, given = Report.of(tmp_path, MACHINE, options={}), {"small": True, "folder": tmp_path, "answers": tmp_path}
    report.add(_measured("before", _figure()))
    for part, name in (("correct", "right"), ("speed", "before")):
        report.add(main._measure(HERE, part, name, limit_s=9.0, **given))
    report.finish()
    assert _of(tmp_path)["correct right"]["state"] == LEFT_OUT
    assert _of(tmp_path)["speed before"]["figures"] == [_figure()]  # of an earlier run
    assert "Left out for lack of time: right." in (tmp_path / "report.md").read_text()
    assert report.good([("correct", "right"), ("speed", "before")])


@pytest.mark.parametrize(
    ("measured", "good"),
    [
        (_measured("right", _figure()), True),
        (_measured("held", _figure(target="1 ms", holds=True)), True),
        (_measured("missed", _figure(target="1 ms", holds=False), _figure()), False),
        (_measured("failed", error="an error"), False),
        (_measured("failed with figures", _figure(), error="an error"), False),
        (_measured("empty"), False),
        (_measured("not finite", _figure(value=float("inf"))), False),
    ],
    ids=lambda given: given.name if isinstance(given, Measured) else "",
)
def test_what_a_run_exits_with(tmp_path: Path, measured: Measured, good: bool) -> None:
    report = Report.of(tmp_path, MACHINE, options={})
    report.add(_measured("another", _figure()))
    report.add(measured)
    assert report.good([("speed", "another")])
    assert report.good([("speed", "another"), ("speed", measured.name)]) == good
    assert json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)


def test_a_report_of_another_machine_is_not_added_to(tmp_path: Path) -> None:
    Report.of(tmp_path, MACHINE, options={}).add(_measured("right", _figure()))
    same = Report.of(tmp_path, {**MACHINE, "commit": "def"}, options={})
    assert same.good([("speed", "right")])
    with pytest.raises(ConfigError, match=r"report\.json is of torch 2\.11\.0 and not 2\.9\.0"):
        Report.of(tmp_path, {**MACHINE, "torch": "2.9.0"}, options={})
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Report.of(tmp_path, MACHINE, options={})


def test_a_chart_for_each_thing_that_is_measured_and_none_of_words(tmp_path: Path) -> None:
    figures = [_figure(), _figure(of="b", value=300), _figure(value="yes"), _figure(unit="tokens/s", value=0.0)]
    measured = [_measured("some", *figures)]
    charts = {"time (ms)": [("a", 1.0), ("b", 300.0)], "time (tokens/s)": [("a", 0.0)]}
    assert plots.by_name(measured) == charts
    plots.draw([_measured("words", _figure(value="yes"))], "nothing", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"part": "fast"}, "part=fast: no such choice. Use one of correct, speed, size, all"),
        ({"profile": "quick"}, "profile=quick: no such choice. Use one of first"),
        ({"small": "yes"}, "small=yes: no such choice"),
        ({"minutes": 0}, "minutes=0: must be a positive"),
        ({"minutes": "9m"}, "minutes=9m: is no number"),
        ({"only": "tests"}, "only=tests: is no list"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main.check({**VALUES, **given})
    assert message in str(caught.value)


def test_names_of_measurements_are_looked_at_over_all_parts_asked_for() -> None:
    names = {"correct": ["a", "b"], "speed": ["c"]}
    assert main.chosen(names, [], {}) == [("correct", "a"), ("correct", "b"), ("speed", "c")]
    assert main.chosen(names, ["c", "b"], {}) == [("correct", "b"), ("speed", "c")]
    with pytest.raises(
        ConfigError, match=r"only=d: is no measurement here; size cannot be imported: E\. Use some of 'a'"
    ):
        main.chosen(names, ["d"], {"size": "E"})


def test_the_program_that_starts_the_processes_loads_no_torch() -> None:
    """Nor rich, which the machine may lack; and the benches' command loads none for it."""
    program = "import sys, launch.bench.main, launch.bench.gpu.main; print(*sys.modules)"
    listed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment(), cwd=ROOT
    )
    assert not set(listed.stdout.split()) & {"torch", "rich", "wandb", "matplotlib", "numpy"}


def test_without_a_card_nothing_is_measured_over_nccl() -> None:
    """Over gloo, as "two ranks" has it already, it took longer than its limit, and the command failed."""
    (figure,) = first.nccl(Options(device=torch.device("cpu"), small=True))
    assert (figure.name, figure.value, figure.holds) == ("left out", "no CUDA device", None)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_first_minutes_run_on_a_cpu(tmp_path: Path) -> None:
    """All of them, in small sizes; few files, as a machine that is lent gives back."""
    command = [sys.executable, "launch/bench", "gpu", "profile=first", "minutes=14", f"hydra.run.dir={tmp_path}"]
    own = environment(OMP_NUM_THREADS="1")
    finished = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + (tmp_path / "first.log").read_text()[-4000:]
    found = _of(tmp_path)
    assert [name.removeprefix("first ") for name in found] == list(first.MEASUREMENTS)
    assert {name: one["error"] for name, one in found.items() if one["state"] != DONE} == {}
    assert [figure["holds"] for one in found.values() for figure in one["figures"]].count(True) >= 55
    assert {file.name for file in tmp_path.iterdir()} <= {"first.log", "first.png", "report.json", "report.md"}


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("names", "least"),
    [
        pytest.param("engines,two ranks", 43, marks=pytest.mark.heavy),
        pytest.param("tests,resume", 2, marks=pytest.mark.heavy),
        pytest.param("deepspeed,compiled", 10, marks=pytest.mark.heavy),
    ],
)
def test_all_that_is_right_on_a_gpu_is_right_on_the_cpu(tmp_path: Path, names: str, least: int) -> None:
    """The command of the page, in its small sizes; ``least``: targets that hold."""
    settings = ["part=correct", f"only=[{names}]", "minutes=20", f"hydra.run.dir={tmp_path}"]
    command, own = [sys.executable, "launch/bench", "gpu", *settings], environment(OMP_NUM_THREADS="1")
    finished = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    logs = "".join(log.read_text()[-2000:] for log in (tmp_path / "logs").glob("*"))
    assert finished.returncode == 0, finished.stdout + finished.stderr + logs
    found = _of(tmp_path)
    assert found.keys() == {f"correct {name}" for name in names.split(",")}
    assert {name: one["error"] for name, one in found.items() if one["state"] != DONE} == {}
    held = [figure["holds"] for one in found.values() for figure in one["figures"]]
    assert held.count(True) >= least
