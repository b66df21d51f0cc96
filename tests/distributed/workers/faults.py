"""Run by torchrun: programs with one fault each, in a package whose guards may be cut out; writes how each ends.

It is asked a list of ``[fault, verify]``; the fault ``""`` is none. The answer has for each run what every rank says
(empty where it trained to its end), and the largest error of its weights.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import default_collate

from distaccum import Accumulator, DataSpec, World
from distaccum.config.engine import FSDP2Config
from distaccum.engines.modules import full_tensor
from distaccum.errors import DistaccumError
from tests.support.accumulators import over_sgd
from tests.support.answers import asked, give

FEATURES, HIDDEN, TARGETS = 4, 6, 3
GLOBAL_SIZE, MICRO_SIZE, SAMPLES, RATE = 16, 2, 48, 0.05
BRANCHED = (0, 1, 2, 3, 8, 9)  # of a window's samples: in no rank's last micro-batch
Batch = dict[str, Tensor]


def samples() -> list[Batch]:
    """Three windows of them; each counts 1 to 4."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(FEATURES, generator=generator),
            "y": torch.randn(TARGETS, generator=generator),
            "weight": torch.randint(1, 5, (), generator=generator).float(),
            "branch": torch.tensor(float(i % GLOBAL_SIZE in BRANCHED)),
        }
        for i in range(SAMPLES)
    ]


class Net(nn.Module):
    """A branch of it is run only for batches that ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, TARGETS)
        self.branch = nn.Linear(HIDDEN, TARGETS)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        found: Tensor = self.head(hidden)
        return found + branch.unsqueeze(1) * self.branch(hidden) if branch.any() else found


class Branchless(Net):
    """Without the branch."""

    def __init__(self) -> None:
        super().__init__()
        del self.branch

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(x)))
        return found


FAULTS: dict[str, type[Program]] = {}  # by name


class Program:
    """A right program: a loop of a user's over the windows of an epoch. A fault is a subclass that changes one thing.

    Args:
        verify: whether windows are proved: those that the fault shows in.
        world: this rank.
    """

    engine: Any = "ddp"
    net: type[Net] = Branchless
    proved: str | int = "first"
    epochs = 1
    whole_windows = False  # whether acc.step runs them, as the Trainer does

    def __init_subclass__(cls) -> None:
        FAULTS[cls.__name__] = cls

    def __init__(self, world: World, *, verify: bool) -> None:
        self.world = world
        torch.manual_seed(1)
        self.model = self.net()
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=RATE)
        self.before_wrapping()
        self.acc = Accumulator(
            self.wrapped(),
            self.optimizer,
            global_batch_size=GLOBAL_SIZE,
            micro_batch_size=MICRO_SIZE,
            count=self.count,
            world=world,
            engine=self.engine,
            verify=self.proved if verify else "never",
            on_divergence="stop" if verify else "warn",
        )
        self.verify = verify

    # --- what a fault changes

    def before_wrapping(self) -> None:
        """Between the optimizer and the accumulator."""

    def wrapped(self) -> nn.Module:
        return self.model

    def before_window(self, number: int) -> None:
        """Before a window's first micro-batch; windows are numbered from 0."""

    def output(self, batch: Batch) -> Tensor:
        found: Tensor = self.acc.model(batch["x"], batch["branch"])
        return found

    def inside(self, number: int) -> None:
        """After the micro-batch ``number`` of a window, unless it is the last one."""

    def after_window(self) -> None:
        """After a window's step."""

    def count(self, batch: Batch) -> float:
        return float(batch["weight"].sum())

    def loss_of(self, output: Tensor, batch: Batch) -> Tensor:
        return (batch["weight"] * (output - batch["y"]).square().sum(1)).sum()

    frozen: tuple[str, ...] = ()  # parameters that must not move, by what their names begin with

    # --- the run

    def run(self) -> None:
        spec: Any = DataSpec(train=samples(), eval_dataset=None, description="squares", shuffle=False)
        windows = chain.from_iterable(self.acc.windows(spec) for _ in range(self.epochs))
        for number, window in enumerate(windows):
            self.before_window(number)
            if self.whole_windows:
                self.acc.step(window, self.Loss(self))
                self.after_window()
                continue
            if self.verify and self.engine != "ddp" and number % (2 if self.proved == 2 else SAMPLES) == 0:
                self.acc.verify(window, self.Loss(self))
            for i, micro in enumerate(window):
                with self.acc.accumulate():
                    self.acc.backward(self.loss_of(self.output(micro.batch), micro.batch))
                    if i == len(window) - 1:
                        self.inside_last()
                if i < len(window) - 1:
                    self.inside(i)
            self.after_window()
        self.acc.progress  # noqa: B018  what the last window found is raised here

    def inside_last(self) -> None:
        """After the last micro-batch's backward, before the step."""

    class Loss:
        """The same for whole windows."""

        def __init__(self, program: Program) -> None:
            self._program = program
            self.count = program.count

        def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
            return self._program.loss_of(model(batch["x"], batch["branch"]), batch)

    def weights(self) -> dict[str, Tensor]:
        """As they are on this rank; whole."""
        return {name: full_tensor(p.detach()).clone() for name, p in self.model.named_parameters()}


