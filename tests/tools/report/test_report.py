"""A report says what the run's files say: held to the files, as other programs read them."""

import json
import math
import os
import re
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest

from distaccum.errors import ConfigError
from distaccum.tools.report import command
from distaccum.tools.report.columns import columns, thinned
from distaccum.tools.report.page import page, written
from distaccum.tools.report.read import read_runs
from tests.support.commands import ROOT
from tests.tools.report.files import Page, a_run, record


def _page(*folders: Path) -> Page:
    return Page(page(read_runs(list(folders))))


def test_the_curves_are_the_numbers_of_the_file(tmp_path: Path) -> None:
    """Each as it stands there; those that are not finite are marked where they are."""
    records = [record(step) for step in range(1, 61)]
    records[9] |= {"loss": math.nan, "grad_norm": math.inf}
    for step in (20, 40, 60):
        records[step - 1] |= {"eval_loss": 4 - step / 30, "eval_news_loss": step / 7, "eval_news_samples": 5}
    data = _page(a_run(tmp_path / "run", records)).data
    (run,) = data["runs"]
    read = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for axis in ("step", "samples", "tokens"):
        assert run["x"][axis] == [one[axis] for one in read]
    assert run["x"]["hours"] == pytest.approx([one["step"] * 0.5 / 3600 for one in read])
    for name in ("loss", "grad_norm", "lr", "eval_loss", "eval_news_loss", "tokens_per_s", "memory_bytes"):
        values = [one.get(name) for one in read]
        assert run["y"][name] == [value if value is None or math.isfinite(value) else None for value in values]
    assert run["bad"] == {"loss": [[9, "NaN"]], "grad_norm": [[9, "Infinity"]]}
    drawn = {line["metric"]: chart["key"] for chart in data["charts"] for line in chart["lines"]}
    assert drawn["loss"] == drawn["eval_loss"] == drawn["eval_news_loss"] == "loss"  # a line for each held-out set
    assert drawn["data_wait_s"] == drawn["step_time_s"]
    assert not {"loss_scale", "skipped", "eval_news_samples"} & drawn.keys()  # that say nothing here
    assert run["levels"] == {"grad_norm": 1.0}
    assert [mark["at"][0] for mark in run["marks"] if mark["kind"] == "epoch"] == [40]


def test_the_final_numbers_are_the_last_ones_and_what_they_span(tmp_path: Path) -> None:
    records = [record(step, loss=float(loss)) for step, loss in enumerate((4, 1, 9, 2, math.nan), 1)]
    rows = _page(a_run(tmp_path / "run", records)).rows("last")
    assert rows["loss"] == ["nan", "5", "1", "3", "9", ""]  # last, its step, min, median, max; a best one when held out
    assert rows["memory_bytes"][0] == "1 GiB"
    assert rows["step_time_s"][0] == "500 ms"


def test_what_people_ask_first_is_named(tmp_path: Path) -> None:
    """Model and data; the best value and its step; of which ranks was the slowest there is a table and no curve."""
    records = [
        record(s, eval_loss=float(value), eval_f1=s / 8, slowest_rank=s % 3, slowest_over_median=1 + s / 8)
        for s, value in enumerate((4, 2, 3, 2, 5), 1)
    ]
    folder = a_run(tmp_path / "run", records)
    (folder / "plan.json").write_text('{"model": "Net, 12 parameters", "data": "12 rows"}')
    found = _page(folder)
    (run,) = found.data["runs"]
    assert "Net, 12 parameters · 12 rows" in found.text
    assert "loss 2 at step 2" in found.rows("runs")["run"]
    assert [found.rows("last")[f"eval_{name}"][-1] for name in ("loss", "f1")] == ["2 at step 2", "0.625 at step 5"]
    assert run["best"]["eval_loss"]["at"][:2] == [2, 16]
    assert "slowest_rank" not in run["y"].keys() | found.rows("last").keys()
    table = next(rows for rows in found.tables.values() if rows[0] == ["rank", "records", "time over the median"])
    slow = [["rank 1", "2", "1.12 to 1.50 x"], ["rank 2", "2", "1.25 to 1.62 x"], ["rank 0", "1", "1.38 x"]]
    assert table[1:] == slow
    assert [written(rate, "count") for rate in (168.72612, 1687.2612)] == ["168.7", "1,687"]


