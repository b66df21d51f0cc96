"""The bench of elastic runs, in small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment


@pytest.mark.heavy
def test_a_kill_is_put_into_a_table_and_a_picture(tmp_path: Path) -> None:
    keys = ("ranks=2", "kills=1", "quiet_s=8", "every_s=8", "ways=[elastic]", "channels=4", f"out={tmp_path}")
    command = [sys.executable, str(ROOT / "launch" / "bench"), "elastic", *keys]
    given = environment(PYTHONPATH=str(ROOT))
    finished = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200)
    assert "s to the next window" in finished.stdout
    assert (tmp_path / "elastic.md").read_text().strip() in finished.stdout
    assert (tmp_path / "elastic.png").exists()
