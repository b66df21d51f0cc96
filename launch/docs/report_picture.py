"""Makes docs/images/report.png, of two short runs and headless Chromium: ``python -m launch.docs.report_picture``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from distaccum.tools.report.page import page
from distaccum.tools.report.read import read_runs

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "report.png"
_SIZE = "1400,1036"
_SETTINGS = (
    "data.seq_len=16",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=64",
    "schedule.warmup_steps=2",
    "metrics=jsonl",
    "metrics.console=false",
    "trainer.log_every=5",
    "trainer.eval_every=20",
    "trainer.eval_samples=256",
    "checkpoint.every=100",
)


def _train(folder: Path, *settings: str) -> None:
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *_SETTINGS, *settings, f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1"} | os.environ, check=True)  # noqa: S603  as stated


def main() -> None:
    """Trains both runs, and photographs their report."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium is missing")
    with TemporaryDirectory() as place:
        folder = Path(place)
        runs = [folder / "lr-0.003", folder / "lr-0.03"]
        _train(runs[0], "optim.lr=0.003", "trainer.max_steps=300")
        _train(runs[1], "optim.lr=0.03", "trainer.max_steps=300")
        report = folder / "report.html"
        report.write_text(page(read_runs(runs)), encoding="utf-8")
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={_SIZE}"]
        command = [browser, *arguments, f"--user-data-dir={folder / 'profile'}", f"--screenshot={PICTURE}"]
        subprocess.run([*command, report.as_uri()], check=True, capture_output=True)  # noqa: S603  as stated


if __name__ == "__main__":
    main()
