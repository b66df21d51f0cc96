"""A report in a real browser: what it draws, what its switches do, and that nothing goes wrong on the way."""

import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distaccum.tools.report.page import page
from distaccum.tools.report.read import read_runs
from tests.tools.report.files import a_run, record

pytestmark = pytest.mark.slow

CLICKS = Path(__file__).with_name("clicks.js").read_text()


def _browser() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("DISTACCUM_REQUIRE_TOOLS"):
            pytest.fail("chromium is missing")
        pytest.skip("chromium is missing")
    return found


def _opened(file: Path, folder: Path) -> str:
    """The document after its scripts have run; nothing may have been said on the console."""
    finished = subprocess.run(
        [
            *(_browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
            *("--enable-logging=stderr", "--v=0", "--window-size=1400,1000", "--virtual-time-budget=2000"),
            *("--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert re.findall(r".*CONSOLE.*", finished.stderr) == []
    return finished.stdout


def _runs(folder: Path) -> list[Path]:
    first = [record(step, constructor=1.0) for step in range(1, 101)]  # a name that every object has
    first[49]["loss"] = math.nan
    first[59]["grad_norm"] = -math.inf
    first[69] |= {"applied": False, "skipped": 1, "loss": -0.5}
    for step in (25, 50, 75, 100):
        first[step - 1] |= {
            "eval_news_loss": 4 - step / 50,
            "eval_web_loss": 3.0,
            "eval_news_samples": 8,
            "eval_web_samples": 8,
        }
    second = [record(step, loss=2.0) for step in range(1, 41)]
    config = {"optim": {"clip_norm": 1.0}, "seed": 3}
    made = [a_run(folder / "a", first, config=config), a_run(folder / "b", second), a_run(folder / "empty")]
    (made[0] / "checkpoints" / "step-50").mkdir(parents=True)
    (made[0] / "history.json").write_text(json.dumps({"rolled_back": [{"to_step": 80, "after_window": 90}]}))
    return made


def _by_curve(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["run"], one["metric"]): one for one in found}


def test_the_browser_draws_every_number_and_the_switches_switch(tmp_path: Path) -> None:
    runs = _runs(tmp_path)
    whole = tmp_path / "report.html"
    whole.write_text(page(read_runs(runs)))
    drawn = _opened(whole, tmp_path)  # under its own policy: no script but its own
    assert drawn.count('class="curve"') == 2 * 8 + 3  # eight of each run, and the held-out sets and a number of one
    clicked = tmp_path / "clicked.html"
    text = re.sub(r"<meta http-equiv=[^>]+>", "", whole.read_text())
    clicked.write_text(text.replace("</body>", f"<script>{CLICKS}</script></body>"))
    found = re.search(r'<pre id="seen">(.*?)</pre>', _opened(clicked, tmp_path), re.DOTALL)
    assert found is not None
    seen = json.loads(html.unescape(found[1]))
    assert {name: count for name, count in seen.items() if name.endswith(" broken") and count} == {}

    read = {
        path.name: [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in runs
    }
    start = _by_curve(seen["start"])
    assert {("a", "eval_news_loss"), ("a", "eval_web_loss"), ("b", "loss")} <= start.keys()
    for (run, metric), curve in start.items():
        there = [one[metric] for one in read[run] if metric in one]
        assert curve["points"] == sum(math.isfinite(value) for value in there), (run, metric)
        assert curve["breaks"] == sum(not math.isfinite(value) for value in there), (run, metric)
    assert start["a", "eval_news_loss"]["chart"] == start["a", "eval_web_loss"]["chart"] == "loss"
    assert "NaN or infinite: 1" in seen["start text"]
    assert seen["key"] == "an epoch beginsrolled backcheckpointstep skippedoptim.clip_normbest valueNaN or infinite"
    assert seen["best"] == ["held-out news: best 2 at step 100", "held-out web: best 3 at step 25"]
    assert seen["marks"] == 6  # three epochs' beginnings, a rollback, a checkpoint, a skip
    assert seen["no marks"] == 0

    for axis in ("samples", "tokens", "hours", "step"):
        assert [one["points"] for one in seen[axis]] == [one["points"] for one in seen["start"]]
    assert _by_curve(seen["log"])["a", "loss"]["points"] == start["a", "loss"]["points"] - 1  # without the one below 0
    assert "1 values of 0 or less are not on a logarithmic axis" in seen["log text"]
    smooth = _by_curve(seen["smooth"])
    assert smooth["b", "loss"]["first"] == start["b", "loss"]["first"]  # an average begins at the first value
    assert smooth["a", "lr"]["points"] == start["a", "lr"]["points"]

    assert seen["tip"].startswith("step 100")
    assert "1e-5" in seen["tip"]  # the last rate of a
    assert (seen["zoomed"], seen["whole"]) == (True, True)
    assert _by_curve(seen["zoom"])["a", "lr"]["first"] != start["a", "lr"]["first"]
    assert seen["reset"] == seen["start"]
    assert {one["run"] for one in seen["without b"]} == {"a"}
    assert seen["without both"] == []
    assert seen["found"] == ["optim.clip_norm1.0"]
