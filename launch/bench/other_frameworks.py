"""One accumulation window by other frameworks, each written as its own documentation says, on the CPU.

Every framework trains the mean token cross entropy of a micro-batch, and returns the gradient that its optimizer was
about to step with; models are fp32, as DeepSpeed reduces nothing wider. A window with fewer micro-batches than
accumulation steps is the last one of an epoch, and runs the way the framework ends an epoch. All of them share the
process group that the caller opened, of one or more ranks on gloo with equally many micro-batches.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distaccum.precision.policy import PrecisionPolicy
from launch.bench.variant import handwritten_ddp, installed_version

IGNORED = -100

MicroBatch = dict[str, Tensor]
MicroBatches = list[MicroBatch]
MakeModel = Callable[[], nn.Module]
Run = Callable[[MakeModel, MicroBatches, int], Tensor | None]


@contextmanager
def _contained() -> Iterator[None]:
    """Undoes what a framework changes for the whole process, and keeps its notices off the console."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    disabled, python_rng = logging.root.manager.disable, random.getstate()
    # accelerate imports DeepSpeed wherever it is installed, and DeepSpeed picks its device on import
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        random.setstate(python_rng)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


class _Steps:
    """The gradients that an optimizer stepped with, flat, in the order of the model's parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._gradients: list[Tensor] = []
        optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._gradients.append(torch.cat([g.detach().to("cpu", torch.float64).flatten() for g in gradients]))

    def only(self) -> Tensor | None:
        """The gradient of the one step; None if there was none."""
        if len(self._gradients) > 1:
            raise RuntimeError(f"one window, but the optimizer stepped {len(self._gradients)} times")
        return self._gradients[0] if self._gradients else None


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _first(items: MicroBatches) -> MicroBatch:
    return items[0]


def _dealt(micro_batches: MicroBatches) -> MicroBatches:
    """All ranks' micro-batches in an order from which a sharding loader gives each rank its own ones."""
    gathered: list[MicroBatches] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, micro_batches)
    return [micro_batch for turn in zip(*gathered, strict=True) for micro_batch in turn]


def _loader(micro_batches: MicroBatches) -> DataLoader[MicroBatch]:
    return DataLoader(_dealt(micro_batches), batch_size=1, collate_fn=_first)  # type: ignore[arg-type]


@_contained()
def handwritten(make_model: MakeModel, micro_batches: MicroBatches, accumulation_steps: int) -> Tensor | None:
    """The usual loop: ``no_sync`` until the boundary, ``loss / accumulation_steps``, a step at the last batch too."""
    model = make_model()
    optimizer = _sgd(model)
    steps = _Steps(optimizer, model)
    run_window = handwritten_ddp(
        model,
        optimizer,
        ((batch["input_ids"], batch["labels"]) for batch in micro_batches),
        torch.device("cpu"),
        policy=PrecisionPolicy(name="fp32"),
        micro_steps=len(micro_batches),
        accumulation_steps=accumulation_steps,
    )
    run_window()
    return steps.only()