@pytest.mark.parametrize(
    ("of_a_sample", "unit"), [(32, "tokens"), (1, "samples"), (0.75, "samples"), (1.3, "samples"), (2.0, "tokens")]
)
def test_tokens_are_named_where_they_are_counted(tmp_path: Path, of_a_sample: float, unit: str) -> None:
    """Neither for images and rows, nor where the loss counts a sum of weights, which stands nowhere."""
    records = [record(step, tokens=8 * step * of_a_sample, samples_per_s=312.0) for step in (1, 3)]
    found = _page(a_run(tmp_path / "run", records))
    assert ("tokens" in found.tables["runs"][0]) == ("tokens_per_s" in found.rows("last")) == (unit == "tokens")
    charts = {chart["key"]: (chart["unit"], chart["lines"][0]["metric"]) for chart in found.data["charts"]}
    assert charts["loss"] == (f"mean per {unit[:-1]}", "loss")
    assert charts["throughput"] == (f"{unit}/s, over all ranks", f"{unit}_per_s")


HOSTILE = "<script>alert(1)</script>"


def test_names_and_texts_of_a_run_are_no_html(tmp_path: Path) -> None:
    """A folder, a setting, a metric, a reason and a log line that would run a script, or end one."""
    name = "a'\"><img src=x onerror=alert(1)>&amp;"
    records = [record(step, **{f"eval_{HOSTILE}": 1.0, "eval_<!--": 2.0, "eval_</script <b>": 3.0}) for step in (1, 2)]
    status = {"state": "failed", "step": 2, "reason": f"rank 0: ValueError: {HOSTILE}"}
    folder = a_run(tmp_path / name, records, status=status, config={HOSTILE: f"</script>{HOSTILE}", "x": "\"'<b>"})
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text(f"12:00 WARNING {HOSTILE}\n")
    (folder / "plan.json").write_text(json.dumps({"world_size": HOSTILE, "optimizer_groups": [{"states": HOSTILE}]}))
    other = a_run(tmp_path / "b", records)
    for found in (_page(folder), _page(folder, other)):
        assert found.tags.count("script") == 2
        assert "<" not in found.scripts[0]  # nothing that could end it, to any browser
        assert not {"img", "b>"} & set(found.tags)
        assert found.data["runs"][0]["name"] == name
        assert f"eval_{HOSTILE}" in found.data["runs"][0]["y"]
        assert f"rank 0: ValueError: {HOSTILE}" in found.text
        assert f"12:00 WARNING {HOSTILE}" in found.text
        assert name in found.text


def test_the_file_loads_nothing_and_runs_its_own_script_alone(tmp_path: Path) -> None:
    text = page(read_runs([a_run(tmp_path / "run", [record(1)])]))
    assert not re.search(r"""(src|href)\s*=|@import|url\(["']?(?!#)""", text.replace("url(#${clip})", ""))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    digest = b64encode(sha256(Page(text).scripts[-1].encode()).digest()).decode()
    assert policy[1] == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_several_runs_show_what_differs_and_which_is_better(tmp_path: Path) -> None:
    config = {"optim": {"lr": 0.01, "clip_norm": 1.0}, "seed": 0, "data": {"path": "x"}}
    first = a_run(tmp_path / "1" / "run", [record(s, eval_loss=9.0 - s) for s in range(1, 6)], config=config)
    other = {**config, "optim": {"lr": "1e-3", "clip_norm": 1.0}}
    second = a_run(tmp_path / "2" / "run", [record(s, loss=2.0, eval_loss=5.0 + s) for s in range(1, 3)], config=other)
    found = _page(first, second)
    assert [run["name"] for run in found.data["runs"]] == ["1/run", "2/run"]
    assert [len(run["x"]["step"]) for run in found.data["runs"]] == [5, 2]
    differences = next(rows for rows in found.tables.values() if rows[0][0] == "setting")
    assert differences[1:] == [["optim.lr", "0.01", "1e-3"]]
    assert found.rows("last")["eval_loss"] == ["4", "7"]
    text = page(read_runs([first, second]))
    assert '<td>eval_loss</td><td><b class="best"><span title="4.0">4</span></b></td>' in text
    assert "<td>loss, min</td><td><span title=" in text  # 5.5, against 2
    with pytest.raises(ConfigError, match="named twice"):
        read_runs([first, tmp_path / "1" / ".." / "1" / "run"])