def truth(program: Program) -> dict[str, Tensor]:
    """The weights of a loop in fp64, in one process, over whole batches, that does what the program means to."""
    model = program.net().double()
    model.load_state_dict(program.start)
    data = samples()
    for begin in [*range(0, SAMPLES, GLOBAL_SIZE)] * program.epochs:
        batch = {name: part.double() for name, part in default_collate(data[begin : begin + GLOBAL_SIZE]).items()}
        output = model(batch["x"], batch["branch"])
        loss = (batch["weight"] * (output - batch["y"]).square().sum(1)).sum() / batch["weight"].sum()
        named = dict(model.named_parameters())
        for (name, p), gradient in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
            if not name.startswith(program.frozen or "-"):
                p.data -= RATE * gradient
    return {name: p.detach() for name, p in model.named_parameters()}


def error_of(program: Program) -> float:
    """Of the change of the weights on this rank, relative to the true one, in the 2-norm."""
    right = truth(program)
    found = program.weights()
    wrong = torch.cat([(found[name].double() - right[name]).flatten() for name in right])
    moved = torch.cat([(right[name] - program.start[name].double()).flatten() for name in right])
    return float(wrong.norm() / moved.norm())


# ------------------------------------------------------------------------------------------------ the faults


class UnusedAtBoundary(Program):
    """A layer that the last micro-batch does not use."""

    net = Net


class UnusedAtBoundaryOnZero1(UnusedAtBoundary):
    """The same on zero1: a layer that the last micro-batch does not use."""

    engine = "zero1"


class FrozenAfterWrapping(Program):
    """A layer is frozen after the model was wrapped."""

    frozen = ("body",)

    def before_window(self, number: int) -> None:
        if number == 0:
            self.model.body.requires_grad_(False)


class TrainedAfterWrapping(Program):
    """A layer that was frozen is trained from after the model was wrapped."""

    def before_wrapping(self) -> None:
        self.model.head.requires_grad_(False)

    def before_window(self, number: int) -> None:
        if number == 0:
            self.model.head.requires_grad_(True)


class ProbeBefore(Program):
    """A backward of the user's own before a window."""

    def before_window(self, number: int) -> None:
        x = samples()[number]["x"].unsqueeze(0)
        with torch.enable_grad():
            self.model(x, torch.zeros(1)).square().sum().backward()


class ProbeBeforeOnFSDP2(ProbeBefore):
    """The same on fsdp2: a backward of the user's own before a window."""

    engine = FSDP2Config()


