"""``distaccum wandb-upload RUN``: a run's records, sent to Weights & Biases after the run.

For a run whose tracker was off, refused or killed: ``metrics.jsonl`` has each record, whatever became of the tracker.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from distaccum import program
from distaccum.tools.arguments import Arguments
from distaccum.tools.wandb import INIT_TIMEOUT_S, Sender, shown
from distaccum.train.metrics.loggers import records_of


def upload(run_dir: Path, *, mode: str = "online", run_id: str | None = None) -> int:
    """Makes a W&B run of ``metrics.jsonl``, each record once, with the configuration of the newest checkpoint.

    Args:
        run_dir: of a run that trains no more.
        mode: ``online``, or ``offline`` for a folder that ``wandb sync`` uploads.
        run_id: of the W&B run, which must be a new one; None for a new id.

    Returns:
        how many records.

    Raises:
        OSError: there is no ``metrics.jsonl``.
    """
    import wandb  # noqa: PLC0415

    path = run_dir / "metrics.jsonl"
    path.stat()  # or there are no records to send
    config = _saved_config(run_dir)
    about = config.get("metrics", {}).get("wandb", {})
    checkpoint = config.get("checkpoint", {})
    texts = {key: about.get(key) for key in ("name", "tags")}
    number = 0
    with wandb.init(
        dir=str(run_dir),
        mode="offline" if mode == "offline" else "online",
        id=run_id,
        project=about.get("project") or os.environ.get("WANDB_PROJECT") or "distaccum",
        **texts,
        config=shown(config, _plan(run_dir), None),
        settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S, x_disable_meta=True),
    ) as run:
        sender = Sender(run, (checkpoint.get("best"), checkpoint.get("mode") or checkpoint.get("best_mode")))
        for record in records_of(path):
            sender.send(record)
            number += 1
    return number


def _saved_config(run_dir: Path) -> dict[str, Any]:
    """Without secrets, as they are saved; empty without a checkpoint."""
    try:
        latest = (run_dir / "checkpoints" / "latest").read_text().strip()
        saved: dict[str, Any] = json.loads((run_dir / "checkpoints" / latest / "state.json").read_bytes())["config"]
    except (OSError, ValueError, KeyError):
        return {}
    return saved


_EPILOG = """\
examples:
  distaccum wandb-upload runs/NAME
  distaccum wandb-upload runs/NAME --offline       then: wandb sync

exit codes: 0 done; 1 it could not be made, and why; 2 bad arguments
"""


def _plan(run_dir: Path) -> dict[str, Any]:
    """Of the last process; empty where there is none."""
    try:
        plan: dict[str, Any] = json.loads((run_dir / "plan.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return plan


def main() -> None:
    """``distaccum wandb-upload RUN``: exit code 0, or 1 and one line on stderr."""
    program.start()
    description = "Makes a W&B run of a run's metrics.jsonl, each record once."
    parser = Arguments("wandb-upload", description, _EPILOG)
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--id", help="of the new W&B run (default: a new one)")
    parser.add_argument("--offline", action="store_true", help="into a folder that `wandb sync` uploads")
    given = parser.of()
    if not (given.run / "metrics.jsonl").is_file():
        parser.exit(1, f"{parser.prog}: {given.run}: no run, it has no metrics.jsonl. Name a run's folder\n")
    try:
        number = upload(given.run, mode="offline" if given.offline else "online", run_id=given.id)
    except Exception as error:  # W&B's own, of many kinds
        parser.exit(1, f"{parser.prog}: {type(error).__name__}: {error}\n")
    sys.stdout.write(f"{number} records of {given.run / 'metrics.jsonl'}\n")


if __name__ == "__main__":
    main()
