"""What a checkpoint costs: a save beside a plain write of its bytes, and a verification beside a plain read of them.

What a save in the background holds training up with is its begin: the copy of this rank's part, and what goes with it.

The old way is the one that most write: safetensors' own ``save_file``, a sync, and then each file is read again for
its SHA-256, one after the other. All ways are timed in turn, on rank 0; files that are read were just written, and come
from the machine's memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state
from distaccum.checkpoint.files import THREADS, HashingWriter, Pieces, sync
from distaccum.checkpoint.store import CheckpointStore, verify
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.factory import create_engine
from distaccum.train.saving import HostMemory
from launch.bench.optimizer_step import shapes

COPY, WRITE, AFTERWARDS, SAVE = "copy in memory", "write and sync", "save, then hash", "save"
BEGIN = "begin in the background"
UNHASHED, HASHED = "write its files", "write and hash them"
READ, ONE_BY_ONE, VERIFY = "read", "verify one by one", "verify"
COMPARED = {BEGIN: (COPY,), HASHED: (UNHASHED,), SAVE: (COPY, WRITE, AFTERWARDS), VERIFY: (READ, ONE_BY_ONE)}
_CHUNK = 2**22
Figures = dict[str, Any]
_RUN = state.RunState(progress=Progress(), position={}, wandb_id="", config={}, callbacks={})


class _Sum(nn.Module):
    """Weights of these shapes, each with a gradient."""

    def __init__(self, given: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in given)

    def forward(self, factor: Tensor) -> Tensor:
        return sum((weight.sum() for weight in self.weights), start=torch.zeros((), device=factor.device)) * factor


def trained(size: int, world: World) -> Engine:
    """An engine over about ``size`` parameters, with the state of AdamW after one update."""
    model = _Sum(shapes(size)).to(world.device)
    engine = create_engine(model, AdamW(model.parameters(), fused=True), world)
    with engine.micro_step(sync=True):
        engine.backward(engine.model(torch.ones((), device=world.device)))
    engine.step()
    return engine


def _write_and_sync(tensors: Sequence[Tensor], file: Path) -> None:
    with file.open("wb") as opened:
        for tensor in tensors:
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(content), _CHUNK):
                opened.write(content[begin : begin + _CHUNK])
    sync(file)


def _save_then_hash(kinds: dict[str, dict[str, Tensor]], folder: Path) -> None:
    for kind, tensors in kinds.items():
        save_file(tensors, folder / f"{kind}.safetensors")
        sync(folder / f"{kind}.safetensors")
    for kind in kinds:
        _digest(folder / f"{kind}.safetensors")


def _digest(file: Path) -> None:
    with file.open("rb") as opened:
        hashlib.file_digest(opened, "sha256")


def _write_files(files: Sequence[tuple[str, Pieces]], folder: Path) -> None:
    """As many at once as a save writes."""
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda file: _write_file(folder / file[0], file[1]), files))


def _write_file(file: Path, pieces: Pieces) -> None:
    with file.open("wb") as opened:
        opened.writelines(pieces)
    sync(file)


def _write_and_hash(files: Sequence[tuple[str, Pieces]], folder: Path) -> None:
    with HashingWriter(folder) as writer:
        for name, pieces in files:
            writer.write(name, pieces)


def _read(file: Path, buffer: bytearray) -> None:
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def measure(size: int, world: World, folder: Path, *, pairs: int) -> Figures:
    """All figures of one size; a collective, in which rank 0 alone does what is no save."""
    engine, store = trained(size, world), CheckpointStore(folder / "checkpoints", keep=1)
    given = engine.state()
    kinds = {
        kind: {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        for kind, tensors in (("model", given.model), ("optimizer", given.optimizer))
    }
    tensors = [tensor for kind in kinds.values() for tensor in kind.values()]
    copies, buffer = [torch.zeros_like(tensor) for tensor in tensors], bytearray(_CHUNK)
    plain = folder / "plain"
    write = partial(state.save, engine=engine, run=_RUN, data=None, world=world)
    saved = store.save(0, world, write)
    steps, memory = iter(range(1, pairs + 1)), HostMemory(world.device)

    def begin() -> None:
        memory.reuse()
        list(state.Part.of(engine, _RUN, None, world).files(memory.copy))
        memory.wait()

    def copy() -> None:
        for own, tensor in zip(copies, tensors, strict=True):
            own.copy_(tensor)

    for first in (begin, copy):  # takes the memory
        first()
    content = list(state.Part.of(engine, _RUN, None, world).files())

    def files() -> list[Path]:
        return sorted((store.root / (store.root / "latest").read_text().strip()).iterdir())

    ways: dict[str, Callable[[], object]] = {
        COPY: copy,
        BEGIN: begin,
        WRITE: lambda: _write_and_sync(tensors, plain / "file"),
        AFTERWARDS: lambda: _save_then_hash(kinds, plain),
        UNHASHED: lambda: _write_files(content, plain),
        HASHED: lambda: _write_and_hash(content, plain),
        SAVE: lambda: store.save(next(steps), world, write),
        READ: lambda: [_read(file, buffer) for file in files()],
        ONE_BY_ONE: lambda: [_digest(file) for file in files()],
        VERIFY: lambda: verify(files()[0].parent),
    }
    size_on_disk = sum(file.stat().st_size for file in saved.iterdir()) if world.is_main else 0
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(pairs):
        # Backwards in every second round: a disk may still be at what the way before has written, or freed.
        for name, way in list(ways.items())[:: -1 if number % 2 else 1]:
            if world.is_main:
                shutil.rmtree(plain, ignore_errors=True)
                plain.mkdir()
            world.barrier()
            if world.is_main or name == SAVE:
                began = perf_counter()
                way()
                times[name].append(perf_counter() - began)
            world.barrier()
    figures: Figures = {"bytes": size_on_disk, "tensor bytes": sum(tensor.nbytes for tensor in tensors)}
    if world.is_main:
        figures |= {"files": len(list((store.root / f"step-{pairs}").iterdir()))}
        for name, taken in times.items():
            figures[name] = {"s": _summary(taken)} | {
                f"time / {base}": _summary([a / b for a, b in zip(taken, times[base], strict=True)])
                for base in COMPARED.get(name, ())
            }
    world.barrier()
    return figures


def _summary(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values)}


def compare(world: World, sizes: Sequence[int], folder: Path, *, pairs: int) -> Figures:
    """The figures by size; each way is timed ``pairs`` times, in turn, on the disk that has ``folder``."""
    figures = {}
    for size in sizes:
        # Below the folder, which may be that of a run that has checkpoints.
        made = Path(world.broadcast_str(mkdtemp(prefix="saves-", dir=folder) if world.is_main else ""))
        figures[str(size)] = measure(size, world, made, pairs=pairs)
        if world.is_main:
            shutil.rmtree(made)
    return figures


def show(figures: Figures, ranks: int) -> None:
    """Prints a table for each size; times are minimum / median."""
    for row in figures.values():
        mebibytes = row["bytes"] / 2**20
        title = f"a checkpoint of {mebibytes:,.0f} MiB in {row['files']} files, {ranks} ranks, {os.cpu_count()} cores"
        table = Table("", "s", "GB/s", "ratio", title=title, caption="minimum / median of pairs")
        for name, found in row.items():
            if isinstance(found, dict):
                seconds = found["s"]
                ratios = [
                    f"{ratio['min']:.2f} / {ratio['median']:.2f} of {key.removeprefix('time / ')}"
                    for key, ratio in found.items()
                    if key != "s"
                ]
                speed = row["bytes"] / 1e9 / seconds["median"]
                table.add_row(
                    name, f"{seconds['min']:.3f} / {seconds['median']:.3f}", f"{speed:.2f}", "\n".join(ratios)
                )
        Console(width=100).print(table)