@_contained()
def accelerate(make_model: MakeModel, micro_batches: MicroBatches, accumulation_steps: int) -> Tensor | None:
    """``accumulate()`` over a prepared loader, whose end also ends the window, as in the guide's finished code.

    https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
    """
    from accelerate import Accelerator  # noqa: PLC0415  it need not be installed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps)
    plain = make_model()
    sgd = _sgd(plain)
    steps = _Steps(sgd, plain)
    model, optimizer, loader = accelerator.prepare(plain, sgd, _loader(micro_batches))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = _mean_loss(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return steps.only()


@_contained()
def accelerate_counted(make_model: MakeModel, micro_batches: MicroBatches, accumulation_steps: int) -> Tensor | None:
    """The loop that the same guide has its reader write for samples of variable size: tokens counted beforehand.

    https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, last section
    """
    from accelerate import Accelerator  # noqa: PLC0415  it need not be installed

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps)
    plain = make_model()
    sgd = _sgd(plain)
    steps = _Steps(sgd, plain)
    model, optimizer, loader = accelerator.prepare(plain, sgd, _loader(micro_batches))
    batches = list(loader)
    to_local = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
    tokens = accelerator.gather(to_local).sum().item()  # host read: as the guide has it
    for i, batch in enumerate(batches):
        skip_sync = i < len(batches) - 1 and accelerator.num_processes > 1
        with model.no_sync() if skip_sync else nullcontext():
            logits = model(batch["input_ids"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
            accelerator.backward(loss * accumulation_steps * accelerator.num_processes / tokens)
    optimizer.step()
    optimizer.zero_grad()
    return steps.only()


@_contained()
def lightning_fabric(make_model: MakeModel, micro_batches: MicroBatches, accumulation_steps: int) -> Tensor | None:
    """``no_backward_sync`` until the boundary; Fabric leaves the loss's divisor and the epoch's end to its user.

    Both are therefore those of the hand-written loop, "the same way with Fabric as in PyTorch":
    https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html
    """
    from lightning.fabric import Fabric  # noqa: PLC0415  it need not be installed

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    plain = make_model()
    sgd = _sgd(plain)
    steps = _Steps(sgd, plain)
    model, optimizer = fabric.setup(plain, sgd)
    loader = fabric.setup_dataloaders(_loader(micro_batches))
    for i, batch in enumerate(loader, start=1):
        is_accumulating = i % accumulation_steps != 0 and i != len(loader)
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = _mean_loss(model(batch["input_ids"]), batch["labels"])
            fabric.backward(loss / accumulation_steps)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return steps.only()


@_contained()
def deepspeed(make_model: MakeModel, micro_batches: MicroBatches, accumulation_steps: int) -> Tensor | None:
    """``engine.backward`` and ``engine.step``, ZeRO stage 0; the engine divides the loss by its accumulation steps.

    A short window is closed with ``set_gradient_accumulation_boundary``, as that method's documentation shows.
    """
    import deepspeed as ds  # noqa: PLC0415  it need not be installed

    # its CPU back end compiles a C++ reduction on first use, for inference only: half a minute, and a compiler needed
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("LOCAL_RANK", "0")  # the engine refuses to start without a launcher's variable
    config = {
        "train_micro_batch_size_per_gpu": len(micro_batches[0]["input_ids"]),
        "gradient_accumulation_steps": accumulation_steps,
        "zero_optimization": {"stage": 0},
    }
    model = make_model()
    optimizer = _sgd(model)
    steps = _Steps(optimizer, model)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
    for i, batch in enumerate(micro_batches, start=1):
        if len(micro_batches) < accumulation_steps:
            engine.set_gradient_accumulation_boundary(i == len(micro_batches))
        loss = _mean_loss(engine(batch["input_ids"]), batch["labels"])
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return steps.only()


class _TrainerModel(nn.Module):
    """A model that computes its loss and, as the Trainer's documentation asks, accepts ``num_items_in_batch``."""

    accepts_loss_kwargs = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> dict[str, Tensor]:
        logits = self.model(input_ids)
        if num_items_in_batch is None:
            return {"loss": _mean_loss(logits, labels)}
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": total / num_items_in_batch}


@_contained()
def transformers_trainer(make_model: MakeModel, micro_batches: MicroBatches, accumulation_steps: int) -> Tensor | None:
    """One epoch of ``Trainer.train``, whose length is the window; clipping off, and nothing logged or saved.

    https://huggingface.co/docs/transformers/main_classes/trainer
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments  # noqa: PLC0415  it need not be installed

    model = _TrainerModel(make_model())
    optimizer = _sgd(model)
    steps = _Steps(optimizer, model)
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation_steps,
            num_train_epochs=1,
            max_grad_norm=0.0,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=_dealt(micro_batches),
            data_collator=_first,
            optimizers=(optimizer, None),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return steps.only()


@dataclass(frozen=True)
class Framework:
    """``run`` takes a model, its micro-batches and the accumulation steps; ``packages``: the first is the framework."""

    run: Run
    packages: tuple[str, ...]

    @property
    def version(self) -> str | None:
        """The installed version; None where it, or a package that it needs, is absent."""
        return installed_version(*self.packages)


FRAMEWORKS = {
    "DDP, hand-written": Framework(handwritten, ("torch",)),
    "accelerate, accumulate()": Framework(accelerate, ("accelerate",)),
    "accelerate, counted by hand": Framework(accelerate_counted, ("accelerate",)),
    "Lightning Fabric": Framework(lightning_fabric, ("lightning",)),
    "DeepSpeed": Framework(deepspeed, ("deepspeed",)),
    "transformers Trainer": Framework(transformers_trainer, ("transformers", "accelerate")),
}
