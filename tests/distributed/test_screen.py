"""What stands on a real terminal, tmux's, while a run trains on it, and when it has ended."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.distributed.workers.screen import WORDS
from tests.support.commands import ROOT, command, environment, metrics
from tests.support.terminal import Tmux

pytestmark = pytest.mark.slow
LIVE = re.compile(r"step \d+/1,000,000(  |$)")


@pytest.mark.parametrize(("columns", "ranks"), [(80, 2), pytest.param(120, 1, marks=pytest.mark.heavy)])
def test_what_happens_stays_in_the_scrollback_and_one_row_lives(tmp_path: Path, columns: int, ranks: int) -> None:
    start = command(ranks, ROOT / "tests" / "distributed" / "workers" / "screen.py", [tmp_path])
    run = Tmux(tmp_path, columns, start, environment(PYTHONPATH=str(ROOT), TERM="screen"))
    try:
        run.wait_for((tmp_path / "waits-6").exists)
        time.sleep(0.6)  # two drawings
        (live,) = [row for row in run.rows if LIVE.match(row)]
        assert run.rows[-1] == live
        assert len(live) < columns
        assert "loss" in live.split()
        for narrow in (columns // 2, columns // 3, columns):
            run.resize(narrow)
            time.sleep(0.6)
            assert [row for row in run.lines if LIVE.match(row)] == run.lines[-1:]
        assert run.shows_cursor
        (tmp_path / "go-6").touch()

        run.wait_for((tmp_path / "waits-24").exists)
        run.press("C-c")
        (tmp_path / "go-24").touch()
        run.wait_for(lambda: "ENDED" in run.lines[-1])
        said = run.lines
        assert not [line for line in said if LIVE.match(line)]
        assert run.shows_cursor
        records = metrics(tmp_path / "run")
        for record in records:
            text = f"loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}"
            assert len([line for line in said if line.startswith(f"step {record['step']:>6}/1000000  {text}")]) == 1
            if "eval_loss" in record:
                assert f"step {record['step']:>6}/1000000  held-out:  loss {record['eval_loss']:.4f}  samples 4" in said
        skipped = [record for record in records if not record["applied"]]
        assert skipped
        joined = " ".join(line.strip() for line in said)
        assert joined.count("SKIPPED: the gradient is NaN or infinite") == len(skipped)
        for step in (4, 8, 20):
            assert f"step {step:>6}/1000000  saved: {tmp_path}/run/checkpoints/step-{step} " in joined
        for rank in range(ranks):
            assert f"rank {rank} prints {WORDS}" in said
            assert [line for line in said if line.endswith(f"UserWarning: rank {rank} warns")]
            assert f"rank {rank} logs" in said
            assert f"rank {rank} counts 3/3" in said
            log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
            assert log.count(f" WARNING users.own: rank {rank} logs\n") == 1
            assert log.count(f"UserWarning: rank {rank} warns\n") == 1
        assert "preempted (SIGINT): 24 of 1000000 updates; saved in" in joined
        own = [row for row in run.rows if row.startswith(("step ", "  ", "run ", "epoch ", "preempted"))]
        assert all(len(row) <= columns for row in own if str(tmp_path) not in row)
    finally:
        run.kill()
