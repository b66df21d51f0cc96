"""Run alone: trains where the address space is too small for a micro-batch; errors beside fp64, shapes that failed."""

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import DataSpec
from distaccum.tools.memory import LiveMemory
from tests.support.accumulators import over_sgd

ROWS, WIDTH, MICRO, WINDOWS, RATE = 256, 512, 128, 2, 1.0
_COPIES = 64  # 128 KiB each of a sample, and no more weights


class Wide(nn.Module):
    """Many activations, few weights: each sample is looked at through the same layer again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        wide = torch.stack([torch.sin((1 + k) * x) for k in range(_COPIES)], dim=1)
        for _ in range(4):
            wide = torch.tanh(wide + x.unsqueeze(1))
        return self.leave(wide.mean(1)).squeeze(-1)


def squares(model: Any, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = (model(batch["x"]) - batch["y"]).square().sum()
    return found


def used() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """Within the block the address space grows by so many bytes at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Wide()
    x, y = torch.randn(WINDOWS * ROWS, 8), torch.randn(WINDOWS * ROWS)
    samples = [{"x": row, "y": value} for row, value in zip(x, y, strict=True)]
    with LiveMemory("cpu") as live, torch.autograd.set_multithreading_enabled(False):
        squares(model, {"x": x[:MICRO], "y": y[:MICRO]}).backward()
    model.zero_grad()
    acc = over_sgd(model, RATE, (ROWS, MICRO), count=lambda batch: len(batch["y"]), verify="never")
    errors = []
    source = DataSpec(train=samples, eval_dataset=None, description="", shuffle=False)
    for number, window in enumerate(acc.windows(source)):
        before = {name: p.detach().double() for name, p in model.named_parameters()}
        with at_most(int(0.7 * live.peak)):
            acc.step(window, squares)
        truth = Wide().double()
        truth.load_state_dict(before)
        part = slice(number * ROWS, (number + 1) * ROWS)
        loss = squares(truth, {"x": x[part].double(), "y": y[part].double()}) / ROWS
        loss.backward()  # type: ignore[no-untyped-call]
        moved = [(before[name] - p.detach().double()) / RATE for name, p in model.named_parameters()]
        exact = [p.grad for p in truth.parameters()]
        plain = Wide()
        plain.load_state_dict({name: value.float() for name, value in before.items()})
        (squares(plain, {"x": x[part], "y": y[part]}) / ROWS).backward()  # type: ignore[no-untyped-call]
        loop = [p.grad for p in plain.parameters()]
        errors.append({"own": _off(moved, exact), "plain": _off(loop, exact)})
    acc.close()
    answer = {"errors": errors, "failed": list(acc.engine.memory_marks.failed), "peak": live.peak}
    Path(sys.argv[1]).write_text(json.dumps(answer))


def _off(found: Any, truth: Any) -> float:
    wrong = sum(float((f.double() - t).square().sum()) for f, t in zip(found, truth, strict=True))
    return float((wrong / sum(float(t.square().sum()) for t in truth)) ** 0.5)


if __name__ == "__main__":
    main()
