"""Run as FOLDER ENGINE: extra state and odd buffers, at once and resumed, in the same bits; or a bad ``callback``."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distaccum import DataSpec, Trainer
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.distributed.environment import LaunchEnvironment
from distaccum.engines.state import from_bytes
from distaccum.train.callbacks import Callback, Run
from tests.support.accumulators import SQUARED_ERRORS
from tests.support.runs import settings

DTYPES = (torch.complex128, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool)


class Odd(nn.Module):
    """Counts its training forwards, and has buffers that a gradient never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 1)
        self.seen = {"rows": 0, "largest": torch.zeros(())}
        for dtype in DTYPES:
            value = torch.arange(3).to(dtype) if dtype is not torch.bool else torch.tensor([True, False, True])
            self.register_buffer(str(dtype).partition(".")[2], value)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen["rows"] += 4  # as many on every rank, whoever is asked
        out: Tensor = self.head(self.body(x).tanh())
        return out


class Fails(Callback):
    def on_eval(self, run: Run, results: Mapping[str, float]) -> None:
        if LaunchEnvironment.current().rank == 1 and run.progress.step == 2:
            raise ZeroDivisionError("of the callback")


def _run(folder: Path, engine: str, steps: int, callbacks: tuple[Callback, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 4, generator=generator)
    data = DataSpec(
        train=[(row, row.sum(0, keepdim=True)) for row in x], eval_dataset=[(x[0], x[0, :1])] * 4, description=""
    )
    trainer = {"max_steps": steps, "log_every": 1, "eval_every": 2}
    config = settings((16, 4), trainer, save=2, checkpoint={"keep": 0}, resume="auto")
    torch.manual_seed(0)
    model = Odd()
    Trainer(model, SQUARED_ERRORS, data, engine=engine, config=config, run_dir=folder, callbacks=callbacks).fit()


def _content(folder: Path) -> dict[str, Any]:
    files = TensorFiles(folder / "checkpoints" / "step-4")
    bits = {
        name: (t.dtype, t.reshape(-1).view(torch.uint8).tolist()) for name, t in files.items() if "_extra" not in name
    }
    extra = from_bytes(files["_extra_state"])
    return bits | {"rows": extra["rows"], "largest": extra["largest"].item()}


def main(folder: Path, engine: str) -> None:
    if engine == "callback":
        _run(folder / "fails", "ddp", 4, (Fails(),))
        return
    _run(folder / "whole", engine, 4)
    for steps in (2, 4):
        _run(folder / "parts", engine, steps)
    whole, parts = _content(folder / "whole"), _content(folder / "parts")
    assert whole == parts
    assert whole["rows"] > 0
    assert {dtype for dtype, *_ in (v for v in whole.values() if isinstance(v, tuple))} == {torch.float32, *DTYPES}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
