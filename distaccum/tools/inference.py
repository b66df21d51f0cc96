"""What a Trainer does with its model between two runs: predictions, scores of other samples, and the best weights.

The Trainer's methods are thin: what is promised, and what is raised, their docstrings say.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

from torch import Tensor, cat, nn
from torch.distributed.distributed_c10d import _get_default_store

from distaccum.checkpoint import weights
from distaccum.checkpoint.store import find, verify
from distaccum.data.adapters import to_data_spec
from distaccum.data.batches import map_tensors
from distaccum.data.held_out import HeldOut, evaluation_workers
from distaccum.data.packing import PackCollator
from distaccum.data.prefetch import FEWEST, on_device
from distaccum.data.spec import DataSpec, MapDataset, is_map_style
from distaccum.distributed.world import World
from distaccum.engines.base import Engine, EngineFacts
from distaccum.engines.context import EngineContext
from distaccum.engines.modules import is_meta, is_sharded
from distaccum.errors import CheckpointError, MisuseError, PeerError
from distaccum.losses.base import AnyLoss, is_window_loss
from distaccum.precision.autocast import apply_precision
from distaccum.precision.policy import FP32
from distaccum.tools.fp8 import Fp8
from distaccum.train import ema
from distaccum.train.components import TrainingComponents
from distaccum.train.evaluate import Evaluation, undisturbed
from distaccum.train.failure import reason_of

Function = Callable[[nn.Module, Any], Any]
"""From a model and a batch on the device to what is predicted: tensors of a row a sample."""
_BLOCKS, _POLL_S, _GRACE_S = count(), 0.5, 5.0
_SAY = "say what to predict: trainer.predict(dataset, lambda model, batch: ...), tensors with a row for each sample"


def load_best(components: TrainingComponents, world: World, run: Path) -> Path:
    """Loads the weights of a run's best checkpoint into the model, on every rank; a collective.

    Where an average of the weights is what was evaluated, it is that.

    Raises:
        CheckpointError: the run has none, or it is damaged; on every rank.
        ConfigError: it is another model's.
    """
    path = agreed(world, partial(find, run, best=True))
    model, average = components.model, ema.of(components.callbacks)
    reshard(model)
    with whole(model, changes=True):
        weights.check(model, path, key="load_best")
        weights.fill(model, path, average=ema.KIND if average is not None and average.evaluates else "")
    world.barrier()  # the files are read
    return path


def agreed(world: World, look: Callable[[], Path]) -> Path:
    """The whole checkpoint that rank 0 finds by ``look``, on every rank; a collective.

    Raises:
        CheckpointError: it finds none, or it is damaged; on every rank.
    """
    path, problem = "", ""
    if world.is_main:
        try:
            path = str(look())
            verify(Path(path))
        except CheckpointError as error:
            problem = str(error)
    path, problem = json.loads(world.broadcast_str(json.dumps([path, problem])))
    if problem:
        raise CheckpointError(problem)
    return Path(path)


def score(components: TrainingComponents, world: World, dataset: Any) -> dict[str, Any]:
    """The results of an evaluation of other samples, as ``test_loss``; a collective.

    Args:
        components: of the run.
        world: this rank.
        dataset: or several by name.

    Raises:
        MisuseError: it is no dataset with a length, or has no samples.
    """
    engine, results = AtRest(components.model, components.engine, world), dict[str, Any]()
    several = dict(dataset) if isinstance(dataset, Mapping) else {"": dataset}
    with engine.at_work():
        for name, one in several.items():
            data = _data(components, one)
            evaluation = Evaluation(
                cast(Engine, engine),
                replace(data, eval_dataset={name: data.train}),
                components.loss,
                world,
                micro_batch_size=data.micro_batch_size or components.plan.micro_batch_size,
                workers=_workers(components, data),
                metrics=components.metrics,
                seed=components.config.seed,
                kind="test",
            )
            results |= evaluation.run() | evaluation.tables
    return results


def predict(components: TrainingComponents, world: World, dataset: Any, function: Function | None) -> Any:
    """What ``function``, or the model, gives for each sample, in the dataset's order, on every rank; a collective.

    Raises:
        MisuseError: it is no dataset with a length, or has no samples; or what is given has no row for each sample.
        PeerError: another rank could not predict its samples, and raises why.
    """
    engine, data = AtRest(components.model, components.engine, world), _data(components, dataset)
    held_out = HeldOut(
        cast(MapDataset, data.train),
        world,
        limit=None,
        micro_batch_size=data.micro_batch_size or components.plan.micro_batch_size,
        collate=data.collate,
        workers=_workers(components, data),
        seed=components.config.seed,
    )
    function = function or (lambda model, batch: output_of(components.loss, model, batch))
    own: list[Any] = []
    error: Exception | None = None
    with engine.at_work(), undisturbed(cast(Engine, engine)):
        batches = held_out.batches(in_lockstep=engine.facts.forward_communicates)
        try:
            for batch, is_own in on_device(batches, engine.device, FEWEST):
                with engine.autocast():
                    found = function(engine.unwrapped_model, batch)
                if is_own:
                    rows = held_out.size_of(held_out.numbers[len(own)])
                    own.append(map_tensors(found, partial(_rows, rows), _refuse))
        except Exception as problem:
            if engine.facts.forward_communicates:  # the other ranks are within a forward
                raise
            error = problem
        told = world.all_gather_object(([] if error else own, error and reason_of(world.rank, error)))
    reasons = [reason for _, reason in told if reason]
    if error or reasons:
        raise error or PeerError(reasons[0], "while this rank predicted")
    dealt = [of_rank for of_rank, _ in told]
    return _joined([dealt[i % world.size][i // world.size] for i in range(held_out.batches_of_all)])


def _data(components: TrainingComponents, dataset: Any) -> DataSpec:
    """The samples as ``train``, in batches as the run's own are made."""
    if isinstance(dataset, DataSpec):
        raise MisuseError("a DataSpec has samples to train on: give the dataset itself, as its eval_dataset")
    try:
        data = to_data_spec(dataset)
    except TypeError as error:
        raise MisuseError(str(error)) from error
    if not is_map_style(data.train) or not len(data.train):
        what = "has no samples" if is_map_style(data.train) else "is a stream, whose samples have no numbers"
        raise MisuseError(f"{type(dataset).__name__} {what}: give a dataset with len() and [index], or its DataLoader")
    how = components.data if data.collate is None else data  # a DataLoader says how it loads
    collate = how.collate.bare if isinstance(how.collate, PackCollator) else how.collate  # a row a sample
    size, workers = how.micro_batch_size, how.workers
    return replace(components.data, train=data.train, collate=collate, micro_batch_size=size, workers=workers)


