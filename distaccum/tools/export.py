"""``distaccum export RUN TARGET``: a checkpoint's weights, of any engine, in one file or a Hugging Face folder.

A ``TARGET`` that ends with ``.safetensors`` is one file: it loads with
``model.load_state_dict(safetensors.torch.load_file(FILE))``, and with ``init_from=FILE``. Any other is a folder, for
``from_pretrained`` and ``init_from``. Exit codes: 0 done, 2 no such checkpoint, or nowhere to write to.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from distaccum import program
from distaccum.checkpoint import state
from distaccum.checkpoint.store import find, verify
from distaccum.checkpoint.tensors import TensorFiles, storable
from distaccum.config.checks import bytes_of
from distaccum.errors import CheckpointError, ConfigError, shorten
from distaccum.tools.arguments import Arguments
from distaccum.tools.hugging_face import CONFIG, FOLDER, copy_tokenizer, merged, whole_folder

# A folder as Hugging Face's ``from_pretrained`` reads it: weights in several files, their index, the configuration.


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Floating-point tensors in ``dtype``; all others, and without one, as they are."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def save_folder(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    source: Path | None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder, which is there whole or not at all.

    Tied weights are written under each of their names, which loads as one name does.

    Args:
        tensors: by name; one file's at a time are in memory.
        folder: must not be there.
        dtype: of floating-point tensors; None: as they are.
        shard_bytes: the most of one file, unless a tensor alone has more.
        source: a folder with ``config.json``, which is copied with the tokenizer's files; the format that it states is
            that of the weights written here.
        settings: of the configuration, in place of those that ``source`` has.

    Raises:
        CheckpointError: the folder is there, or ``source`` has no ``config.json`` that can be read.
        OSError: something cannot be written.
    """
    with whole_folder(folder) as staged:
        described = None if source is None else _config(source) | dict(settings or {})
        shards = _shards({name: cast(tensors[name], dtype).nbytes for name in tensors}, shard_bytes)
        homes: dict[str, str] = {}
        size, formats = 0, set[torch.dtype]()
        for number, names in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            part = {name: cast(tensors[name], dtype) for name in names}
            save_whole(part, staged / file)
            homes |= dict.fromkeys(names, file)
            size += sum(tensor.nbytes for tensor in part.values())
            formats |= {tensor.dtype for tensor in part.values() if tensor.is_floating_point()}
        if len(shards) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": homes}
            (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        if source is not None and described is not None:
            copy_tokenizer(source, staged)
            if len(formats) == 1:  # else from_pretrained would cast them to what the other folder had
                stated = str(formats.pop()).removeprefix("torch.")
                described |= {key: stated for key in ("dtype", "torch_dtype") if key in described} or {"dtype": stated}
            (staged / CONFIG).write_text(json.dumps(described, indent=2) + "\n")


def save_adapter(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    names: Mapping[str, str],
    config: Mapping[str, Any],
    source: Path | None = None,
) -> None:
    """Writes adapters as ``PeftModel.from_pretrained`` reads them; the folder is there whole or not at all.

    Args:
        tensors: by their names in the model.
        folder: must not be there.
        dtype: of floating-point tensors; None: as they are.
        names: PEFT's name of each.
        config: PEFT's description of them.
        source: a folder whose tokenizer is copied.

    Raises:
        CheckpointError: the folder is there, or a tensor is not the adapters'.
        OSError: something cannot be written.
    """
    with whole_folder(folder) as staged:
        if others := sorted(tensors.keys() ^ names.keys()):
            problem = f"PEFT's files have no place for {shorten(others)}"
            raise CheckpointError(f"{problem}: export one file, NAME.safetensors, for init_from")
        named = {given: cast(tensors[name], dtype) for name, given in names.items()}
        save_whole(named, staged / "adapter_model.safetensors")
        (staged / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if source is not None:
            copy_tokenizer(source, staged)


def save_whole(tensors: Mapping[str, Tensor], file: Path) -> None:
    """All of them in one file, which is there whole or not at all.

    Raises:
        CheckpointError: safetensors has no such type.
        OSError: it cannot be written.
    """
    stored, _ = storable(tensors, known=frozenset(tensor.dtype for tensor in tensors.values()))
    try:
        _save(stored, file)  # writes elsewhere first, and renames
    except KeyError as error:
        names = ", ".join(name for name, tensor in stored.items() if tensor.dtype is error.args[0])
        problem = f"safetensors has no type for {error.args[0]} ({names or 'one of the tensors'})"
        raise CheckpointError(f"{problem}: read the checkpoint itself, as with init_from") from error


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    mode = _mode_of_a_new(file)
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
        raise OSError(f"{file} cannot be written ({error})") from error
    with suppress(OSError):  # a file system without modes
        file.chmod(mode)  # safetensors 0.8 lets nobody but the owner read


def _mode_of_a_new(file: Path) -> int:
    """The mode that a new file gets next to ``file``, by the umask and the folder's rules."""
    probe = file.with_name(f".{file.name}.{token_hex(8)}")
    try:
        with probe.open("xb") as opened:
            return stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        probe.unlink(missing_ok=True)


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names in their order, in parts of at most so many bytes, or of one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _config(source: Path) -> dict[str, Any]:
    try:
        found = json.loads((source / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} has no {CONFIG} that can be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{source / CONFIG} is no mapping")
    return found


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRAINED, AVERAGE = "trained", "ema"
_HEAD = ("architectures", "id2label", "label2id", "problem_type")
_EPILOG = """\
examples:
  distaccum export runs/NAME FOLDER
  distaccum export runs/NAME FOLDER --merge
  distaccum export runs/NAME weights.safetensors --best
  distaccum export runs/NAME/checkpoints/step-300 weights.safetensors
  distaccum train init_from=weights.safetensors

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
    weights: str | None = None,
    merge: bool = False,
) -> int:
    """Writes the weights, in fp32 as the optimizer steps them; returns their number.

    A folder is described by what the run wrote of its model: ``config.json`` and the tokenizer's files.

    Args:
        checkpoint: a folder ``checkpoints/step-N``.
        target: a safetensors file, or a folder that is not there.
        dtype: of floating-point weights: ``fp32``, ``bf16`` or ``fp16``; None: as they are.
        max_shard_size: of a folder's files.
        config_from: a folder whose ``config.json`` and tokenizer go into the target's in place of the run's.
        weights: ``trained``, or ``ema``: their moving average, beside what has none (buffers, and what is not trained);
            None: those that the run evaluated.
        merge: whether adapters are merged into the model below them.

    Raises:
        ConfigError: no such size; or the model below adapters cannot be made.
        CheckpointError: the checkpoint is not there, or damaged, or has no average; the folder is there, or has no
            configuration; there are no adapters to merge, or below them are other weights than there were.
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
    adapter, own = _adapter(checkpoint), checkpoint.parent.parent / FOLDER
    if merge and not adapter:
        raise CheckpointError(f"{checkpoint} holds no adapters: leave out --merge")
    if adapter and not (one_file or merge) and config_from is not None:
        raise CheckpointError(f"{checkpoint} holds adapters, whose folder describes itself: leave out --config-from")
    weights = weights or average_evaluated(checkpoint) or TRAINED
    if weights == AVERAGE and not any(checkpoint.glob(f"{AVERAGE}*.safetensors")):
        raise CheckpointError(f"{checkpoint} has no {AVERAGE}: it is kept by a run with callbacks={AVERAGE}")
    source = config_from or (own if (own / CONFIG).is_file() and not one_file else None)
    form, settings = DTYPES[dtype] if dtype else None, dict[str, Any]()
    tensors: Mapping[str, Tensor]
    if merge:
        tensors, settings = merged(checkpoint, average=AVERAGE if weights == AVERAGE else "")
    else:
        tensors = TensorFiles(checkpoint, "model")
        tensors = _With(TensorFiles(checkpoint, AVERAGE), tensors) if weights == AVERAGE else tensors
    if one_file:
        save_whole({name: cast(tensors[name], form) for name in tensors} if form else tensors, target)
    elif adapter and not merge:
        save_adapter(tensors, target, dtype=form, names=adapter["names"], config=adapter["config"], source=source)
    else:
        if config_from is not None and (own / CONFIG).is_file():  # whatever the other folder's model has for a head
            settings |= {key: value for key, value in _config(own).items() if key in _HEAD}
        save_folder(tensors, target, dtype=form, shard_bytes=size, source=source, settings=settings)
    return len(tensors)


def average_evaluated(checkpoint: Path) -> str:
    """The kind of the moving average that the run evaluates; empty: it evaluates the weights that train.

    Raises:
        CheckpointError: the checkpoint's state cannot be read.
    """
    run = state.read(checkpoint).run
    stated = (*run.config.get("callbacks", {}).values(), *run.callbacks.values())
    found = any(node.get("evaluate") for node in stated if isinstance(node, Mapping))
    return AVERAGE if found and any(checkpoint.glob(f"{AVERAGE}*.safetensors")) else ""


def _adapter(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint says of the adapters that it holds; empty where it holds a model."""
    found: dict[str, Any] = state.read(checkpoint).run.facts.get("adapters") or {}
    return found


def main() -> None:
    """Runs ``distaccum export``."""
    program.start()
    description = "Writes a checkpoint's weights into one file, or a Hugging Face folder."
    parser = Arguments("export", description, _EPILOG)
    parser.add_argument("checkpoint", type=Path, help="a run, whose newest is taken, or a folder checkpoints/step-N")
    parser.add_argument("target", type=Path, help="the safetensors file to write; any other name is a folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point weights; by default as they are trained")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a folder's files: 5GB, the default")
    parser.add_argument(
        "--config-from", type=Path, metavar="FOLDER", help="whose config.json and tokenizer take the place of the run's"
    )
    parser.add_argument(
        "--weights", choices=(TRAINED, AVERAGE), help="those that train, or their moving average; default: as evaluated"
    )
    parser.add_argument("--best", action="store_true", help="of the run, the checkpoint with the best evaluation")
    parser.add_argument("--merge", action="store_true", help="adapters into their model, which is written whole")
    given = parser.of()
    try:
        checkpoint = find(given.checkpoint, best=given.best)
        count = export(
            checkpoint,
            given.target,
            dtype=given.dtype,
            max_shard_size=given.max_shard_size,
            config_from=given.config_from,
            weights=given.weights,
            merge=given.merge,
        )
        weights = given.weights or average_evaluated(checkpoint) or TRAINED
    except (CheckpointError, ConfigError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    which = {AVERAGE: "the moving average of the weights", TRAINED: "the weights that train"}[weights]
    bare = given.target.is_dir() and not any((given.target / name).exists() for name in (CONFIG, "adapter_config.json"))
    missing = "; no config.json, which --config-from gives" if bare else ""
    sys.stdout.write(f"{given.target}: {count} tensors of {checkpoint}, {which}{missing}\n")


if __name__ == "__main__":
    main()
