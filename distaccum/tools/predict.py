"""``distaccum predict RUN out=FILE``: what a run's best weights, or else its newest, say of each sample.

A row a sample, in the dataset's order: of a classifier the class, its name where that is known, and its probability; of
a language model the loss a token. In one process, or under torchrun on several, which each hold the model whole,
whatever engine trained it. Exit codes: 0 done, 2 no such run, or nothing to predict.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distaccum import program
from distaccum.checkpoint import state, weights
from distaccum.checkpoint.files import write_text
from distaccum.checkpoint.store import find
from distaccum.config.instantiate import build
from distaccum.config.schema import RunConfig
from distaccum.data.datasets.labelled import LabelledText
from distaccum.data.spec import DataSpec
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, ConfigError, DistaccumError, shorten
from distaccum.losses.base import AnyLoss, Loss, is_window_loss
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.losses.normalize import as_counts, as_loss_sums
from distaccum.tools.arguments import Arguments
from distaccum.tools.export import average_evaluated
from distaccum.tools.hugging_face import class_names
from distaccum.tools.inference import agreed, output_of, predict
from distaccum.tools.longest import longest_micro_batch
from distaccum.tools.rows import place, read_rows
from distaccum.train.components import TrainingComponents, build_components, build_data, build_model

_EPILOG = """\
settings:
  out=FILE.jsonl          or FILE.csv: where to write
  data=held_out           the samples that the run held out, the default; or one of several such sets by name
  data=train              those that it trained on
  data=FILE               a CSV, JSON-lines or Parquet file with the column of texts, of a run with data=labelled
  data.KEY=VALUE          another value of a setting of the run's data
  batch.micro_size=64     the most samples of one forward; by default the run's

examples:
  distaccum predict runs/NAME out=predictions.jsonl
  torchrun --nproc-per-node=2 -m distaccum predict runs/NAME data=new.csv out=predictions.csv

exit codes: 0 done; 2 no such run, or nothing to predict
"""
_KEPT = ("model", "loss", "precision", "seed")
_MICRO = 32  # where the run found its own
_HELD_OUT, _TRAIN = "held_out", "train"
Rows = list[dict[str, Any]]


def predictions(run: Path, out: Path, settings: Mapping[str, str], world: World) -> tuple[int, Path]:
    """Writes the predictions; gives their number, and the checkpoint. A collective.

    Raises:
        CheckpointError: the run has no checkpoint, or it is damaged.
        ConfigError: the run is a program's own, a setting is none of those, or nothing can be predicted.
        OSError: the file cannot be written.
    """
    checkpoint = agreed(world, partial(_best_or_newest, run))
    record = state.read(checkpoint).run.config
    if not (run / ".hydra").is_dir():
        problem = "was trained by a program, and its model and data are objects that no configuration names"
        raise ConfigError("RUN", run, problem, "Use trainer.load_best() and trainer.predict(dataset) in the program")
    components = _components(record, settings, world)
    weights.check(components.model, checkpoint, key="RUN")
    weights.fill(components.model, checkpoint, average=average_evaluated(checkpoint))
    rows = _rows(components, _dataset(components.data, settings.get("data", _HELD_OUT), record["data"]), world)
    if world.is_main:
        write_text(out, _as_csv(rows) if out.suffix == ".csv" else "".join(json.dumps(row) + "\n" for row in rows))
    return len(rows), checkpoint


def _best_or_newest(run: Path) -> Path:
    try:
        return find(run, best=True)
    except CheckpointError:
        return find(run)


def _components(record: Mapping[str, Any], settings: Mapping[str, str], world: World) -> TrainingComponents:
    """The run's model, data and loss; on any number of ranks, each with the whole model."""
    data = dict(record["data"])
    stated = record.get("batch", {}).get("micro_size")
    micro = stated if isinstance(stated, int) else _MICRO
    for key, value in settings.items():
        if key == "batch.micro_size" and value.isdecimal() and int(value):
            micro = int(value)
        elif key.startswith("data."):
            data[key.removeprefix("data.")] = _value(value)
        elif key != "data":
            raise ConfigError(key, value, "is no setting of predict", "Use out, data, data.KEY or batch.micro_size")
    trainer = {
        key: value for key, value in record.get("trainer", {}).items() if key in ("num_workers", "loader", "backend")
    }
    batch = {"global_size": micro * world.size, "micro_size": micro}
    kept = {key: record[key] for key in _KEPT}
    config = RunConfig.from_dict({**kept, "data": data, "batch": batch, "trainer": {**trainer, "max_steps": 0}})
    spec = build_data(config.data)
    if isinstance(spec, LabelledText) and data != record["data"]:
        problem = "would number the classes of other data than the run's"
        raise ConfigError("data", "KEY=VALUE", problem, "Use data=FILE, which keeps the classes of the run")
    model, loss = build_model(config, spec), build("loss", config.loss)
    return build_components(config, spec, model, loss, world_size=world.size, device=world.device)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _dataset(data: DataSpec, which: str, stated: Mapping[str, Any]) -> Any:
    """The samples, in their order."""
    sets = data.held_out
    if which == _HELD_OUT and len(sets) == 1:
        return next(iter(sets.values()))
    if which == _TRAIN:
        return data.train
    if which in sets:
        return sets[which]
    if not Path(which).is_file():
        known = ", ".join([_TRAIN, *(name or _HELD_OUT for name in sets)])
        raise ConfigError("data", which, "is neither a file nor a set of the run's samples", f"Use one of {known}")
    if not isinstance(data, LabelledText):
        problem = f"is a file, and the run's data ({stated.get('_target_')}) are read by a function of settings"
        raise ConfigError(
            "data", which, problem, "Use data.path=FILE, and data=train or data=held_out of what it gives"
        )
    column, texts = str(stated.get("text", "text")), list[str]()
    for line, row in read_rows(which):
        if column not in row:
            problem = f"{place(which, line)} has no column {column!r}"
            raise ConfigError("data", which, problem, f"It has {shorten(list(row))}")
        if not isinstance(row[column], str | int | float):
            problem = f"{place(which, line)} has no text in column {column!r}"
            raise ConfigError("data", which, problem, "Mend that line, or take it out")
        texts.append(str(row[column]))
    if not texts:
        raise ConfigError("data", which, "has no rows", "Give a file with samples to predict")
    found = data.tokenizer(texts, truncation=True, max_length=stated.get("max_length", 256))["input_ids"]
    if not all(found):
        problem = f"sample {found.index([])} has no token in column {column!r}"
        raise ConfigError("data", which, problem, "Give it a text, or take it out")
    return [{"input_ids": (ids := torch.tensor(each)), "attention_mask": torch.ones_like(ids)} for each in found]