def _workers(components: TrainingComponents, data: DataSpec) -> Any:
    trainer = components.config.trainer
    return evaluation_workers(data, trainer.num_workers, asdict(trainer.loader))


def output_of(loss: AnyLoss, model: nn.Module, batch: Any) -> Any:
    """What the model gives where the loss calls it; of a batch without labels, where it is called with that."""
    if isinstance(batch, Tensor):
        return _logits(model(batch))
    if isinstance(batch, tuple | list) and len(batch) == 1:
        return _logits(model(*batch))
    if (
        isinstance(batch, Mapping)
        and "labels" not in batch
        and type(loss).__module__ == "distaccum.losses.transformers"
    ):
        return _logits(model(**batch))
    if is_window_loss(loss):
        return loss.represent(model, batch)
    given: list[Any] = []
    hook = model.register_forward_hook(lambda *call: given.append(call[-1]))
    try:
        loss(model, batch)
    finally:
        hook.remove()
    if len(given) != 1:
        raise MisuseError(f"{type(loss).__name__} calls the model {len(given)} times for a batch: {_SAY}")
    return _logits(given[0])


def _logits(output: Any) -> Any:
    """Of an output as transformers gives it, the logits; any other as it is."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    return output if logits is None else logits


def _rows(rows: int, tensor: Tensor) -> Tensor:
    if not tensor.ndim or len(tensor) != rows:
        raise MisuseError(f"there is a tensor of shape {list(tensor.shape)} for {rows} samples: {_SAY}")
    return (tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor).cpu()  # noqa: PLR2004


def _refuse(value: Any) -> None:
    raise MisuseError(f"there is a {type(value).__name__} in what the model gives: {_SAY}")


def _joined(parts: Sequence[Any]) -> Any:
    """Of batches one after the other: tensors in one, or a list with a row a sample where their shapes differ."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(column) for column in zip(*parts, strict=True))
    if len({part.shape[1:] for part in parts}) == 1:
        return cat(cast(Any, parts))
    return [row for part in parts for row in part]


