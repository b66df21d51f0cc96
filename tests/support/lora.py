"""Adapters over a frozen base on every engine, beside one fp64 process on whole batches, and a plain loop in fp32.

The truth shares nothing with distaccum but the order of the samples (``Shuffle``, tested on its own) and what a user
brings: model, adapters, data, the formula of the loss. Its optimizer is torch's, in fp64.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from distaccum import Accumulator, DataSpec, World
from distaccum.engines import state as frozen_base
from distaccum.testing.counters import CollectiveCounter, OperationCounter
from tests.support import engine_matrix, matrix
from tests.support.engine_matrix import BETAS, DECAY, ENGINES, EPSILON, MICRO_SIZES, RATE, UPDATES
from tests.support.matrix import GLOBAL_SIZE, IGNORED, SEED
from tests.support.optional import Library

peft = Library("peft")

APART = 2.0**-13
ROUNDING = 1e-6  # of a change whose elements have some digits less than the weights
DATA = ("full", "ragged", "unequal")


@dataclass(frozen=True)
class Cell:
    """One point: an engine, a number of ranks, data, the base's format."""

    engine: str
    world: int
    data: str
    base: str = "float32"


@dataclass(frozen=True)
class Found:
    """Errors of a window's gradient and of the change over 20 updates, each beside that of a plain loop in fp32.

    ``payload`` are the bytes of gradients in one window, ``kept`` the names that the state holds.
    """

    gradient: tuple[float, float]
    change: tuple[float, float]
    base_moved: tuple[str, ...]
    held: int
    payload: Mapping[str, int]
    kept: Sequence[str]
    apart: float  # the window's gradient and the plain loop's: where one rounds to 16 bits, 1e-3

    def fault(self, names: Sequence[str]) -> str:
        """What is not as it should be, where those names are trained; empty: nothing."""
        for what, (error, plain) in (("gradient", self.gradient), ("change", self.change)):
            if not error <= max(ROUNDING, 2 * plain):
                return f"{what}: {error:.1e} off, a plain loop {plain:.1e}"
        if not self.apart <= APART:
            return f"the gradient is {self.apart:.1e} from a plain loop's"
        if self.base_moved or self.held:
            return f"the base moved ({self.base_moved}), or has {self.held} elements of gradients"
        return "" if list(self.kept) == sorted(names) else f"the state holds {self.kept}"


def make_model(base: str = "float32") -> nn.Module:
    """With adapters whose gradients are not zero, and a head that is trained whole."""
    torch.manual_seed(7)
    plain = engine_matrix.make_model().to(getattr(torch, base))
    whole = ["score"] if base == "float32" else None
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["wide", "narrow"], init_lora_weights=False, modules_to_save=whole
    )
    return peft.get_peft_model(plain, config)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def mean(model: nn.Module, window: Mapping[str, Tensor]) -> Tensor:
    """Over the window's labels, and over its samples."""
    logits, score = model(window["inputs"])
    language = F.cross_entropy(logits.flatten(0, 1).to(_wide(model)), window["labels"].flatten(), ignore_index=IGNORED)
    return language + 0.5 * (score.to(_wide(model)) - window["target"].to(_wide(model))).square().mean()


def _wide(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.requires_grad)


def loop(model: nn.Module, samples: Any, optimizer: Callable[..., Optimizer], updates: int) -> dict[str, Tensor]:
    """What is trained after so many updates, each on a whole window."""
    steps = optimizer([p for p in model.parameters() if p.requires_grad])
    done = 0
    for epoch in count():
        for window in engine_matrix.windows(samples, epoch):
            steps.zero_grad()
            mean(model, window).backward()
            steps.step()
            done += 1
            if done == updates:
                return trained(model)
    raise AssertionError


def _adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def _sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=1.0)


def truths(cell: Cell, given: nn.Module) -> list[dict[str, Tensor]]:
    """What is trained after a window of SGD and after 20 updates of AdamW: each in fp64, and as a plain loop has it."""
    samples, wide = _samples(cell), deepcopy(given).double()
    return [
        loop(deepcopy(model), samples, optimizer, updates)
        for optimizer, updates in ((_sgd, 1), (_adamw, UPDATES))
        for model in (wide, given)
    ]


def _samples(cell: Cell) -> Any:
    return engine_matrix.make_data(engine_matrix.Cell(cell.engine, cell.world, "fp32", cell.data, "sgd"))


class _Counter(CollectiveCounter):
    SMALL = 256  # adapters are not much more here


def run(cell: Cell, world: World, given: nn.Module, true: list[dict[str, Tensor]]) -> Found:
    """Trains twice: a window by SGD, and 20 updates by AdamW over all parameters, frozen ones included."""
    errors, moved, payload, kept, held, apart = [], (), {}, (), 0, 0.0
    samples = _samples(cell)
    for number, (optimizer, updates) in enumerate(((_sgd, 1), (_adamw, UPDATES))):
        model = deepcopy(given)
        before, start = {n: p.detach().clone() for n, p in model.named_parameters()}, trained(model)
        truth, plain = true[2 * number : 2 * number + 2]
        frozen_base.leave_frozen_out(model)
        acc = Accumulator(
            model,
            optimizer(model.parameters()),
            global_batch_size=GLOBAL_SIZE,
            micro_batch_size=MICRO_SIZES[cell.world],
            count=matrix.Two().count,
            seed=SEED,
            world=world,
            engine=ENGINES[cell.engine],
            verify=("first", "never")[number],  # whose bytes are counted
        )
        with _Counter() as counted, OperationCounter() as operations:
            _train(acc, samples, 1)
        payload = {**counted.payload, "gradients": operations.counts["gradient bytes"]}
        held = sum(
            p.grad.numel()
            for p in acc.engine.unwrapped_model.parameters()
            if not p.requires_grad and p.grad is not None
        )
        _train(acc, samples, updates)
        now = acc.state_dict()["model"]
        kept = tuple(sorted(now))
        apart = apart if number else engine_matrix.error(start, now, plain)
        errors.append((engine_matrix.error(start, now, truth), engine_matrix.error(start, plain, truth)))
        base = {n: p.detach() for n, p in acc.engine.unwrapped_model.named_parameters() if not p.requires_grad}
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in base.items()}
        moved = (*moved, *(n for n, p in whole.items() if not torch.equal(p, before[n])))
        acc.close()
    return Found(*errors, moved, held, payload, kept, apart)


class _Wide(matrix.Two):
    """Of what a model in 16 bits gives, in fp32."""

    def __call__(self, model: Any, batch: Any) -> Any:
        return super().__call__(lambda inputs: tuple(given.float() for given in model(inputs)), batch)


def _train(acc: Accumulator, samples: Any, updates: int) -> None:
    loss = _Wide()
    data = DataSpec(train=samples, eval_dataset=None, description="lora", collate=matrix.collate)
    while acc.progress.step < updates:
        for window in acc.windows(data):
            assert acc.step(window, loss).applied
            if acc.progress.step >= updates:
                break
