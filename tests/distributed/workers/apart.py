"""Run on 2 ranks: loops in which one rank does something else. Writes each rank's message or error, by case."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from distaccum import Accumulator, DataSpec, Trainer, World
from distaccum.errors import DistaccumError
from tests.support.accumulators import Of
from tests.support.answers import give
from tests.support.runs import At, settings

SAMPLES, GLOBAL_SIZE, MICRO_SIZE = 21, 8, 2  # the last window: two micro-batches on rank 0, one or two on rank 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 6), nn.Linear(6, 1)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.enter(x))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encode(x))
        return out


def make(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(2)
    return Net().to(dtype)


def data(dtype: torch.dtype = torch.float32, samples: int = SAMPLES) -> list[Tensor]:
    drawn = torch.randn(samples, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return list(drawn.to(dtype))


def squares(model: Any, batch: Tensor) -> Tensor:
    total: Tensor = (model(batch) - batch[:, :1]).square().sum()
    return total


def truth(skipped: tuple[int, ...] = (), epochs: int = 1) -> nn.Module:
    """Whole windows in fp64 on one process."""
    model = make(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.05)
    starts = [start for _ in range(epochs) for start in range(0, SAMPLES, GLOBAL_SIZE)]
    for number, start in enumerate(starts):
        batch = torch.stack(data(torch.float64)[start : start + GLOBAL_SIZE])
        if number not in skipped:
            optimizer.zero_grad()
            (squares(model, batch) / len(batch)).backward()
            optimizer.step()
    return model


def error(model: nn.Module, skipped: tuple[int, ...] = (), epochs: int = 1) -> float:
    """Of the change of the weights, relative."""
    ends, starts = truth(skipped, epochs).parameters(), make(torch.float64).parameters()
    triples = list(zip(model.parameters(), ends, starts, strict=True))
    off = sum(float((p.double() - q).square().sum()) for p, q, _ in triples)
    return float((off / sum(float((q - s).square().sum()) for _, q, s in triples)) ** 0.5)


def accumulator(model: nn.Module, world: World, *, late: bool = False, **options: Any) -> Accumulator:
    if not late:
        options["count"] = len
    optimizer = SGD(model.parameters(), lr=0.05)
    sizes = {"global_batch_size": GLOBAL_SIZE, "micro_batch_size": MICRO_SIZE}
    return Accumulator(model, optimizer, world=world, **sizes, **options)


def plain(samples: int = SAMPLES) -> Any:
    return DataSpec(train=data(samples=samples), eval_dataset=None, description="apart", shuffle=False)


class UserError(RuntimeError):
    """Of the user's code."""


def abandoned(
    world: World, *, at: int, where: str, window: int = 1, late: bool = False, all_ranks: bool = False
) -> float:
    """Rank 1 fails in a micro-step, and goes on after abandon()."""
    model = make()
    acc = accumulator(model, world, late=late)

    def micro_step(batch: Tensor, *, fails: bool) -> None:
        with acc.accumulate():
            if fails and where == "before":
                raise UserError
            total = squares(acc.model, batch)
            if fails and where == "forward":
                raise UserError
            acc.backward(total, len(batch) if late else None)
            if fails and where == "inside":
                acc.abandon()
            if fails and where == "backward":
                raise UserError

    for number, opened in enumerate(acc.windows(plain())):
        for i, micro in enumerate(opened):
            try:
                fails = number == window and i == at % len(opened) and (all_ranks or world.rank == 1)
                micro_step(micro.batch, fails=fails)
            except UserError:
                acc.abandon()
    state = acc.state_dict()["progress"]
    assert (state["window"], state["step"], state["nonfinite"]) == (3, 2, 0)
    return error(model, (window,))


def out_of_order(world: World, *, how: str) -> None:
    """Rank 1 leaves a micro-batch or a window in the middle, or a loop."""
    acc = accumulator(make(), world)
    if how == "resumes alone" and world.rank == 1:
        acc.resume("nowhere")
    for number, window in enumerate(acc.windows(plain())):
        odd = number == 1 and world.rank == 1
        for micro in window:
            if odd and how == "break":
                break
            if odd and how == "continue":
                continue
            with suppress(UserError), acc.accumulate():
                total = squares(acc.model, micro.batch)
                if odd and how == "no backward":
                    continue
                if odd and how == "goes on after an error":
                    raise UserError
                acc.backward(total)
        if odd and how.startswith("leaves "):
            break
    if how == "leaves and resumes":
        acc.resume("nowhere")
    if how == "leaves and closes":
        acc.close()
    if how == "leaves for other data" and world.rank == 1:
        next(acc.windows(plain()))
    acc.state_dict()


def edited(world: World, *, then: str) -> None:
    """Rank 1 edits a weight in the last window."""
    model = make()
    acc = accumulator(model, world)
    for window in acc.windows(plain()):
        for micro in window:
            with acc.accumulate():
                acc.backward(squares(acc.model, micro.batch))
    if world.rank == 1:
        model.head.bias.data.add_(1.0)
    if then == "state":
        acc.state_dict()
    elif then == "close":
        acc.close()
    else:
        with suppress(ZeroDivisionError), ExitStack() as stack:
            if world.rank == 1:  # alone, on the way out of an error
                stack.callback(acc.close)
            _ = 1 // 0


