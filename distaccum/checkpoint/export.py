"""``distaccum-export CHECKPOINT TARGET``: a checkpoint's weights, of any engine, in one file or a Hugging Face folder.

A ``TARGET`` that ends with ``.safetensors`` is one file: it loads with
``model.load_state_dict(safetensors.torch.load_file(FILE))``, and with ``init_from=FILE``. Any other is a folder, for
``from_pretrained`` and ``init_from``. Exit codes: 0 done, 2 no such checkpoint, or nowhere to write to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distaccum import program
from distaccum.checkpoint.pretrained import cast, save_adapter, save_folder
from distaccum.checkpoint.store import verify
from distaccum.checkpoint.tensors import TensorFiles, save_whole
from distaccum.config.sizes import bytes_of
from distaccum.errors import CheckpointError, ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRAINED, AVERAGE = "trained", "ema"
_EPILOG = """\
examples:
  distaccum export runs/NAME/checkpoints/step-300 weights.safetensors
  distaccum train init_from=weights.safetensors
  distaccum export runs/NAME/checkpoints/step-300 out --config-from llama

exit codes: 0 done; 2 no such checkpoint, or nowhere to write to
"""


class _With(Mapping[str, Tensor]):
    """Tensors, some of them replaced; each is read when it is asked for."""

    def __init__(self, replaced: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        self._replaced, self._tensors = replaced, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._replaced[name] if name in self._replaced else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def export(
    checkpoint: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    config_from: Path | None = None,
    weights: str = TRAINED,
) -> int:
    """Writes the weights, in fp32 as the optimizer steps them; returns their number.

    Args:
        checkpoint: a folder ``checkpoints/step-N``.
        target: a safetensors file, or a folder that is not there.
        dtype: of floating-point weights: ``fp32``, ``bf16`` or ``fp16``; None: as they are.
        max_shard_size: of a folder's files.
        config_from: a folder whose ``config.json`` and tokenizer go into the target's.
        weights: ``trained``, or ``ema``: their moving average, beside what has none (buffers, and what is not trained).

    Raises:
        ConfigError: no such size.
        CheckpointError: the checkpoint is not there, or damaged, or has no average; the folder is there, or has no
            configuration.
        OSError: something cannot be written.
    """
    if not checkpoint.is_dir():
        there = ", ".join(sorted(path.name for path in checkpoint.parent.glob("step-*")))
        raise CheckpointError(f"{checkpoint}: there is no such folder{there and f'; beside it are {there}'}")
    size = int(bytes_of("--max-shard-size", max_shard_size))
    one_file = target.suffix == ".safetensors"
    if one_file and config_from is not None:
        raise CheckpointError(f"{target} is one file, and --config-from describes a folder: name a folder")
    verify(checkpoint)
    tensors: Mapping[str, Tensor] = TensorFiles(checkpoint, "model")
    if weights == AVERAGE:
        if not any(checkpoint.glob(f"{AVERAGE}*.safetensors")):
            raise CheckpointError(f"{checkpoint} has no {AVERAGE}: it is kept by a run with callbacks={AVERAGE}")
        tensors = _With(TensorFiles(checkpoint, AVERAGE), tensors)
    adapter = _adapter(checkpoint)
    form = DTYPES[dtype] if dtype else None
    if one_file:
        save_whole({name: cast(tensors[name], form) for name in tensors} if form else tensors, target)
    elif adapter:
        if config_from is not None:
            raise CheckpointError(
                f"{checkpoint} holds adapters, whose folder describes itself: leave out --config-from"
            )
        save_adapter(tensors, target, dtype=form, names=adapter["names"], config=adapter["config"])
    else:
        save_folder(tensors, target, dtype=form, shard_bytes=size, source=config_from)
    return len(tensors)


def _adapter(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint says of the adapters that it holds; empty where it holds a model."""
    try:
        facts = json.loads((checkpoint / "state.json").read_text()).get("facts", {})
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint}: no readable state.json ({error})") from error
    found: dict[str, Any] = facts.get("adapters") or {}
    return found


def main() -> None:
    """Runs ``distaccum-export``."""
    program.start()
    description = "Writes a checkpoint's weights into one file, or a Hugging Face folder."
    parser = program.Arguments("export", description, _EPILOG)
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoints/step-N")
    parser.add_argument("target", type=Path, help="the safetensors file to write; any other name is a folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point weights; by default as they are trained")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a folder's files: 5GB, the default")
    parser.add_argument(
        "--config-from", type=Path, metavar="FOLDER", help="whose config.json and tokenizer go into the folder"
    )
    parser.add_argument(
        "--weights", choices=(TRAINED, AVERAGE), default=TRAINED, help="those that train, or their moving average"
    )
    given = parser.of()
    try:
        count = export(
            given.checkpoint,
            given.target,
            dtype=given.dtype,
            max_shard_size=given.max_shard_size,
            config_from=given.config_from,
            weights=given.weights,
        )
    except (CheckpointError, ConfigError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    sys.stdout.write(f"{given.target}: {count} tensors of {given.checkpoint}\n")


if __name__ == "__main__":
    main()