class TwoAccumulators(Program):
    """A GAN: the generator's loss leaves gradients in the discriminator."""

    def before_wrapping(self) -> None:
        self.generator = nn.Linear(FEATURES, FEATURES)
        self.other = over_sgd(self.generator, RATE, (4, 1), world=self.world, verify="never")

    def before_window(self, number: int) -> None:
        for window in self.other.windows([sample["x"] for sample in samples()[:4]]):
            for micro in window:
                with self.other.accumulate():
                    made = self.other.model(micro.batch)
                    self.other.backward(self.model(made, torch.zeros(len(made))).sum(), len(made))


class MeanLoss(Program):
    """The loss is a mean."""

    whole_windows = True

    def loss_of(self, output: Tensor, batch: Batch) -> Tensor:
        return super().loss_of(output, batch) / self.count(batch)


class Clips(Program):
    """``clip_grad_norm_`` after a micro-batch."""

    def inside(self, number: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class ClipsBeforeStep(Program):
    """``clip_grad_norm_`` before the step, in the last micro-batch's block."""

    def inside_last(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


class ClipsOnFSDP2(ClipsBeforeStep):
    """The same on fsdp2: ``clip_grad_norm_`` before the step."""

    engine = FSDP2Config()


class Forgets(Program):
    """``p.grad = None`` inside a window."""

    def inside(self, number: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class Zeroes(Program):
    """``optimizer.zero_grad()`` inside a window."""

    def inside(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class ZeroesModel(Program):
    """``model.zero_grad()`` inside a window, on one rank."""

    def inside(self, number: int) -> None:
        if self.world.is_main:
            self.acc.model.zero_grad(set_to_none=False)


class WritesData(Program):
    """``p.grad.data`` is written, which no version counter sees."""

    def inside_last(self) -> None:
        for parameter in self.model.head.parameters():
            parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]


class StepsByHand(Program):
    """``optimizer.step()`` after each micro-batch."""

    def inside(self, number: int) -> None:
        self.optimizer.step()


class SecondBackward(Program):
    """A backward past the accumulator inside a window."""

    def inside(self, number: int) -> None:
        self.acc.model(samples()[number]["x"].unsqueeze(0), torch.zeros(1)).sum().backward()


class StaleOnFSDP2(Program):
    """fsdp2: a forward without gradients after the backward, so that the next window has old weights (``verify=2``)."""

    engine = FSDP2Config()
    proved = 2

    def inside_last(self) -> None:
        with torch.no_grad():
            self.acc.model(samples()[0]["x"].unsqueeze(0), torch.zeros(1))


class EditsOneRank(Program):
    """A weight is edited in place on one rank."""

    def before_window(self, number: int) -> None:
        if self.world.rank == 1 and number == 0:
            self.model.head.weight.data[0, 0] += 0.1


class RateOfOneRank(Program):
    """The learning rate differs by rank."""

    def before_window(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = RATE * (1 + self.world.rank)


class AverageOfOneRank(Program):
    """A moving average of the weights is put in place on one rank, after the first window."""

    epochs = 10  # until the weights are compared again

    def after_window(self) -> None:
        if self.world.is_main:
            for name, parameter in self.model.named_parameters():
                parameter.data.lerp_(self.start[name], 0.1)


def end_of(name: str, verify: bool, world: World) -> tuple[str, float]:
    """What this rank says, and the error of its weights where it trained to its end."""
    try:
        program = (FAULTS[name] if name else Program)(world, verify=verify)
        program.run()
    except DistaccumError as error:
        return f"{type(error).__name__}: {error}", float("nan")
    return "", error_of(program)


def main(world: World) -> list[dict[str, Any]]:
    found = []
    for name, verify in asked():
        everyone = world.all_gather_object(end_of(name, verify, world))
        found.append({"said": [said for said, _ in everyone], "error": max(error for _, error in everyone)})
    return found


if __name__ == "__main__":
    give(main, timeout_s=30)
