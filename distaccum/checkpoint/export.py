"""``distaccum-export CHECKPOINT FILE``: a checkpoint's weights, of any engine, in one safetensors file.

The file loads with ``model.load_state_dict(safetensors.torch.load_file(FILE))``, and with ``init_from=FILE``. Exit
codes: 0 done, 2 no such checkpoint, or nowhere to write to.
"""

from __future__ import annotations

import sys
from pathlib import Path

from distaccum import program
from distaccum.checkpoint.store import verify
from distaccum.checkpoint.tensors import TensorFiles, save_whole
from distaccum.errors import CheckpointError

_EPILOG = """\
examples:
  distaccum export runs/NAME/checkpoints/step-300 weights.safetensors
  distaccum train init_from=weights.safetensors

exit codes: 0 done; 2 no such checkpoint, or nowhere to write to
"""


def export(checkpoint: Path, file: Path) -> int:
    """Writes the weights, in fp32 as the optimizer steps them; returns their number.

    Raises:
        CheckpointError: the checkpoint is not there, or damaged.
        OSError: the file cannot be written.
    """
    if not checkpoint.is_dir():
        there = ", ".join(sorted(path.name for path in checkpoint.parent.glob("step-*")))
        raise CheckpointError(f"{checkpoint}: there is no such folder{there and f'; beside it are {there}'}")
    verify(checkpoint)
    tensors = TensorFiles(checkpoint, "model")
    save_whole(tensors, file)
    return len(tensors)


def main() -> None:
    """Runs ``distaccum-export``."""
    program.start()
    description = "Writes a checkpoint's weights, of any engine, into one safetensors file."
    parser = program.Arguments("export", description, _EPILOG)
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoints/step-N")
    parser.add_argument("file", type=Path, help="the safetensors file to write")
    given = parser.of()
    try:
        count = export(given.checkpoint, given.file)
    except (CheckpointError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    sys.stdout.write(f"{given.file}: {count} tensors of {given.checkpoint}\n")


if __name__ == "__main__":
    main()
