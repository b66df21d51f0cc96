"""Run by torchrun: the asked runs, of which ``verify=first`` alone looks at the gradient; what each rank says."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distaccum import Accumulator, DataSpec, World
from distaccum.config.engine import FSDP2Config
from distaccum.config.precision import PrecisionConfig, ScalerConfig
from distaccum.errors import DistaccumError
from distaccum.verification import proof
from tests.distributed.workers.engine_matrix import allow_fp16
from tests.support.answers import asked, give
from tests.support.engine_matrix import ENGINES

FEATURES, MARK = 4, 256
MICRO_SIZE = 2
MOST_ELEMENTS = proof.MOST_ELEMENTS


@dataclass(frozen=True)
class Run:
    """One run of two ranks.

    Args:
        engine: a name of the engine matrix.
        precision: of the precision policy.
        level: 2: a loop of the user's; 3: whole windows, as the Trainer runs them.
        global_size: samples of a window, at least ``MICRO_SIZE``; an odd number of micro-batches makes ranks uneven.
        samples: of an epoch; two epochs are run.
        clip_norm: of the gradient.
        growth_interval: windows between two growths of the loss scale.
        program: one of ``PROGRAMS``; by default a plain model and loss.
        by_slope: whether a sharded model counts as too large for a rank.
        overflow: the number of a sample of rank 0 whose gradient is infinite in fp16; -1: none.
    """

    engine: str = "ddp"
    precision: str = "fp32"
    level: int = 3
    global_size: int = 16
    samples: int = 38
    clip_norm: float | None = None
    growth_interval: int = 2000
    overflow: int = -1
    epochs: int = 2
    program: str = ""
    by_slope: bool = False


class Squares:
    """A sum of squares of labels that count; a marked sample's gradient is infinite in fp16."""

    def count(self, batch: dict[str, Tensor]) -> float:
        return float(batch["weight"].sum())

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        factor = torch.where(batch["x"].amax() > MARK / 2, 2.0**30, 1.0)
        found = model(batch["x"]).float().square().sum(1) * batch["weight"]
        return (found * factor).sum()


class Bootstrapped(Squares):
    """Its targets are the model's own: by design they are no part of the gradient."""

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        target = 0.7 * model(batch["x"].flip(1)).detach() + 0.1
        return ((model(batch["x"]) - target).square().sum(1) * batch["weight"]).sum()


class Reversed(Squares):
    """Its gradient is by design the opposite of its slope."""

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().__call__(lambda x: 2 * (found := model(x)).detach() - found, batch)  # type: ignore[arg-type]


class Standardised(nn.Linear):
    """Takes the mean of all inputs so far from its input."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, given: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        mean.lerp_(given.detach().float().mean(0), 0.3)
        return super().forward(given - mean)


class OfOneRank(nn.Linear):
    """Left out on rank 1."""

    def forward(self, given: Tensor) -> Tensor:
        return given if os.environ["RANK"] == "1" else super().forward(given)


class Swapped(nn.Sequential):
    """Runs its layers, and one of them again: another one on each rank."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))

    def forward(self, given: Tensor) -> Tensor:
        for layer in (*self, self[int(os.environ["RANK"])]):
            given = layer(given)
        return given


class Counted(nn.Linear):
    """Remembers in a Python list, which nothing can set back, and in a buffer."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self.register_buffer("runs", torch.zeros(()))
        self._runs = 0

    def forward(self, given: Tensor) -> Tensor:
        self._runs = min(self._runs + 1, 9)  # so that two later runs agree
        self.get_buffer("runs").fill_(self._runs)
        return super().forward(given) * self._runs


class Saturates(nn.Linear):
    """Remembers in a Python number that soon stays as it is."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self._runs = 0

    def forward(self, given: Tensor) -> Tensor:
        self._runs = min(self._runs + self.training, 3)
        return super().forward(given) * self._runs


class Once(torch.autograd.Function):
    """A product whose backward runs once: it frees what it has kept."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = [given, weight]
        return given @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, given = ctx.kept.pop(), ctx.kept.pop()
        return gradient @ weight.T, given.T @ gradient


class Frees(nn.Module):
    """A layer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(FEATURES))

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = Once.apply(given, self.weight)  # type: ignore[no-untyped-call]
        return found


class Reentrant(nn.Linear):
    """The first trained layer, in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, given.clone().requires_grad_(), use_reentrant=True)
        return found


class Complex(nn.Module):
    """Of complex weights, more than one rank's share of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex64))

    def forward(self, given: Tensor) -> Tensor:
        return (given.to(torch.complex64) @ self.weight).abs()


def _scale_before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.02)


FIRST_LAYERS = {
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES)),
    "running mean": Standardised,
    "other memory": Counted,
    "swapped": Swapped,
    "saturates": Saturates,
    "frees": Frees,
    "reentrant": Reentrant,
    "complex": Complex,
    "of one rank": lambda: nn.Sequential(OfOneRank(FEATURES, FEATURES)),
}
BLOCKS = {"swapped": ["0.*"], "complex": ["0"]}
LOSSES = {"own targets": Bootstrapped, "reversed": Reversed}
PROGRAMS = (*FIRST_LAYERS, *LOSSES, "step pre-hook", "late count")


def data(run: Run) -> list[dict[str, Tensor]]:
    """Samples of different weights: no two micro-batches count the same."""
    generator = torch.Generator().manual_seed(0)
    samples = [
        {
            "x": torch.randn(FEATURES, generator=generator),
            "weight": torch.randint(1, 5, (), generator=generator).float(),
        }
        for _ in range(run.samples)
    ]
    if run.overflow >= 0:
        samples[run.overflow]["x"] += MARK
    return samples


def train(run: Run, world: World) -> str:
    """What the run ends with; what it has verified where it does not end before."""
    proof.MOST_ELEMENTS = 0 if run.by_slope else MOST_ELEMENTS
    if run.engine.startswith("deepspeed"):
        allow_fp16()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3))
    if run.program in FIRST_LAYERS:
        model.insert(0, FIRST_LAYERS[run.program]())
    loss = LOSSES.get(run.program, Squares)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if run.program == "step pre-hook":
        optimizer.register_step_pre_hook(_scale_before_step)
    scaler = ScalerConfig(initial_scale_power=3, growth_interval=run.growth_interval)
    try:
        acc = Accumulator(
            model,
            optimizer,
            global_batch_size=run.global_size,
            micro_batch_size=MICRO_SIZE,
            count=None if run.program == "late count" else loss.count,
            max_skips=1000,
            clip_norm=run.clip_norm,
            world=world,
            engine=FSDP2Config(blocks=BLOCKS[run.program]) if run.program in BLOCKS else ENGINES[run.engine],
            precision=PrecisionConfig(name=run.precision, scaler=scaler),
        )
        spec = DataSpec(train=data(run), eval_dataset=None, description="squares", shuffle=False)
        for _ in range(run.epochs):
            for window in acc.windows(spec):
                if run.level == 3:
                    acc.step(window, loss)
                    continue
                late = run.program == "late count"
                if late:
                    acc.verify(window, loss)
                for micro in window:
                    with acc.accumulate():
                        acc.backward(loss(acc.model, micro.batch), loss.count(micro.batch) if late else None)
    except DistaccumError as error:
        return f"{type(error).__name__}: {error}"
    return acc.verified


if __name__ == "__main__":
    give(lambda world: [world.all_gather_object(train(Run(**one), world)) for one in asked()], timeout_s=30)