# A model between two runs, which no engine has.


class AtRest:
    """What an evaluation asks of an engine, of a model between two runs; see :class:`Engine` for its members.

    Args:
        model: whole on every rank, which then computes with rank 0's weights; or in shards, as fsdp2 and DeepSpeed's
            stage 3 leave it.
        context: the run's settings: what forwards compute in.
        world: this rank.

    Raises:
        MisuseError: the model's weights are on the meta device.
    """

    def __init__(self, model: nn.Module, context: EngineContext, world: World) -> None:
        if is_meta(model):
            problem = "the model's weights are on the meta device, and fit() is what makes them"
            raise MisuseError(f"{problem}: call fit() before, or use engine.meta_init=false")
        self.unwrapped_model, self.device = model, world.device
        sharded = any(map(is_sharded, model.parameters()))
        self.facts = EngineFacts(gradient_divide_factor=1, numerics=context.numerics, forward_communicates=sharded)
        self.buffers = context.numerics.buffers(model, world)
        self._policy, self._fp8, self._world = context.policy, Fp8(model, context), world

    def autocast(self) -> AbstractContextManager[object]:
        """See :class:`Engine`."""
        return self._policy.autocast(self.device)

    def sync_buffers(self) -> None:
        """See :class:`Engine`."""
        for buffer in self.unwrapped_model.buffers():
            self._world.broadcast_(buffer)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around forwards: the model is on this rank's device, and computes in the run's precision; a collective."""
        model = self.unwrapped_model
        with _heard(self._world) if self._world.size > 1 else nullcontext(), whole(model):
            if not self.facts.forward_communicates:
                model.to(self.device)
                for parameter in model.parameters():
                    self._world.broadcast_(parameter.detach())
            try:
                self._fp8.convert()
                apply_precision(model, self._policy, self.device, warn=False)
                yield
            finally:
                self._fp8.undo()
                apply_precision(model, FP32, self.device)
                reshard(model)


@contextmanager
def _heard(world: World) -> Iterator[None]:
    """Within the block a rank that fails ends the others, which wait for it in a collective that nothing interrupts.

    They end in words and with exit code 1, unless they leave the block by themselves within seconds.
    """
    store, key, ended = cast(Any, _get_default_store()).clone(), f"distaccum/inference/{next(_BLOCKS)}", Event()

    def listen() -> None:
        with suppress(RuntimeError):  # the store is gone, and so is the launcher
            while not ended.wait(_POLL_S):
                if store.check([key]) and not ended.wait(_GRACE_S):
                    why = f"{store.get(key).decode()}; rank {world.rank}, which waited for it, ends with it"
                    sys.stderr.write(f"distaccum: {why}\n")
                    sys.stderr.flush()
                    os._exit(1)

    thread = Thread(target=listen, name="peers", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        store.set(key, reason_of(world.rank, error))
        raise
    finally:
        ended.set()
        thread.join()


def reshard(model: nn.Module) -> None:
    """Frees what forwards of a sharded model have left gathered: the next one gathers its shards as they are."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()


@contextmanager
def whole(model: nn.Module, *, changes: bool = False) -> Iterator[None]:
    """Within the block each parameter of which ranks keep parts (DeepSpeed's stage 3) is whole on each; a collective.

    Where it ``changes`` weights, the parts are taken from rank 0's afterwards.
    """
    parts = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_tensor")]
    if not parts:
        yield
        return
    from distaccum.engines.deepspeed.compat import gathered  # noqa: PLC0415  where DeepSpeed has left them

    with gathered(parts, changes=changes):
        yield
