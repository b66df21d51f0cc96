"""Run by torchrun: trains in the asked cells, in folders of RUNS: what must be the same on any world."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from distaccum import Trainer, World
from distaccum.config.schema import RunConfig
from distaccum.engines.modules import full_tensor
from tests.support import reproducible
from tests.support.answers import asked, give
from tests.support.reproducible import Cell


def digest(model: nn.Module) -> str:
    """Of the weights, whole; a collective where they are sharded."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole: Tensor = full_tensor(tensor).detach().float()
        found.update(name.encode() + whole.numpy().tobytes())
    return found.hexdigest()


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    model = reproducible.model_of(cell)
    config = RunConfig.from_dict(reproducible.settings(cell))
    trainer = Trainer(model, reproducible.loss_of(cell), reproducible.data_of(cell), config=config, run_dir=folder)
    trainer.fit()
    weights = digest(model)
    if not trainer.is_main:
        return {}
    records = reproducible.records_of(folder)
    everything = hashlib.sha256((json.dumps(records) + weights).encode()).hexdigest()
    skips = sum(not record.get("applied", True) for record in records)
    return {"records": records, "weights": weights, "all": everything, "skips": skips}


def main(_: World) -> list[Any]:
    return [run(Cell(**cell), Path(sys.argv[3]) / str(number)) for number, cell in enumerate(asked())]


if __name__ == "__main__":
    give(main, timeout_s=60)
