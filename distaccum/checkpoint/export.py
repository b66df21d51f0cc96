"""``distaccum-export CHECKPOINT FILE``: a checkpoint's weights, of any engine, in one safetensors file.

The file loads with ``model.load_state_dict(safetensors.torch.load_file(FILE))``, and with ``init_from=FILE``. Exit
codes: 0 done, 2 no such checkpoint, or nowhere to write to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distaccum.checkpoint.store import verify
from distaccum.checkpoint.tensors import TensorFiles, save_whole
from distaccum.errors import CheckpointError


def export(checkpoint: Path, file: Path) -> int:
    """Writes the weights, in fp32 as the optimizer steps them; returns their number.

    Raises:
        CheckpointError: the checkpoint is not there, or damaged.
        OSError: the file cannot be written.
    """
    verify(checkpoint)
    tensors = TensorFiles(checkpoint, "model")
    save_whole(tensors, file)
    return len(tensors)


def main() -> None:
    """Runs ``distaccum-export``."""
    parser = argparse.ArgumentParser(prog="distaccum-export", description="A checkpoint's weights in one file.")
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoints/step-N")
    parser.add_argument("file", type=Path, help="the safetensors file to write")
    given = parser.parse_args()
    try:
        count = export(given.checkpoint, given.file)
    except (CheckpointError, OSError) as error:
        parser.exit(2, f"distaccum: {error}\n")
    sys.stdout.write(f"{given.file}: {count} tensors of {given.checkpoint}\n")


if __name__ == "__main__":
    main()