def test_of_a_long_run_what_tells_the_most_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its records: the first and the last one, every extreme and whatever is rare among them."""
    monkeypatch.setattr("distaccum.tools.report.read._MOST_READ", 100)
    monkeypatch.setattr("distaccum.tools.report.read.PARTS", 20)
    records = [record(step) for step in range(1, 1001)]
    rare = {313: {"loss": 99.0}, 414: {"loss": -1.0}, 515: {"grad_norm": 50.0}, 616: {"eval_loss": 1.5}}
    rare |= {717: {"loss": math.nan}, 818: {"applied": False}, 919: {"grad_norm": math.inf}}
    for step, values in rare.items():
        records[step - 1] |= values
    folder = a_run(tmp_path / "run", records, more='nonsense\n{"st')
    (run,) = read_runs([folder])
    steps = [one["step"] for one in run.records]
    assert {1, 1000, *rare} <= {*steps}
    assert (run.logged, run.damaged) == (1000, 2)
    assert steps == sorted(steps)
    assert len(steps) < 100
    part = records[51:102]  # its loss falls
    highest = max(part, key=lambda one: float(str(one["grad_norm"])))
    assert {52, 102, highest["step"]} <= {*steps}
    found = _page(folder)
    assert f"of 1,000 records {len(steps)} are read" in found.text
    rows = found.rows("last")
    assert (rows["loss"][1], rows["grad_norm"][4], rows["eval_loss"][0]) == ("1,000", "50", "1.5")


def test_what_is_damaged_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", [record(1), record(2)], more='[1, 2]\nnonsense\n{"step": 3, "loss": "text"}\n{"st')
    for name in ("plan.json", "history.json", "environment.json", ".hydra/overrides.yaml", ".hydra/config.yaml"):
        (folder / name).write_bytes(b"\xff{[")
    (folder / "status.json").write_text("[]")
    (folder / "metrics.superseded.jsonl").write_text("{}\n" * 4)
    found = _page(folder)
    assert found.data["runs"][0]["x"]["step"] == [1, 2, 3]
    assert found.data["runs"][0]["y"]["loss"][2] is None
    assert "3 lines of metrics.jsonl are damaged" in found.text
    assert "4 records were made again" in found.text
    assert "has no status.json" in found.text


def test_odd_values_stop_no_report(tmp_path: Path) -> None:
    """A name and a setting that are no text, numbers beyond floats, and things of other kinds than a run writes."""
    name = os.fsdecode(b"run-\xff")
    records = [
        record(1, huge=10**400, text="x", list=[1], nothing=None, epoch=True, constructor=1.0),
        record(2, window="w"),
    ]
    folder = a_run(tmp_path / name, records, config={"optim": 3, "checkpoint": [], "engine": "ddp"})
    (folder / "plan.json").write_text('{"optimizer_groups": [{"parameters": "many"}, 7], "world_size": "\\ud800"}')
    (folder / "environment.json").write_text('{"config": 7, "starts": [3, {"before": 4}, {"before": {"state": []}}]}')
    (folder / "history.json").write_text('{"rolled_back": [7, {"to_step": "x"}]}')
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_bytes(b"2026 INFO mine: ERROR rate 0\n2026 ERROR mine: \xff\n")
    found = _page(folder, a_run(tmp_path / "empty"))
    assert found.data["runs"][0]["y"]["constructor"] == [1.0, None]
    assert "many" in found.text
    assert "[rank 0] 2026 ERROR mine" in found.text
    assert "[rank 0] 2026 INFO" not in found.text


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"state": "failed", "step": 7, "reason": "rank 1: OSError: no room"}, "failed at step 7. rank 1: OSError"),
        ({"state": "running", "step": 7, "reason": ""}, "running when this was written"),
        ({"state": "preempted", "step": 7, "reason": "SIGTERM"}, "preempted at step 7. SIGTERM"),
        ({"state": "config_error", "reason": "optim.lr=x: not a number"}, "failed at step 0. optim.lr=x: not a number"),
    ],
)
def test_how_the_run_ended_is_on_top(tmp_path: Path, status: dict[str, object], said: str) -> None:
    folder = a_run(tmp_path / "run", [record(1)], status=status)
    top = _page(folder).text.partition("Final numbers")[0]
    assert said in " ".join(top.split())
    for name in ("metrics.jsonl", ".hydra/config.yaml"):  # a run that was refused leaves its status alone
        (folder / name).unlink()
    assert said in " ".join(_page(folder).text.split())


@pytest.mark.parametrize(
    "records", [[], [{"step": 3, "window": 3, "epoch": 0, "samples": 9, "tokens": 9, "eval_loss": 2}]]
)
def test_a_run_that_trained_nothing_has_a_report(tmp_path: Path, records: list[dict[str, object]]) -> None:
    found = _page(a_run(tmp_path / "run", records))
    assert [chart["key"] for chart in found.data["charts"]] == ["loss"] * len(records)


def test_secrets_that_a_file_still_holds_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-of-the-environment")
    secrets = ("canary-of-a-key", "canary-of-the-environment", "hf_canaryABCDEFGHIJKLMNOP")
    config = {"data": {"api_key": secrets[0], "path": f"/x/{secrets[1]}"}}
    status = {"state": "failed", "step": 1, "reason": f"could not open {secrets[0]} and {secrets[2]}"}
    folder = a_run(tmp_path / "run", [record(1)], config=config, status=status)
    (folder / ".hydra" / "overrides.yaml").write_text(f"- data.api_key={secrets[0]}\n- x={secrets[2]}\n")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text(f"WARNING {secrets[0]}\ntoken='{secrets[2]}'\n")
    start = {"at": "now", "command": f"train.py data.path={secrets[1]}"}
    (folder / "environment.json").write_text(json.dumps({"starts": [start]}))
    text = page(read_runs([folder]))
    assert [secret for secret in secrets if secret in text] == []
    assert "&lt;redacted&gt;" in text


def test_marks_stand_where_it_happened(tmp_path: Path) -> None:
    """A start, a rollback, a checkpoint that is kept, an attempt that was skipped."""
    records = [record(step) for step in range(1, 31)]
    records[11] |= {"applied": False, "step": 11}
    folder = a_run(tmp_path / "run", records)
    (folder / "checkpoints" / "step-20").mkdir(parents=True)
    (folder / "history.json").write_text(json.dumps({"rolled_back": [{"to_step": 10, "after_window": 25}]}))
    starts = [
        {"step": 0, "window": 0, "ranks": 1},
        {"step": 14, "window": 15, "ranks": 2, "before": {"state": "running", "step": 19, "reason": ""}},
    ]
    (folder / "environment.json").write_text(json.dumps({"starts": starts}))
    found = {mark["kind"]: mark for mark in _page(folder).data["runs"][0]["marks"]}
    assert {kind: mark["at"][:2] for kind, mark in found.items()} == {
        "start": [15, 120],
        "rollback": [25, 200],
        "checkpoint": [20, 160],
        "skip": [11, 96],
    }
    assert found["start"]["text"] == "resumed at step 14: the process before was killed; 1 → 2 ranks"
    assert found["rollback"]["text"] == "rolled back to step 10"
    other = a_run(tmp_path / "other", [record(step) for step in (10, 20, 30)])
    for step in (5, 10, 24, 30, 35):
        (other / "checkpoints" / f"step-{step}").mkdir(parents=True)
    places = [mark["at"][:3] for mark in _page(other).data["runs"][0]["marks"]]
    near = (10, 10, 24, 30, 30)  # between two records, or as near as the first and the last one
    assert places == [pytest.approx([step, 8 * step, record(step)["tokens"]]) for step in near]


def test_many_records_keep_their_extremes(tmp_path: Path) -> None:
    """Each part of the records keeps its least and its greatest value, in their order, and every odd one a mark."""
    values = [math.sin(i * i) for i in range(5000)]
    records = [record(i + 1, loss=value) for i, value in enumerate(values)]
    records[3210]["loss"] = values[3210] = math.nan
    points = thinned(columns(records), 50)
    assert points.records == 5000
    assert len(points.x["step"]) == len(points.y["loss"]) == 100
    for part in range(50):
        own = [value for value in values[100 * part : 100 * part + 100] if not math.isnan(value)]
        first, second = points.y["loss"][2 * part : 2 * part + 2]
        assert {first, second} == {min(own), max(own)}
        assert (own.index(first) < own.index(second)) or first == second
        assert points.x["step"][2 * part : 2 * part + 2] == [100 * part + 1, 100 * part + 100]
    assert points.bad == {"loss": [(64, "NaN")]}


@pytest.mark.heavy
def test_two_hundred_thousand_records_are_a_small_file_that_says_so(tmp_path: Path) -> None:
    records = [record(step, noise=math.sin(step * step)) for step in range(1, 200_001)]
    folder = a_run(tmp_path / "run", records)
    text = page(read_runs([folder]))
    assert len(text) < 2_000_000
    assert "200,000 records are drawn as 2,000 points" in Page(text).text
    assert max(Page(text).data["runs"][0]["y"]["noise"]) == max(math.sin(step * step) for step in range(1, 200_001))


def test_many_runs_are_a_small_file(tmp_path: Path) -> None:
    many = [a_run(tmp_path / f"run-{i}", [record(step) for step in range(1, 301)]) for i in range(40)]
    assert len(page(read_runs(many))) < 2_000_000


def test_what_differs_from_the_defaults(tmp_path: Path) -> None:
    config = {
        "optim": {"lr": 0.01, "clip_norm": 1.0},
        "engine": {"name": "fsdp2", "sync": "every", "offload": False},
        "data": {"_target_": "distaccum.data.datasets.text.docs", "seq_len": 64},
        "model": {"_target_": "distaccum.models.gpt.GPT", "seq_len": "${data.seq_len}", "n_layer": 4},
        "schedule": {"_target_": "distaccum.train.schedules.Cosine", "final_ratio": "5e-2"},  # a text, to YAML
        "mine": {"what": 1},
    }
    found = _page(a_run(tmp_path / "run", [record(1)], config=config))
    rows = next(table for table in found.tables.values() if table[0] == ["setting", "value", "default"])
    assert rows[1:] == [
        ["data.seq_len", "64", "128"],
        ["engine.name", "fsdp2", "ddp"],
        ["engine.sync", "every", "boundary"],
        ["mine.what", "1", "-"],
        ["optim.lr", "0.01", "0.003"],
    ]


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["distaccum", *map(str, arguments)])
    try:
        command.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (a_run(tmp_path / name, [record(1), record(2)]) for name in "ab")
    monkeypatch.chdir(tmp_path)
    assert _main(monkeypatch, first) == 0
    assert capsys.readouterr().out == f"{first / 'report.html'}\n"
    assert _main(monkeypatch, "a", "b") == 0
    assert Page((tmp_path / "report.html").read_text()).data["runs"][1]["name"] == "b"
    assert _main(monkeypatch, second, "-o", tmp_path / "gone" / "x.html") == 1
    assert "gone/x.html: No such file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "report.html"]


def test_a_folder_that_is_no_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "sweep" / "0", [record(1)])
    (tmp_path / "empty").mkdir()
    good = tmp_path / "sweep" / "0"
    for asked, said in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "empty", "is no run: it has neither metrics.jsonl nor status.json"),
        (tmp_path / "sweep", f"but holds runs: 0. Name these: {tmp_path / 'sweep'}/*/"),
    ):
        assert _main(monkeypatch, good, asked) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"distaccum report: configuration error: RUN={asked}: ")
        assert said in error
        assert error.count("\n") == 1


@pytest.mark.slow
def test_pictures_are_pngs_of_each_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [a_run(tmp_path / name, [record(step) for step in range(1, 9)]) for name in "ab"]
    assert _main(monkeypatch, *folders, "--png", "-o", tmp_path / "both.html") == 0
    charts = [chart["key"] for chart in Page((tmp_path / "both.html").read_text()).data["charts"]]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(f"both-{key}.png" for key in charts)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    """Nor anything else that takes seconds to import, where no picture is asked for."""
    folder = a_run(tmp_path / "run", [record(1)])
    program = (
        f"import sys; sys.argv = ['x', {str(folder)!r}]\nfrom distaccum.tools.report.command import main\nmain()\n"
    )
    program += "print(*{name.partition('.')[0] for name in sys.modules})"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(finished.stdout.split())
    assert "distaccum" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "hydra", "rich", "wandb"}
    assert (folder / "report.html").is_file()
