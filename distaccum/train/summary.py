"""The header and the summary of a run, for people."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from torch import nn

from distaccum.accumulation.progress import Progress
from distaccum.config.checks import size_of
from distaccum.data.factory import loading_options
from distaccum.data.loader import padding_share
from distaccum.data.loading_processes import prefetch_factor
from distaccum.data.packing import PackCollator
from distaccum.data.plan.batch import Ids, Plan
from distaccum.data.spec import DataSpec
from distaccum.engines.base import Engine
from distaccum.errors import shorten
from distaccum.precision.selection import describe
from distaccum.train.components import TrainingComponents
from distaccum.train.run_dir import RunDir, State
from distaccum.train.screen import say

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn


# A model in a few lines: its modules with their parameters, what is trained of them, and their memory.

_MOST = 30  # rows


@dataclass(frozen=True)
class ModuleRow:
    """A module of the model's own, or several of one shape that follow each other, or a parameter that is in none.

    Attributes:
        name: as in ``named_modules``; ``blocks.0-11`` for several.
        kind: the class; ``12x Block`` for several.
        parameters: elements of all of them, without those that are another row's already.
        trained: how many of these are trained.
        shared: elements that are another row's already, such as those of a tied weight.
        size: bytes of the parameters.
        dtypes: of the parameters.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    shared: int
    size: int
    dtypes: tuple[str, ...]


def summarize(model: nn.Module) -> list[ModuleRow]:
    """The model's own modules; those without parameters are left out.

    A parameter counts in one row, however often the model has it. Modules of a list or a sequence that follow each
    other and have the same parameters are one row.
    """
    rows: list[ModuleRow] = []
    counted: set[int] = set()
    if any(True for _ in model.children()):
        for name, parameter in model.named_parameters(recurse=False):
            rows.append(_row([name], "Parameter", [parameter], counted))
    for group in _groups("", model):
        parameters = [parameter for _, module in group for parameter in module.parameters()]
        if parameters:
            rows.append(_row([path for path, _ in group], type(group[0][1]).__name__, parameters, counted))
    return rows


def table(rows: Sequence[ModuleRow]) -> list[str]:
    """The rows as aligned lines: name, class, parameters, memory, types, and what is frozen or counted elsewhere."""
    shown = rows[:_MOST]
    columns = ([r.name for r in shown], [r.kind for r in shown], [f"{r.parameters:,}" for r in shown])
    sizes = [size_of(row.size) for row in shown]
    name_width, kind_width, number_width, size_width = (max(map(len, c), default=0) for c in (*columns, sizes))
    lines = [
        f"{name:<{name_width}}  {kind:<{kind_width}}  {number:>{number_width}}  {size:>{size_width}}  {_note(row)}"
        for name, kind, number, size, row in zip(*columns, sizes, shown, strict=True)
    ]
    if left := rows[_MOST:]:
        lines.append(f"... {len(left)} more rows")
    return [line.rstrip() for line in lines]


def _note(row: ModuleRow) -> str:
    words = list(row.dtypes)
    frozen = row.parameters - row.trained
    if frozen:
        words.append("frozen" if frozen == row.parameters else f"{frozen:,} frozen")
    if row.shared:
        words.append(f"{row.shared:,} tied")
    return ", ".join(words)