def _rows(components: TrainingComponents, dataset: Any, world: World) -> Rows:
    loss: Any = components.loss
    if is_window_loss(loss):
        problem = "compares samples with each other, and predicts nothing of one"
        raise ConfigError("loss", type(loss).__name__, problem, "Use trainer.predict(dataset), which represents them")
    problem = "single_label" if isinstance(loss, CrossEntropy) else getattr(loss, "problem", "")
    names = class_names(components.data, components.model)
    if problem == "single_label" and _labels(longest_micro_batch(components.data, 1)) > 1:
        alone = DataLoader(
            dataset, batch_size=1, collate_fn=components.data.collate
        )  # a batch's loss is then a sample's
        found = predict(components, world, alone, lambda model, batch: _loss_of(loss, model, batch))
        return _numbered(found)
    if problem == "single_label":
        found = predict(components, world, dataset, lambda model, batch: _class_of(loss, model, batch))
        rows = _numbered(found)
        return [row | {"name": names[row["class"]]} if row["class"] < len(names) else row for row in rows]
    found = predict(components, world, dataset, None)
    if problem == "multi_label":
        rows = _numbered({"probabilities": found.double().sigmoid()})
        return [row | {"names": _over_half(names, row["probabilities"])} for row in rows]
    if problem == "regression" and found.ndim > 1 and found.shape[1:].numel() == 1:
        found = found.flatten()
    if isinstance(found, Tensor):
        found = {"value": found}
    return _numbered(found)


def _over_half(names: Sequence[str], probabilities: Sequence[float]) -> list[str]:
    return [name for name, probability in zip(names, probabilities, strict=False) if probability > 0.5]  # noqa: PLR2004


def _labels(batch: Any) -> int:
    """How many a sample has, of a batch of one."""
    return int((batch["labels"] if isinstance(batch, Mapping) else batch[1]).numel())


def _class_of(loss: AnyLoss, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    logits = output_of(loss, model, batch)
    probability, number = logits.flatten(1).double().softmax(-1).max(-1)
    return {"class": number, "probability": probability}


def _loss_of(loss: Loss, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    count = sum(as_counts(loss.count(batch)).values())
    total = sum(as_loss_sums(loss(model, batch)).values(), torch.zeros((), device=next(model.parameters()).device))
    return {"loss": (total.double() / (count or 1)).reshape(1), "count": torch.tensor([count])}


def _numbered(columns: Any) -> Rows:
    if not isinstance(columns, Mapping):
        problem = f"gives a {type(columns).__name__} for a batch, which makes no row a sample"
        raise ConfigError("model", "output", problem, "Use trainer.predict(dataset, function) in a program")
    lists = {
        name: column.tolist() if isinstance(column, Tensor) else [row.tolist() for row in column]
        for name, column in columns.items()
    }
    return [
        {"index": i, **dict(zip(lists, row, strict=True))} for i, row in enumerate(zip(*lists.values(), strict=True))
    ]


def _as_csv(rows: Rows) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    return text.getvalue()


def main() -> None:
    """Runs ``distaccum predict``."""
    program.start()
    description = "Writes what a run's best weights, or else its newest, say of each sample."
    parser = Arguments("predict", description, _EPILOG)
    parser.add_argument("run", type=Path, help="a run directory, as hydra.run.dir names it")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="see below; out=FILE is needed")
    given = parser.of()
    for one in given.settings:
        if not all(one.partition("=")):
            parser.exit(2, f"{parser.prog}: {one}: is no setting. Write KEY=VALUE, as in data=held_out\n")
    settings = dict(one.partition("=")[::2] for one in given.settings)
    out = Path(settings.pop("out", ""))
    if out.suffix not in (".jsonl", ".csv"):
        shown = f"out={out if out.name else ''}"
        parser.exit(2, f"{parser.prog}: {shown}: no file to write to. Use out=predictions.jsonl or .csv\n")
    if not out.parent.is_dir():
        parser.exit(2, f"{parser.prog}: out={out}: there is no folder {out.parent}\n")
    if not given.run.is_dir():
        parser.exit(2, f"{parser.prog}: {given.run}: there is no such run\n")
    if not (given.run / "checkpoints").is_dir():
        parser.exit(2, f"{parser.prog}: {given.run}: holds no checkpoints. Name a run directory that does\n")
    try:
        number, checkpoint = predictions(given.run, out, settings, World.join())
    except (DistaccumError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    program.say(f"{out}: {number} predictions by {checkpoint}\n")


if __name__ == "__main__":
    main()