def zipped(world: World, *, order: str, samples: int = SAMPLES, late: bool = False) -> float:
    """Two accumulators over the same windows, in one micro-step."""
    models = make(), make()
    first, second = (accumulator(model, world, late=late) for model in models)
    for one, other in zip(first.windows(plain(samples)), second.windows(plain(samples)), strict=True):
        for micro, again in zip(one, other, strict=False):
            given = (len(micro.batch),) if late else ()
            with first.accumulate(), second.accumulate():
                pair = [(first, micro.batch), (second, again.batch)]
                for acc, batch in pair if order == "first" else reversed(pair):
                    acc.backward(squares(acc.model, batch), *given)
    return max(map(error, models))


def nested(world: World) -> None:
    acc, loader = accumulator(make(), world), plain()

    def run(windows: Iterator[Any]) -> Iterator[None]:
        for window in windows:
            for micro in window:
                with acc.accumulate():
                    acc.backward(squares(acc.model, micro.batch))
            yield

    for _ in run(acc.windows(loader)):
        list(run(acc.windows(loader)))


def by_parts(world: World, *, how: str) -> float:
    """The forward by a method and a part of the model, as people write it who come from DDP."""
    model = make()
    acc = accumulator(model, world)
    for window in acc.windows(plain()):
        for micro in window:
            with acc.accumulate():
                called: Any = acc.model.module if how == "module" else acc.model
                total = (called.head(called.encode(micro.batch)) - micro.batch[:, :1]).square().sum()
                acc.backward(total)
    return error(model)


def carried(world: World) -> None:
    """The hidden state of one micro-batch goes into the next one."""
    acc, hidden = accumulator(make(), world), torch.zeros(1)
    for window in acc.windows(plain()):
        for micro in window:
            with acc.accumulate():
                out = acc.model(micro.batch) + hidden.mean()
                hidden = out.square()
                acc.backward(out.square().sum())


def learned(world: World, *, options: dict[str, Any]) -> None:
    """A temperature outside of the model, in an optimizer of its own."""
    temperature = nn.Parameter(torch.tensor(1.5))
    own = SGD([temperature], lr=0.05)
    acc = accumulator(make(), world, **options)
    for window in acc.windows(plain()):
        for micro in window:
            with acc.accumulate():
                acc.backward((acc.model(micro.batch) * temperature).square().sum())
        own.step()


def critic(world: World, *, zeroing: bool) -> float:
    """A critic that is not frozen: another loss trains it, on gradients of its own."""
    model, judge = make(), nn.Linear(1, 1)
    nn.init.ones_(judge.weight)
    nn.init.zeros_(judge.bias)
    acc, own = accumulator(model, world), SGD(judge.parameters(), lr=0.0)
    for window in acc.windows(plain()):
        for micro in window:
            with acc.accumulate():
                acc.backward(judge(acc.model(micro.batch) - micro.batch[:, :1]).square().sum())
        own.zero_grad(set_to_none=zeroing)
        judge(torch.ones(2, 1)).sum().backward()
        own.step()
    return error(model)


def run(world: World) -> None:
    model = make()
    config = settings((GLOBAL_SIZE, MICRO_SIZE), {"max_steps": 3}, optim={"clip_norm": None}, schedule={})
    edit = At(3, lambda _: world.is_main or model.head.bias.data.add_(1.0))  # after the last update
    trainer = Trainer(
        model,
        Of(squares),
        plain(),
        optimizer=SGD(model.parameters(), lr=0.05),
        callbacks=[edit],
        run_dir=Path(sys.argv[1]).parent / "run",
        config=config,
    )
    trainer.fit()


PLACES = ("before", "forward", "inside", "backward")
CASES: dict[str, Callable[[World], Any]] = {
    **{f"abandoned, {where}": partial(abandoned, at=0, where=where) for where in PLACES},
    **{f"abandoned at the boundary, {where}": partial(abandoned, at=-1, where=where) for where in PLACES[:2]},
    "abandoned at the boundary, verified": partial(abandoned, at=-1, where="forward", window=0),
    "abandoned at the boundary, last": partial(abandoned, at=-1, where="forward", window=2),
    "abandoned at the boundary, counted late": partial(abandoned, at=-1, where="backward", late=True),
    "abandoned after the boundary": partial(abandoned, at=-1, where="backward"),
    "abandoned after the boundary, all": partial(abandoned, at=-1, where="backward", all_ranks=True),
    **{
        how: partial(out_of_order, how=how)
        for how in (
            *("break", "continue", "no backward", "goes on after an error"),
            *("resumes alone", "leaves and saves", "leaves and resumes", "leaves and closes", "leaves for other data"),
        )
    },
    **{f"edited, {then}": partial(edited, then=then) for then in ("state", "close", "error")},
    **{f"zipped, {order}": partial(zipped, order=order) for order in ("first", "second")},
    "zipped, counted late": partial(zipped, order="first", late=True),
    "zipped, an empty rank": partial(zipped, order="first", samples=2 * GLOBAL_SIZE + 1),
    "nested": nested,
    **{f"by parts of acc.{how}": partial(by_parts, how=how) for how in ("module", "model")},
    "edited, a run": run,
    "carried": carried,
    **{f"learned, {engine}": partial(learned, options={"engine": engine}) for engine in ("ddp", "zero1", "fsdp2")},
    **{f"critic, {zeroing}": partial(critic, zeroing=zeroing) for zeroing in (False, True)},
}


def main(world: World) -> dict[str, Any]:
    logging.getLogger("distaccum").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        said: Any
        try:
            said = case(world)
        except DistaccumError as problem:
            said = f"{type(problem).__name__}: {problem}"
        found[name] = world.all_gather_object(said)
    return found


if __name__ == "__main__":
    give(main)
