"""The entry point that an agent starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT, environment


def test_without_an_agent_it_is_refused_by_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distaccum.elastic.run", f"hydra.run.dir={tmp_path / 'run'}"]
    finished = subprocess.run(
        command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert "no agent of an elastic job has started this. Start `python -m distaccum.elastic`" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