def _groups(path: str, module: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """The children, with runs of one shape together, and those of a list of modules in its place."""
    prefix = f"{path}." if path else ""
    for _, run in groupby(module.named_children(), key=lambda child: _shape(*child)):
        group = [(f"{prefix}{name}", child) for name, child in run]
        if isinstance(group[0][1], nn.ModuleList):
            for inner, each in group:
                yield from _groups(inner, each)
        else:
            yield group


def _shape(name: str, module: nn.Module) -> object:
    """Equal for modules that are shown in one row: numbered ones, of one class and with the same parameters."""
    if not name.isdecimal():
        return name
    parameters = (
        (path, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for path, parameter in module.named_parameters(remove_duplicate=False)
    )
    return tuple((path, type(inner)) for path, inner in module.named_modules()), tuple(parameters)


def _row(paths: list[str], kind: str, parameters: list[nn.Parameter], counted: set[int]) -> ModuleRow:
    """The row of these modules; ``counted`` has the parameters that are in a row already, and gets these."""
    every = {id(parameter): parameter for parameter in parameters}
    own = [parameter for number, parameter in every.items() if number not in counted]
    counted.update(every)
    return ModuleRow(
        name=_span(paths),
        kind=kind if len(paths) == 1 else f"{len(paths)}x {kind}",
        parameters=sum(map(_elements, own)),
        trained=sum(_elements(parameter) for parameter in own if parameter.requires_grad),
        shared=sum(map(_elements, every.values())) - sum(map(_elements, own)),
        size=sum(_elements(parameter) * parameter.element_size() for parameter in own),
        dtypes=tuple(dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in every.values())),
    )


def _elements(parameter: nn.Parameter) -> int:
    """Of the whole parameter, also where DeepSpeed's stage 3 has taken it apart."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _span(paths: list[str]) -> str:
    """``blocks.0-11`` of ``blocks.0`` to ``blocks.11``."""
    first, last = paths[0].split("."), paths[-1].split(".")
    return ".".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


_MARGIN = 11  # columns of the header's names


def _class_of(model: nn.Module) -> str:
    """The model's own class, where ``fully_shard`` has made one of it and of torch's."""
    classes = type(model).__mro__
    return next(kind.__name__ for kind in classes if not kind.__module__.startswith("torch.distributed.fsdp"))


def print_header(
    components: TrainingComponents,
    engine: Engine,
    run_dir: RunDir,
    note: str,
    console: Console,
    *,
    modules: Sequence[ModuleRow] = (),
) -> None:
    """Prints model, data, engine, precision and the batch plan; of the model the modules as well."""
    plan, config = components.plan, components.config
    lines = {
        "run": f"{run_dir.path}" + (f" ({note})" if note else ""),
        "world": f"{plan.world_size} x {engine.device.type}",
        "engine": f"{config.engine.name}: {engine.describe()}",
        "precision": describe(components.model, components.policy),
        "data": components.data.description,
        "model": f"{_class_of(components.model)}, {components.parameters:,} parameters",
        **_loading(components),
        "plan": plan.describe()[0],
        "epoch": f"{plan.describe()[1]}; {_updates(components)}",
    }
    if reason := components.memory.get("reason"):
        lines["memory"] = str(reason)
    if components.groups:
        lines["groups"] = "; ".join(map(str, components.groups))
    if components.data.lengths is not None and not plan.is_stream:
        lines["pad"] = _padding(components.data, components.data.lengths, plan, config.batch.group_by_length)
    for name, line in lines.items():
        say(console, f"{name:<{_MARGIN}}{line}", indent=_MARGIN)
        for row in table(modules) if name == "model" else ():
            say(console, f"{'':<{_MARGIN}}{row}", indent=_MARGIN + 2)


def print_taken_over(progress: Progress, ranks: int, console: Console) -> None:
    """Prints that this process is rank 0 from here on, in the place of one that was lost."""
    line = f"process {os.getpid()} is rank 0 now, of {ranks}; {progress.window} windows are done"
    say(console, f"{'rank 0':<{_MARGIN}}{line}", indent=_MARGIN)


def _loading(components: TrainingComponents) -> dict[str, str]:
    """What the loading processes that distaccum starts have ahead, if there are any."""
    config, plan = components.config.trainer, components.plan
    workers = loading_options(
        components.data,
        num_workers=config.num_workers,
        prefetch_windows=config.prefetch_windows,
        options=asdict(config.loader),
        most_ahead=components.most_ahead,
    )
    factor = prefetch_factor(workers, plan.items_of_window)
    if factor is None:
        return {}
    items = "samples" if plan.is_stream else "micro-batches"
    ahead = f"up to {workers.num_workers * factor} {items} ahead"
    return {"loading": f"{workers.num_workers} processes on each rank, {ahead} (a window has {plan.items_of_window})"}


def _updates(components: TrainingComponents) -> str:
    if components.evaluates_alone:
        return "no update to make, only an evaluation"
    return f"{components.total_steps} updates to make"


def _padding(data: DataSpec, lengths: Ids, plan: Plan, grouped: bool) -> str:
    plain, sorted_ = (padding_share(lengths, plan, grouped=one, collate=data.collate) for one in (False, True))
    if isinstance(data.collate, PackCollator):
        alone = padding_share(lengths, plan, grouped=False, collate=data.collate.bare)
        return f"{plain:.1%} of the tokens of a micro-batch are padding ({alone:.1%} with a document a row)"
    first, second = (sorted_, plain) if grouped else (plain, sorted_)
    other = "without grouping by length" if grouped else "with batch.group_by_length=true"
    return f"{first:.1%} of the tokens of a micro-batch are padding ({second:.1%} {other})"


def not_finite(evaluation: Mapping[str, float]) -> str:
    """Which results of the last evaluation are NaN or infinite, in words; empty for none."""
    bad = [f"{name} is {value}" for name, value in evaluation.items() if not math.isfinite(value)]
    return f"in the last evaluation, {shorten(bad)}" if bad else ""


def print_summary(
    components: TrainingComponents,
    progress: Progress,
    evaluation: Mapping[str, float],
    run_dir: RunDir,
    console: Console,
    *,
    state: State,
    stop_reason: str,
) -> None:
    """Prints how the run ended, and for text what simple models reach on the same split."""
    if state is State.PREEMPTED:
        saved = f"saved in {run_dir.checkpoints}; the same command with resume=auto resumes it"
        if not components.config.checkpoint.saves:
            saved = "checkpoint.every=0, so nothing is saved"
        elif not progress.step:
            saved = "nothing to save yet; the same command with resume=auto begins"
        where = f"{progress.step} of {components.total_steps} updates"
        say(console, f"preempted ({stop_reason}): {where}; {saved}")
        return
    rows = {name.removeprefix("eval_").replace("_", " "): value for name, value in evaluation.items()}
    whole = components.config.trainer.eval_samples is None
    baselines = components.data.baselines() if whole and "bits per byte" in rows else {}
    done = f"{progress.step} updates, {progress.samples:,} samples, {progress.skipped} skipped"
    if components.evaluates_alone:
        done = f"evaluated the weights after {progress.step} updates"
    say(console, f"done: {done}; {run_dir.path}")
    if stop_reason:
        say(console, f"stopped early: {stop_reason}")
    if not_finite(evaluation):
        say(console, not_finite(evaluation), style="bold red")
    if rows:
        print_results(rows, baselines, console)


def print_results(rows: Mapping[str, float], baselines: Mapping[str, float], console: Console) -> None:
    """Prints a table of numbers by name. Names are anybody's, and no markup of ``rich``: ``f1[macro]``."""
    width = max(14, *map(len, rows)) + 2
    lines = ["held-out", *(f"  {name:<{width}}{value:.4f}" for name, value in rows.items())]
    lines += [f"    {name:<{width - 2}}{value:.4f}  (bits per byte, same split)" for name, value in baselines.items()]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
